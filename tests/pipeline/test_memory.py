"""The memory model by hand-made figures."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.counted_rules import ADAMW, COMPACT_ADAMW, COMPACT_MUON, FULL, MUON, SPLIT
from tests.support.random_costs import costs, partitions
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.memory import (
    MemoryLimits,
    ParameterCounts,
    device_memory,
    host_state,
    rounding,
    rounds_in_flight,
    stage_gradient_bytes,
    stage_weight_bytes,
)
from torchround.pipeline.partition import Partition, StageKind, StageTask, evaluation_tasks, step_tasks
from torchround.pipeline.update_costs import RuleCosts, UpdateCosts

# weights, gradients, activations, boundary, workspace
LAYERS = Costs(
    (
        LayerCost("embedding", 0.0, 0.0, 50, 100, 0, 8, 3),
        LayerCost("block.0", 1.0, 2.0, 10, 20, 40, 8, 5),
        LayerCost("block.1", 1.0, 2.0, 10, 20, 40, 8, 5),
        LayerCost("head", 1.0, 2.0, 60, 120, 30, 1, 90),
    )
)
PARTITION = Partition((3,), 1, (2, 1))


def test_a_device_holds_the_slots_of_two_consecutive_stages_and_the_peak_of_one() -> None:
    memory = device_memory(PARTITION, LAYERS, 1, 4, MemoryLimits(integer_bytes=7))
    assert memory.weights_bytes == 70 + 60  # the forward stage and the head
    assert memory.gradients_bytes == 120 + 100  # the next step's head, after this one's embedding
    assert memory.staging_bytes == 6 * 8
    assert memory.integers_bytes == 4 * 7
    assert memory.compute_bytes == 30 + 90  # the head; both blocks together need 85
    assert memory.total_bytes == 130 + 220 + 48 + 28 + 120


def test_constant_buffers_of_the_layers_are_counted_once() -> None:
    without, beside = (device_memory(PARTITION, LAYERS, 2, 4, MemoryLimits(constant_bytes=n)) for n in (0, 9))
    assert beside.total_bytes == without.total_bytes + 9 and beside.constant_bytes == 9


def test_more_devices_than_stages_may_run_the_largest_stage_twice_in_a_row() -> None:
    memory = device_memory(PARTITION, LAYERS, 4, 4, MemoryLimits())
    assert memory.weights_bytes == 2 * 70 and memory.gradients_bytes == 2 * 120


def jobs_of_devices(
    partition: Partition, num_devices: int, passes: Sequence[tuple[bool, int]]
) -> list[list[StageTask]]:
    """List the stage jobs of each device in these passes, each an evaluation or a step of so many rounds."""
    tasks: list[StageTask] = []
    for evaluates, rounds in passes:
        tasks += (
            evaluation_tasks(partition, 3, num_devices, len(tasks))
            if evaluates
            else step_tasks(partition, 3, rounds, num_devices, len(tasks))
        )
    return [[task for task in tasks if task.device == device] for device in range(num_devices)]


PASSES = st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), costs=costs(), num_devices=st.integers(1, 9), passes=PASSES)
def test_any_two_consecutive_jobs_of_a_device_fit_side_by_side(
    data: st.DataObject, costs: Costs, num_devices: int, passes: Sequence[tuple[bool, int]]
) -> None:
    partition = data.draw(partitions(costs.num_layers))
    memory = device_memory(partition, costs, num_devices, 1, MemoryLimits())
    for jobs in jobs_of_devices(partition, num_devices, passes):
        stages = [job.stage for job in jobs]
        for one, other in pairwise(stages):
            assert stage_weight_bytes(one, costs) + stage_weight_bytes(other, costs) <= memory.weights_bytes
        trained = [stage for stage in stages if stage.kind is not StageKind.FORWARD]
        for one, other in pairwise(trained):
            together = stage_gradient_bytes(one, costs) + stage_gradient_bytes(other, costs)
            assert together <= memory.gradients_bytes
    even = 2 * max(stage_weight_bytes(stage, costs) for stage in partition.stages())
    assert memory.weights_bytes <= even, "never more than two slots of the largest stage"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), costs=costs())
def test_one_device_reserves_no_byte_that_two_consecutive_jobs_do_not_use(data: st.DataObject, costs: Costs) -> None:
    partition = data.draw(partitions(costs.num_layers))
    memory = device_memory(partition, costs, 1, 1, MemoryLimits())
    # Every order of a step, a second round and an evaluation.
    [jobs] = jobs_of_devices(partition, 1, [(False, 2), (True, 1), (True, 1), (False, 1), (False, 1)])
    stages = [job.stage for job in jobs]
    weights = [stage_weight_bytes(stage, costs) for stage in stages]
    assert memory.weights_bytes == max(one + other for one, other in pairwise(weights))
    gradients = [stage_gradient_bytes(stage, costs) for stage in stages if stage.kind is not StageKind.FORWARD]
    assert memory.gradients_bytes == max(one + other for one, other in pairwise(gradients))


def test_gradients_that_travel_in_another_format_need_a_buffer_of_at_most_four_mebi_elements() -> None:
    limits = MemoryLimits(**rounding(accumulate_bytes=4, gradient_bytes=2))
    assert device_memory(PARTITION, LAYERS, 1, 4, limits).gradients_bytes == 220 + 60
    large = Costs(tuple(replace(layer, gradient_bytes=2**26) for layer in LAYERS.layers))
    assert device_memory(PARTITION, large, 1, 4, limits).gradients_bytes == 2**26 + 2**27 + 2**23


def test_a_stage_keeps_all_its_activations_or_one_layer_and_the_outputs() -> None:
    whole = Partition((), 4, ())
    stage = device_memory(whole, LAYERS, 1, 1, MemoryLimits(recompute="stage"))
    assert stage.compute_bytes == 40 + 40 + 30 + 90
    layer = device_memory(whole, LAYERS, 1, 1, MemoryLimits(recompute="layer"))
    assert layer.compute_bytes == (30 + 90) + (8 + 8 + 8 + 1)


@pytest.mark.parametrize(
    ("devices", "stages", "rounds", "update", "expected"),
    [
        (1, 3, 4, "sync", 1),
        (2, 3, 4, "sync", 2),
        (8, 3, 4, "sync", 4),
        (8, 3, 4, "async", 8),
        (8, 13, 4, "async", 3),
        (8, 16, 4, "async", 2),
        (8, 1, 2, "async", 4),
    ],
)
def test_rounds_in_flight_are_all_that_devices_can_begin_while_one_is_unfinished(
    devices: int, stages: int, rounds: int, update: str, expected: int
) -> None:
    assert rounds_in_flight(devices, stages, rounds, update) == expected


@pytest.mark.parametrize(
    ("rule", "sync", "async_", "predicting", "bounded"),
    [
        (ADAMW, 14, 16, 18, 16),
        (COMPACT_ADAMW, 8 + 1 / 32, 10 + 1 / 32, 12 + 1 / 32, 10 + 1 / 32),
        (MUON, 12, 14, None, None),
        (COMPACT_MUON, 9 + 1 / 64, 11 + 1 / 64, None, None),
    ],
    ids=["adamw", "compact adamw", "muon", "compact muon"],
)
def test_host_bytes_per_trained_parameter_of_split_weights(
    rule: RuleCosts, sync: float, async_: float, predicting: float | None, bounded: float | None
) -> None:
    """Each holds a 16-bit gradient, 16-bit device weights (two versions in async), a residual or an fp32 weight, and state."""
    split = UpdateCosts((rule,), splits_weights=True)
    predicts = replace(split, predicts=True)
    cases = [("sync", split, sync), ("sync", predicts, sync), ("async", split, async_)]
    cases += [("async", predicts, predicting), ("bounded", split, bounded)]
    for update, updates, expected in cases:
        memory = host_state(ParameterCounts(64_000), update, 1, 2, 2, updates)
        assert expected is None or memory.total_bytes == 64_000 * expected


@pytest.mark.parametrize(
    ("update", "element", "expected"), [("sync", 2, 16), ("async", 2, 18), ("sync", 4, 20), ("async", 4, 24)]
)
def test_host_bytes_per_trained_parameter_of_fp32_weights(update: str, element: int, expected: int) -> None:
    """Expect 16 bytes (sync) and 18 (async) in float16: 2 or 4 weights, 2 gradient, 12 optimizer; 20 in float32."""
    memory = host_state(ParameterCounts(1000), update, 1, element, element, FULL)
    assert memory.total_bytes == 1000 * expected


def test_each_rule_counts_for_its_own_parameters() -> None:
    updates = UpdateCosts((ADAMW, MUON), splits_weights=True)
    counts = ParameterCounts(1000, bundles=((600, 1), (400, 1)), bundle_rules=((600, 0), (100, 300)))
    assert host_state(counts, "sync", 1, 2, 2, updates).total_bytes == 14 * 700 + 12 * 300
    assert updates.saved_bytes(counts.by_rule) == 12 * 700 + 8 * 300


def test_the_traffic_of_an_update_is_what_it_reads_and_writes() -> None:
    """Gradient in; weights and values in and out; device weights out, which split weights are read from too."""
    assert FULL.traffic_bytes([1], "sync", 2, 2) == 2 + 2 * 12 + 2
    assert SPLIT.traffic_bytes([1], "async", 2, 2) == 2 + 2 * (2 + 2) + 2 * 8
    assert SPLIT.traffic_bytes([1], "bounded", 2, 2) == FULL.traffic_bytes([1], "bounded", 2, 2)
    compact = UpdateCosts((COMPACT_ADAMW,), splits_weights=True)
    assert compact.traffic_bytes([1], "sync", 2, 2) == 2 + 8 + 2 * (2 + 1 / 32)
    # Muon reads gradient and momentum once more, and writes and reads two bytes that travel to a device and back.
    muon = UpdateCosts((MUON,), splits_weights=True)
    assert muon.traffic_bytes([1], "sync", 2, 2) == 2 + 8 + 2 * 4 + (2 + 4 + 2) + 2
    assert SPLIT.adding_share([1], "sync", 2, 2) == pytest.approx(10 / 26)


def test_frozen_tied_and_summed_parameters_cost_what_they_hold() -> None:
    assert host_state(ParameterCounts(0, 1000), "async", 1, 2, 2, FULL).total_bytes == 2 * 1000
    assert host_state(ParameterCounts(1000, tied=100), "sync", 1, 2, 2, FULL).gradient_bytes == 8 * 100 + 2 * 900
    assert host_state(ParameterCounts(1000, tied=100), "sync", 2, 2, 2, FULL).gradient_bytes == 6 * 900 + 8 * 100


@pytest.mark.parametrize("wrong", [{"recompute": "all"}, {"device_bytes": -1}, {"host_bytes": -1}])
def test_a_limit_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MemoryLimits(**wrong)  # type: ignore[arg-type]
