"""A fault anywhere is raised to the caller, leaves no thread behind, and leaves the host store at a whole update."""

import threading
import time

import pytest
import torch

from tests.support.toy import (
    PARTITIONS,
    ToyBlock,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine.device import CpuDevice
from torchround.engine.errors import DeviceMemoryError, EngineUsageError, FaultLocation, HostMemoryError, PipelineError
from torchround.engine.landed_gradients import LandedGradients
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.ordering import Ordering

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(4, micro_batches=4)


class PlantedError(RuntimeError):
    pass


def engine_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchround")]


def state_after(steps):
    """Return the content of the host store after `steps` whole updates."""
    model = toy_model()
    store = toy_store(model)
    with toy_engine(model, store, PARTITION, 2) as engine:
        train(engine, BATCHES[:steps])
    return store.named_views()


def plant(monkeypatch, block, call):
    """Let block `block`, in any worker, fail at its `call`-th forward of the run (recomputations included)."""
    forward, lock, calls = ToyBlock.forward, threading.Lock(), [0]

    def failing(self, hidden, micro_batch):
        if getattr(self, "position", None) == block:
            with lock:
                calls[0] += 1
                if calls[0] == call:
                    raise PlantedError(f"call {call}")
        return forward(self, hidden, micro_batch)

    monkeypatch.setattr(ToyBlock, "forward", failing)


def marked_model():
    model = toy_model()
    for position, layer in enumerate(model.layers):
        layer.position = position
    return model


# Per step a block runs 4 forwards (its forward or fused stage), then 4 recomputations if it has a backward
# stage.
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize(
    ("block", "call", "stage", "micro_batch", "updates"),
    [
        (1, 1, "forward", 0, 0),
        (1, 3, "forward", 2, 0),
        (2, 5, "backward", 0, 0),
        (2, 8, "backward", 3, 0),
        (4, 9 + 1, "forward", 1, 1),
        (4, 16, "backward", 3, 1),
    ],
)
def test_a_fault_in_a_stage_names_its_location_and_leaves_the_last_update(
    monkeypatch, num_devices, block, call, stage, micro_batch, updates
):
    plant(monkeypatch, block, call)
    model = marked_model()
    store = toy_store(model)
    engine = toy_engine(model, store, PARTITION, num_devices)
    with pytest.raises(PipelineError) as raised:
        train(engine, BATCHES)
    assert isinstance(raised.value.__cause__, PlantedError)
    assert raised.value.location.stage == stage
    assert f"block.{block - 1}" in raised.value.location.layers
    assert raised.value.location.micro_batch == micro_batch
    assert raised.value.location.actor.startswith("device cpu:")
    assert engine_threads() == []
    assert store.step == updates and store.is_consistent
    monkeypatch.undo()
    assert_same_state(store.named_views(), state_after(updates))


@pytest.mark.parametrize("job", ["_collect", "_update"])
def test_a_fault_in_the_optimizer_worker_is_raised(monkeypatch, job):
    original = getattr(OptimizerWorker, job)

    def failing(self, step_or_pass, *arguments):
        if getattr(step_or_pass, "step", step_or_pass) == 1:
            raise PlantedError(job)
        original(self, step_or_pass, *arguments)

    monkeypatch.setattr(OptimizerWorker, job, failing)
    store = toy_store(toy_model())
    with pytest.raises(PipelineError, match="optimizer worker") as raised:
        train(toy_engine(toy_model(), store, PARTITION, 2), BATCHES)
    assert isinstance(raised.value.__cause__, PlantedError)
    assert engine_threads() == []
    monkeypatch.undo()
    assert_same_state(store.named_views(), state_after(1))


def fail_in_bundle(monkeypatch, bundle_index, times, step=1):
    import torchround.engine.optimizer_worker as module

    original, left, calls = module.update_, [times], []

    def failing(buffers, *, update, **options):
        if update == step + 1:
            calls.append(buffers)
            # The embedding is one segment, each block before the bundle is two: matrices and vectors.
            if len(calls) > 2 * bundle_index - 1 and left[0] > 0:
                left[0] -= 1
                raise PlantedError("in the middle of an update")
        original(buffers, update=update, **options)

    monkeypatch.setattr(module, "update_", failing)


def test_an_update_that_fails_in_the_middle_is_completed_before_the_fault_is_raised(monkeypatch):
    fail_in_bundle(monkeypatch, bundle_index=3, times=1)
    store = toy_store(toy_model())
    with pytest.raises(PipelineError, match=r"optimizer worker, block\.2"):
        train(toy_engine(toy_model(), store, PARTITION, 2), BATCHES)
    assert store.is_consistent and store.step == 2
    monkeypatch.undo()
    assert_same_state(store.named_views(), state_after(2))


@pytest.mark.parametrize("case", ["update", "readers", "readers, skipped"])
def test_the_first_of_two_faults_that_an_update_overcame_is_raised(monkeypatch, case):
    """The bundles of layers 2 and 4 fail, each at its first try."""
    owner, name = (OptimizerWorker, "_update_bundle") if case == "update" else (Ordering, "before_device_weight_write")
    original, failed = getattr(owner, name), []

    def failing(self, bundle, *arguments):
        index = getattr(bundle, "index", bundle)
        if index in (2, 4) and index not in failed:
            failed.append(index)
            raise PlantedError(f"bundle {index}")
        original(self, bundle, *arguments)

    monkeypatch.setattr(owner, name, failing)
    store = toy_store(toy_model())
    if "skipped" in case:
        store.bundles[1].device_weights[0].fill_(torch.inf)
    with pytest.raises(PipelineError, match=r"optimizer worker, block\.1: PlantedError: bundle 2"):
        train(toy_engine(toy_model(), store, PARTITION, 2), BATCHES)
    assert failed == [2, 4]
    assert store.step == 1 and store.is_consistent


def test_a_fault_that_an_update_overcame_is_known_before_a_call_can_see_its_step(monkeypatch):
    fail_in_bundle(monkeypatch, bundle_index=3, times=1)
    store = toy_store(toy_model())
    engine = toy_engine(toy_model(), store, PARTITION, 2)
    optimizer, steps_seen = engine._life._optimizer, []
    tell = optimizer._on_failure
    monkeypatch.setattr(optimizer, "_on_failure", lambda failure: [steps_seen.append(store.step), tell(failure)])
    with pytest.raises(PipelineError):
        train(engine, BATCHES)
    assert steps_seen == [1] and store.step == 2


def test_an_update_that_cannot_be_completed_marks_the_store_as_inconsistent(monkeypatch):
    fail_in_bundle(monkeypatch, bundle_index=3, times=1000)
    store = toy_store(toy_model())
    with pytest.raises(PipelineError, match="do not save it") as raised:
        train(toy_engine(toy_model(), store, PARTITION, 2), BATCHES)
    assert not raised.value.store_is_consistent and not store.is_consistent
    with pytest.raises(EngineUsageError, match="mixes two weight versions"):
        toy_engine(toy_model(), store, PARTITION, 2)


def test_a_device_fault_during_an_update_lets_the_update_finish(monkeypatch):
    """The next step's first stage fails while the optimizer is still at the previous step's update."""
    import torchround.engine.optimizer_worker as module

    original = module.update_

    def slow(*args, **options):
        time.sleep(0.02)
        original(*args, **options)

    monkeypatch.setattr(module, "update_", slow)
    plant(monkeypatch, block=1, call=9)
    store = toy_store(toy_model())
    with pytest.raises(PipelineError, match=r"forward stage"):
        train(toy_engine(marked_model(), store, PARTITION, 2), BATCHES)
    assert store.step == 1 and store.is_consistent
    monkeypatch.undo()
    assert_same_state(store.named_views(), state_after(1))


def test_an_update_that_outlasts_every_wait_is_waited_for_as_long_as_it_moves(monkeypatch):
    """Each wait for the optimizer ends, as if its time were up, when the update has come to the next bundle."""
    update, may_go_on, arrived = (OptimizerWorker._update_bundle, threading.Semaphore(0), threading.Semaphore(0))

    def gated(worker, bundle, *arguments):
        if bundle.index > 2:
            arrived.release()
        if bundle.index > 1:  # the fault is in the layer of bundle 1
            assert may_go_on.acquire(timeout=60)
        update(worker, bundle, *arguments)

    def join(timeout=None):
        may_go_on.release()
        while thread.is_alive() and not arrived.acquire(timeout=0.01):
            pass

    monkeypatch.setattr(OptimizerWorker, "_update_bundle", gated)
    plant(monkeypatch, block=1, call=9)
    store = toy_store(toy_model())
    engine = toy_engine(marked_model(), store, PARTITIONS["one layer a stage"], 2)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "torchround optimizer"]
    monkeypatch.setattr(thread, "join", join)
    with pytest.raises(PipelineError, match="forward stage"):
        train(engine, BATCHES)
    assert store.step == 1 and store.is_consistent
    monkeypatch.undo()
    assert_same_state(store.named_views(), state_after(1))


@pytest.mark.parametrize("bundle_index", [-1, 0])
def test_no_update_begins_after_a_stop_though_all_its_gradients_have_landed(monkeypatch, bundle_index):
    """The stop comes while the norm of the first or the last gradient is taken."""

    inside, stopped, norms = threading.Event(), threading.Event(), []
    squares = LandedGradients.squares

    def blocking(self, bundle):
        norms.append(bundle)
        if bundle is self._store.trained[bundle_index]:
            inside.set()
            assert stopped.wait(60)
        return squares(self, bundle)

    monkeypatch.setattr(LandedGradients, "squares", blocking)
    store = toy_store(toy_model())
    engine = toy_engine(toy_model(), store, PARTITION, 2)
    result = engine.forward_backward(BATCHES[0])
    engine.step(1e-2)
    result.reports()
    assert inside.wait(60)
    engine._life.fail(PipelineError(FaultLocation("test"), "planted"))
    stopped.set()
    with pytest.raises(PipelineError, match="planted"):
        engine.drain()
    assert norms[-1] is store.trained[bundle_index]
    assert store.step == 0 and store.is_consistent and engine_threads() == []
    assert_same_state(store.named_views(), state_after(0))


def test_every_later_call_raises_the_first_fault(monkeypatch):
    plant(monkeypatch, block=1, call=1)
    engine = toy_engine(marked_model(), toy_store(toy_model()), PARTITION, 2)
    with pytest.raises(PipelineError, match="PlantedError"):
        engine.forward_backward(BATCHES[0]).loss()  # the first of the two may raise it already
    for call in (lambda: engine.step(1e-2), engine.drain, lambda: engine.forward_backward(BATCHES[0])):
        with pytest.raises(PipelineError, match="PlantedError"):
            call()


def test_training_continues_with_a_new_engine_from_the_state_a_fault_left(monkeypatch):
    plant(monkeypatch, block=2, call=20)
    store = toy_store(toy_model())
    with pytest.raises(PipelineError):
        train(toy_engine(marked_model(), store, PARTITION, 2), BATCHES)
    monkeypatch.undo()
    with toy_engine(toy_model(), store, PARTITIONS["one stage"], 1) as engine:
        train(engine, BATCHES[store.step :])
    assert_same_state(store.named_views(), state_after(4))


def test_a_device_that_is_too_small_is_named_before_anything_runs():
    model = toy_model()
    with pytest.raises(DeviceMemoryError, match=r"cpu:0 cannot allocate 0\.000 GiB: it has 0\.000 GiB"):
        toy_engine(model, toy_store(model), PARTITION, 1, wrap=lambda _: CpuDevice(0, memory_limit_bytes=1000))
    assert engine_threads() == []


def test_a_non_finite_gradient_skips_the_update_and_is_counted():
    model = toy_model()
    store = toy_store(model)
    with toy_engine(model, store, PARTITION, 2) as engine:
        train(engine, BATCHES[:1])
        before = {name: view.clone() for name, view in store.named_views().items()}
        poisoned = store.bundles[1].device_weights[0][0].clone()
        store.bundles[1].device_weights[0][0] = torch.inf
        result = engine.forward_backward(BATCHES[1])
        engine.step(1e-2)
        engine.drain()
        store.bundles[1].device_weights[0][0] = poisoned
        assert result.update().skipped
        assert store.step == 2 and store.applied_updates == 1
        assert_same_state(store.named_views(), before)
        train(engine, BATCHES[1:2])
    assert store.applied_updates == 2


def test_host_memory_that_the_system_refuses_to_a_virtual_device_is_named():
    device = CpuDevice(0)
    with pytest.raises(HostMemoryError, match=r"refused .* GiB of host memory for cpu:0.*engine.host_memory_gib"):
        device.allocate(2**60)
    assert device.peak_bytes() == 0
