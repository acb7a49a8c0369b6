"""A pass takes the host buffers and device space for all passes like it; later ones take nothing."""

import gc

import pytest
import torch

from tests.support.faults import PART_LANDED, Bomb
from tests.support.toy import PARTITIONS, WIDTH, toy_batches, toy_engine, toy_model
from torchround.engine.passes import Pass
from torchround.layer import MicroBatch
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.host_buffers import HostBatch
from torchround.planning.update_modes import ASYNC, SYNC

MODES = pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=lambda mode: mode.name)
STEPS = 3


def taken(engine):
    return [*(device.num_allocations for device in engine.devices), engine.pool.num_allocations]


def train_step(engine, micro_batches):
    engine.forward_backward(micro_batches)
    engine.step(1e-2)


def nothing_is_taken_in_need(engine):
    return 0 < engine.pool.reserved_bytes == engine.pool.allocated_bytes


@pytest.mark.parametrize(
    ("partition", "num_devices", "mode", "rounds", "micro_batches"),
    [
        ("one layer a stage", 1, SYNC, 1, 4),
        ("forward coarser", 3, ASYNC, 3, 7),
        ("one layer a stage", 8, ASYNC, 1, 4),
        ("forward coarser", 8, SYNC, 3, 7),
    ],
)
def test_only_the_first_step_allocates(partition, num_devices, mode, rounds, micro_batches):
    """The micro-batches are uneven (3, 2, 2, ..), and so are the rounds (3, 2, 2)."""
    with toy_engine(PARTITIONS[partition], num_devices, model=toy_model(tied=True), mode=mode, rounds=rounds) as engine:
        batches = toy_batches(STEPS, micro_batches)
        train_step(engine, batches[0])
        reserved = engine.pool.reserved_bytes
        engine.drain()
        before = taken(engine)
        for batch in batches[1:]:
            train_step(engine, batch)
        engine.drain()
        assert taken(engine) == before
        assert engine.pool.reserved_bytes == reserved and nothing_is_taken_in_need(engine)


@MODES
def test_a_slow_optimizer_does_not_make_parts_of_gradients_pile_up(mode):
    model, slow = toy_model(tied=True), Bomb(("has", PART_LANDED), exception=None)
    with toy_engine(PARTITIONS["forward coarser"], 3, observer=slow, model=model, mode=mode, rounds=4) as engine:
        for batch in toy_batches(3, micro_batches=4):
            train_step(engine, batch)
        engine.drain()
        assert nothing_is_taken_in_need(engine)


@pytest.mark.parametrize(("mode", "frozen"), [(SYNC, (0, 1, 2)), (ASYNC, ())])
def test_only_the_first_of_several_validations_allocates(mode, frozen):
    """A pass whose first layers are frozen begins while the devices still work on the previous pass."""
    model = toy_model()
    for layer in frozen:
        model.layers[layer].requires_grad_(False)
    validation = toy_batches(1, micro_batches=6)[0]
    with toy_engine(PARTITIONS["one layer a stage"], 3, model=model, mode=mode) as engine:
        before = None
        for batch in toy_batches(STEPS, micro_batches=4):
            train_step(engine, batch)
            results = [engine.evaluate(validation) for _ in range(2)]
            train_step(engine, batch)
            assert all(result.loss() > 0 for result in results)
            before = before or taken(engine)
        engine.drain()
        assert taken(engine) == before and nothing_is_taken_in_need(engine)


def test_a_longer_batch_is_reserved_when_it_comes_and_a_shorter_one_is_free():
    with toy_engine(PARTITIONS["forward coarser"], 2) as engine:
        train_step(engine, toy_batches(1, micro_batches=4)[0])
        before = engine.pool.reserved_bytes
        train_step(engine, toy_batches(1, micro_batches=3)[0])
        engine.drain()
        assert engine.pool.reserved_bytes == before
        train_step(engine, toy_batches(1, micro_batches=5)[0])
        engine.drain()
        assert engine.pool.reserved_bytes > before and nothing_is_taken_in_need(engine)


@pytest.mark.parametrize(("mode", "validates", "counts"), [(SYNC, False, 3), (SYNC, True, 2), (ASYNC, False, 1)])
def test_a_run_reserves_what_a_plan_counts(mode, validates, counts):
    """In `sync` only stages of frozen layers at the start may begin before the pass before them is finished."""
    partition, reserved = PARTITIONS["backward coarser"], set()
    for frozen in (0, 1, 3):
        model = toy_model()
        for layer in model.layers[:frozen]:
            layer.requires_grad_(False)
        outputs = (2 * 128 * WIDTH * 4,) * (partition.num_layers - 1) + (4,)
        costs = Costs(tuple(LayerCost("layer", 1.0, 2.0, boundary_bytes=nbytes) for nbytes in outputs))
        batch = HostBatch((0,) * 4, (costs,), (4 * 2 * 128 * 8,), frozen, validates)
        with toy_engine(partition, 4, model=model, mode=mode) as engine:
            before = engine.pool.reserved_bytes
            zeros = torch.zeros(2, 128, dtype=torch.int64)
            micro_batches = [MicroBatch(zeros, zeros, zeros, zeros)] * 4
            for _ in range(2):
                train_step(engine, micro_batches)
                results = [engine.evaluate(micro_batches) for _ in range(2 * validates)]
                assert all(result.loss() > 0 for result in results)
            engine.drain()
            reserved.add(engine.pool.reserved_bytes - before)
        counted = batch.boundary_bytes(partition, 1, 4, mode.name) + batch.integers_and_losses_bytes()
        assert engine.pool.reserved_bytes - before == counted
    assert len(reserved) == counts, "the frozen layers change nothing"


def test_results_that_a_caller_keeps_hold_no_passes():
    """Otherwise the values of all old passes would stay. The watchdog remembers some stage jobs, and these their pass."""
    with toy_engine(PARTITIONS["one layer a stage"], 1) as engine:
        results = []
        for batch in toy_batches(12, micro_batches=1):
            results.append(engine.forward_backward(batch))
            engine.step(1e-2)
        engine.drain()
        gc.collect()
        assert sum(isinstance(each, Pass) for each in gc.get_objects()) < len(results) / 2
        assert all(result.loss() > 0 for result in results)
