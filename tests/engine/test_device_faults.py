"""A device that fails while a thread waits for it, as CUDA does after a fault in a kernel, gives a named error.

The failing device computes like any other; only a wait for it on the host raises.
"""

import threading

import pytest

from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.device import CpuDevice
from torchround.engine.errors import PipelineError

BATCHES = toy_batches(3, micro_batches=2)


class FailedError(RuntimeError):
    pass


class FailedEvent:
    """An event that raises in the threads of that name, after `left[0]` waits there."""

    def __init__(self, thread, left):
        self.thread, self.left = thread, left

    def synchronize(self):
        if threading.current_thread().name.startswith(self.thread):
            self.left[0] -= 1
            if self.left[0] < 0:
                raise FailedError("the context is gone")

    def query(self):
        return True


class FailingDevice(CpuDevice):
    def __init__(self, index, thread, finishes, left):
        super().__init__(index)
        self.thread, self.finishes, self.left = thread, finishes, left

    def _record(self, stream):
        return FailedEvent(self.thread, self.left)

    def finish(self):
        if not self.finishes:
            raise FailedError("the context is gone")


def failing_engine(store, thread, finishes, waits=0):
    left = [waits]
    return toy_engine(
        toy_model(),
        store,
        PARTITIONS["forward coarser"],
        2,
        wrap=lambda device: FailingDevice(int(device.name[4:]), thread, finishes, left),
    )


@pytest.mark.parametrize("thread", ["MainThread", "torchround optimizer", "torchround cpu:1"])
@pytest.mark.parametrize("finishes", [True, False])
def test_the_caller_gets_a_pipeline_error_no_matter_which_thread_waits_first(thread, finishes):
    store = toy_store(toy_model())
    with pytest.raises(PipelineError, match="FailedError: the context is gone") as raised:
        train(failing_engine(store, thread, finishes), BATCHES)
    assert isinstance(raised.value.__cause__, FailedError)
    assert not [t for t in threading.enumerate() if t.name.startswith("torchround")]
    assert store.is_consistent


def test_a_device_that_fails_at_the_very_end_is_reported_too():
    store = toy_store(toy_model())
    engine = failing_engine(store, "no thread", finishes=False)
    train(engine, BATCHES)
    with pytest.raises(PipelineError, match="device cpu:0: FailedError"):
        engine.close()
    assert store.step == 3 and store.is_consistent


def test_the_store_holds_whole_updates_whenever_the_optimizer_meets_the_fault():
    """A step makes the optimizer wait 7 times for gradients and 13 times for uploads, 3 steps 60 times."""
    states, met = {}, 0
    for waits in range(0, 60, 3):
        store = toy_store(toy_model())
        with pytest.raises(PipelineError, match="optimizer worker"):
            train(failing_engine(store, "torchround optimizer", True, waits), BATCHES)
        assert store.is_consistent
        met += 1
        views = {name: view.clone() for name, view in store.named_views().items()}
        assert_same_state(views, states.setdefault(store.step, views))
    assert met == 20 and sorted(states) == [0, 1, 2, 3]
