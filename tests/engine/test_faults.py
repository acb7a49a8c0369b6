"""What a fault does to calls, updates and devices beside it. `tests/faults/test_engine_faults.py` has faults at all places."""

import threading

import pytest
import torch

from tests.support import toy
from tests.support.faults import UPLOADED, Bomb, PlantedError, armed, copied, engine_threads, this_thread, wait_until
from tests.support.toy import PARTITIONS, assert_same_state, toy_engine, toy_model, toy_store, train, watched
from torchround.engine.board import Observer
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.errors import PipelineError
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.device_worker import STAGE_JOB
from torchround.planning.update_modes import ASYNC, SYNC

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy.toy_batches(3, micro_batches=4)


def state_after(steps):
    with toy_engine(PARTITION, 2) as engine:
        train(engine, BATCHES[:steps])
    return engine.store.named_views()


class TwoBombs(Bomb):
    """The third and the sixth update of a run fail: layers 2 and 4, each at its first try."""

    def __call__(self, place, device=None):
        if place == "an update":
            self.chances += 1
            if self.chances in (3, 6):
                raise PlantedError(f"number {self.chances}")


def test_the_first_of_two_faults_that_an_update_overcame_is_raised():
    store = toy_store(toy_model())
    with pytest.raises(PipelineError, match=r"optimizer worker, block\.1: PlantedError: number 3"):
        train(toy_engine(PARTITION, 2, store=store, **armed(TwoBombs(None))), BATCHES)
    assert store.step == 1 and store.is_consistent
    assert_same_state(store.named_views(), state_after(1))


def test_a_skipped_step_whose_copy_fails_speaks_of_no_second_try(monkeypatch):
    def fail(store, bundle, step):
        raise PlantedError

    store = toy_store(toy_model(), mode=ASYNC)
    for device_weights in store.trained[1].device_weights:
        device_weights.fill_(torch.inf)
    monkeypatch.setattr(HostStore, "copy_version", fail)
    with pytest.raises(PipelineError, match="PlantedError.*some layers are updated.*do not save") as told:
        train(toy_engine(PARTITION, 2, store=store), BATCHES)
    assert not told.value.store_is_consistent


@pytest.mark.parametrize(("mode", "is_skipped"), [(SYNC, False), (SYNC, True), (ASYNC, True)], ids=str)
def test_readers_that_failed_do_not_stop_an_update(mode, is_skipped):
    bomb, store = Bomb(("has", UPLOADED), hit=2), toy_store(toy_model(), mode=mode)
    if is_skipped:
        for device_weight in store.bundles[1].device_weights:
            device_weight.fill_(torch.inf)
    with pytest.raises(PipelineError, match="optimizer worker") as raised:
        train(toy_engine(PARTITION, 2, store=store, **armed(bomb)), BATCHES)
    assert raised.value.__cause__ is bomb.raised
    assert store.is_consistent and store.applied_updates == (0 if is_skipped else 1)
    if is_skipped and mode is ASYNC:
        assert all(torch.equal(*bundle.device_weights) for bundle in store.trained)


def test_an_update_that_outlasts_every_wait_is_waited_for_as_long_as_it_moves(monkeypatch):
    """A device fails during an update. Each wait for the optimizer ends, as if its time were up, at the next bundle."""
    may_go_on, arrived = threading.Semaphore(0), threading.Semaphore(0)

    class Gated(Bomb):
        updates = 0

        def touched(self, reads, writes):
            if this_thread() == "torchround optimizer" and len(writes) > 1:
                self.updates += 1
                if self.updates > 3:
                    arrived.release()
                if self.updates > 2:  # the second step's first stage needs two bundles
                    assert may_go_on.acquire(timeout=60)

    def join(timeout=None):
        may_go_on.release()
        while thread.is_alive() and not arrived.acquire(timeout=0.01):
            pass

    counting, store = Bomb(Stream.ACTIVATION_UPLOAD, hit=-1), toy_store(toy_model())
    partition = PARTITIONS["one layer a stage"]
    with toy_engine(partition, 2, **armed(counting)) as engine:
        train(engine, BATCHES[:1])
    gated = Gated(Stream.ACTIVATION_UPLOAD, hit=counting.chances + 1)  # in the second step's first stage
    engine = toy_engine(partition, 2, store=store, **armed(gated))
    [thread] = [thread for thread in threading.enumerate() if thread.name == "torchround optimizer"]
    monkeypatch.setattr(thread, "join", join)
    with pytest.raises(PipelineError, match="device cpu"):
        train(engine, BATCHES)
    assert store.step == 1 and store.is_consistent
    assert_same_state(store.named_views(), state_after(1))


@pytest.mark.parametrize("norm", [1, 7])
def test_no_update_begins_after_a_stop_though_all_its_gradients_have_landed(norm):
    """The stop comes while the norm of the first or the last gradient is taken."""

    class Blocks(Bomb):
        norms = 0

        def touched(self, reads, writes):
            if this_thread() == "torchround optimizer" and not writes:
                self.norms += 1
                if self.norms == norm:
                    inside.set()
                    wait_until(lambda: not [name for name in engine_threads() if "cpu" in name])

    inside, bomb, store = threading.Event(), Blocks(None), toy_store(toy_model())
    engine = toy_engine(PARTITION, 2, store=store, **armed(bomb))
    result = engine.forward_backward(BATCHES[0])
    engine.step(1e-2)
    result.reports()
    assert inside.wait(60)
    bomb.place = ("has", STAGE_JOB)
    with pytest.raises(PipelineError, match="planted"):
        engine.evaluate(BATCHES[1]).loss()
    assert bomb.norms == norm
    assert store.step == 0 and store.is_consistent and engine_threads() == []
    assert_same_state(store.named_views(), state_after(0))


# A device that fails while a thread waits for it, as CUDA does after a fault in a kernel.
class FailedEvent:
    def __init__(self, thread, left):
        self.thread, self.left = thread, left

    def synchronize(self):
        if this_thread().startswith(self.thread):
            self.left[0] -= 1
            if self.left[0] < 0:
                raise PlantedError("the context is gone")

    def query(self):
        return True


class FailingEvents(Observer):
    def __init__(self, thread, left):
        self.thread, self.left = thread, left

    def recorded(self, device, stream, event, what):
        return FailedEvent(self.thread, self.left)


class UnfinishedDevice(CpuDevice):
    def finish(self):
        raise PlantedError("the context is gone")


def failing_engine(store, thread, finishes, waits=0):
    failing = FailingEvents(thread, [waits])
    kind = CpuDevice if finishes else UnfinishedDevice
    return toy_engine(PARTITION, 2, store=store, wrap=lambda device: watched(kind(int(device.name[4:])), failing))


@pytest.mark.parametrize(
    ("thread", "finishes"), [("MainThread", True), ("torchround optimizer", False), ("torchround cpu:1", False)]
)
def test_the_caller_gets_a_pipeline_error_no_matter_which_thread_waits_first(thread, finishes):
    store = toy_store(toy_model())
    with pytest.raises(PipelineError, match="PlantedError: the context is gone") as raised:
        train(failing_engine(store, thread, finishes), BATCHES)
    assert isinstance(raised.value.__cause__, PlantedError)
    assert engine_threads() == [] and store.is_consistent


def test_a_device_that_fails_at_the_very_end_is_reported_too():
    store = toy_store(toy_model())
    engine = failing_engine(store, "no thread", finishes=False)
    train(engine, BATCHES)
    with pytest.raises(PipelineError, match=r"device cpu:\d: PlantedError"):
        engine.close()
    assert store.step == 3 and store.is_consistent


@pytest.mark.parametrize("waits", [0, 30, 59, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 59))])
def test_the_store_holds_whole_updates_whenever_the_optimizer_meets_the_fault(waits):
    """A step makes the optimizer wait twice for each of 7 gradients, and 13 times for uploads."""
    store = toy_store(toy_model())
    with pytest.raises(PipelineError, match="optimizer worker"):
        train(failing_engine(store, "torchround optimizer", True, waits), BATCHES)
    assert store.is_consistent
    assert_same_state(copied(store), state_after(store.step))
