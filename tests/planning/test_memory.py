"""The memory model by hand-made figures, and stages of passes whose layers stay with their devices."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.counted_rules import ADAMW, COMPACT_ADAMW, COMPACT_MUON, FULL, MUON, SPLIT
from tests.support.random_costs import costs, partitions
from torchround.planning.costs import BundleCount, Costs, LayerCost, ParameterCounts
from torchround.planning.host_buffers import PAGE_BYTES
from torchround.planning.memory import MemoryLimits, device_memory, forward_stages, host_state, slot_space, stage_bytes
from torchround.planning.partition import Partition, StageKind, evaluation_stages, evaluation_tasks, step_tasks
from torchround.planning.update_costs import UpdateCosts

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


def test_a_device_holds_the_slots_of_two_consecutive_stages_and_the_peak_of_one():
    memory = device_memory(PARTITION, LAYERS, 1, 4, 1, MemoryLimits(integer_bytes=7, constant_bytes=9))
    assert memory.weights_bytes == 70 + 60  # the forward stage and the head
    assert memory.gradients_bytes == 120 + 100  # the next step's head, after this one's embedding
    assert memory.staging_bytes == 6 * 8
    assert memory.integers_bytes == 4 * 7
    assert memory.compute_bytes == 30 + 90  # the head; both blocks together need 85
    assert memory.total_bytes == 130 + 220 + 48 + 28 + 120 + 9


def jobs_of_devices(partition, num_devices, passes):
    tasks = []
    for evaluates, rounds in passes:
        make = evaluation_tasks if evaluates else partial(step_tasks, rounds=rounds)
        tasks += make(partition, 3, num_devices=num_devices, first_slot=len(tasks))
    return [[task for task in tasks if task.device == device] for device in range(num_devices)]


PASSES = st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=8)
# Every order of a step, a second round and an evaluation.
ALL_ORDERS = [(False, 2), (True, 1), (True, 1), (False, 1), (False, 1)]


@given(data=st.data(), costs=costs(), num_devices=st.integers(1, 9), passes=PASSES)
def test_any_two_consecutive_jobs_of_a_device_fit_side_by_side_and_one_device_reserves_no_more(
    data, costs, num_devices, passes
):
    partition = data.draw(partitions(costs.num_layers))
    for count, drawn in ((num_devices, passes), (1, ALL_ORDERS)):
        memory, most_weights, most_gradients = device_memory(partition, costs, count, 1, 1, MemoryLimits()), 0, 0
        for jobs in jobs_of_devices(partition, count, drawn):
            weights = [stage_bytes(job.stage, costs, "weight_bytes") for job in jobs]
            trained = [job.stage for job in jobs if job.stage.kind is not StageKind.FORWARD]
            gradients = [stage_bytes(stage, costs, "gradient_bytes") for stage in trained]
            most_weights = max([most_weights, *map(sum, pairwise(weights))])
            most_gradients = max([most_gradients, *map(sum, pairwise(gradients))])
        assert most_weights <= memory.weights_bytes and most_gradients <= memory.gradients_bytes
        even = 2 * max(stage_bytes(stage, costs, "weight_bytes") for stage in partition.stages())
        assert memory.weights_bytes <= even, "never more than two slots of the largest stage"
    assert (memory.weights_bytes, memory.gradients_bytes) == (most_weights, most_gradients)


def test_gradients_that_travel_in_another_format_need_a_buffer_of_at_most_four_mebi_elements():
    limits = MemoryLimits(accumulate_bytes=4, rounded_bytes=2)
    assert device_memory(PARTITION, LAYERS, 1, 4, 1, limits).gradients_bytes == 220 + 60
    large = Costs(tuple(replace(layer, gradient_bytes=2**26) for layer in LAYERS.layers))
    assert device_memory(PARTITION, large, 1, 4, 1, limits).gradients_bytes == 2**26 + 2**27 + 2**23


def test_a_stage_keeps_all_its_activations_or_one_layer_and_the_outputs():
    whole = Partition((), 4, ())
    stage = device_memory(whole, LAYERS, 1, 1, 1, MemoryLimits(recompute="stage"))
    assert stage.compute_bytes == 40 + 40 + 30 + 90
    layer = device_memory(whole, LAYERS, 1, 1, 1, MemoryLimits(recompute="layer"))
    assert layer.compute_bytes == (30 + 90) + (8 + 8 + 8 + 1)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ADAMW, {"sync": 14, "async": 16, "predict": 18, "bounded": 16}),
        (COMPACT_ADAMW, {"sync": 8 + 1 / 32, "async": 10 + 1 / 32, "predict": 12 + 1 / 32, "bounded": 10 + 1 / 32}),
        (MUON, {"sync": 12, "async": 14}),
        (COMPACT_MUON, {"sync": 9 + 1 / 64, "async": 11 + 1 / 64}),
    ],
    ids=["adamw", "compact adamw", "muon", "compact muon"],
)
def test_host_bytes_per_trained_parameter_of_split_weights(rule, expected):
    """Count a 16-bit gradient, 16-bit device weights (two versions in async), a residual or an fp32 weight, and state.

    With fp32 weights it holds 2 or 4 bytes of weights, 2 of gradient and 12 of the optimizer in float16.
    """

    def counted(number):
        return ParameterCounts((BundleCount((number,)),))

    for update, element, whole in (("sync", 2, 16), ("async", 2, 18), ("sync", 4, 20), ("async", 4, 24)):
        memory = host_state(counted(1000), update, 1, element, element, FULL)
        assert memory.total_bytes == 1000 * whole
    for update, nbytes in expected.items():
        updates = UpdateCosts((rule,), splits_weights=True, predicts=update == "predict")
        memory = host_state(counted(64_000), "async" if update == "predict" else update, 1, 2, 2, updates)
        assert memory.total_bytes == 64_000 * nbytes


def test_each_rule_counts_for_its_own_parameters():
    updates = UpdateCosts((ADAMW, MUON), splits_weights=True)
    counts = ParameterCounts((BundleCount((600, 0)), BundleCount((100, 300))))
    assert host_state(counts, "sync", 1, 2, 2, updates).total_bytes == 14 * 700 + 12 * 300
    assert updates.saved_bytes(counts.by_rule) == 12 * 700 + 8 * 300


def test_the_traffic_of_an_update_is_what_it_reads_and_writes():
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


def test_frozen_tied_and_summed_parameters_cost_what_they_hold():
    """Parts of sums land in whole pages: a tied parameter has two."""
    assert host_state(ParameterCounts((), 1000), "async", 1, 2, 2, FULL).total_bytes == 2 * 1000
    counts, page = ParameterCounts((BundleCount((900,)), BundleCount((100,), (0, 1)))), PAGE_BYTES
    assert host_state(counts, "sync", 1, 2, 2, FULL).gradient_bytes == 2 * 900 + 4 * 100 + 2 * page
    assert host_state(counts, "sync", 2, 2, 2, FULL).gradient_bytes == 4 * 900 + 4 * 100 + 3 * page


@st.composite
def cases(draw):
    forward = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=5)))
    backward = forward[::-1]
    partition = Partition(forward, draw(st.integers(1, 4)), backward)
    sizes = draw(st.lists(st.integers(1, 100), min_size=partition.num_layers, max_size=partition.num_layers))
    return partition, sizes, draw(st.integers(1, 5))


@given(cases())
def test_a_layer_stays_with_its_device_in_the_space_that_there_is(case):
    partition, sizes, num_devices = case

    def bytes_of(stage):
        return sum(sizes[stage.start : stage.stop])

    stages = forward_stages(partition, num_devices, bytes_of)
    assert [stage.start for stage in stages] == [0, *(stage.stop for stage in stages[:-1])]
    assert stages[-1].stop == partition.num_layers
    cuts = {stage.start for stage in evaluation_stages(partition)}
    assert cuts <= {stage.start for stage in stages}
    if stages == evaluation_stages(partition):
        return
    assert len(stages) % num_devices == 0
    space = slot_space(partition, num_devices, bytes_of)
    twice = [*stages, *stages]
    for index in range(len(stages)):
        assert bytes_of(twice[index]) + bytes_of(twice[index + num_devices]) <= space


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 8, 9])
def test_equal_layers_are_cut_as_far_as_needed_and_eight_for_nine_devices_stay(num_devices):
    stages = forward_stages(Partition((3, 3), 2, (3, 3)), num_devices, lambda stage: stage.stop - stage.start)
    assert len(stages) == (-(-3 // num_devices) * num_devices if num_devices < 9 else 3)
