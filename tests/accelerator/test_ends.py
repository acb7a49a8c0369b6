"""How an engine ends on an accelerator: hangs are named, and nothing is unlocked or freed under a device's hands."""

import gc
import threading

import pytest

from tests.simulated_accelerator.host_threads import HostThreads
from tests.support.device_toy import device_engine
from tests.support.faults import brief_joins, engine_threads
from tests.support.scheduled_run import hurried, scheduled
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_model, toy_store, train
from torchround.engine.device import AcceleratorDevice, Stream
from torchround.engine.errors import HangError, PipelineError

__all__ = ["brief_joins"]  # the fixture
PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(3, micro_batches=3)
TIMEOUT_S = 2.0
NEVER_S = 1e6


@pytest.fixture
def halted(simulator, monkeypatch):
    """A registered thread that never waits keeps the scheduler from serving late streams."""
    threads = HostThreads(simulator)
    threads.install(monkeypatch)

    def makes(stream):
        def make(torch_device, worker):
            device = AcceleratorDevice(torch_device, worker)
            for kind, own in device._streams.items():
                simulator.set_role(own, "late" if worker == 0 and kind is stream else "early")
            return device

        simulator.set_fallback_after(NEVER_S)
        simulator.run_adversarially(0)
        never_waits = threading.Thread(target=simulator.register_thread)
        never_waits.start()
        never_waits.join()
        return make

    yield makes
    simulator.run_freely(0)
    threads.uninstall()


@pytest.mark.parametrize(
    "stream",
    [
        Stream.COMPUTE,
        Stream.GRADIENT_DOWNLOAD,
        pytest.param(Stream.WEIGHT_UPLOAD, marks=pytest.mark.nightly),
        pytest.param(Stream.ACTIVATION_DOWNLOAD, marks=pytest.mark.nightly),
    ],
)
def test_a_queue_that_stands_still_is_named_and_training_can_continue(simulator, brief_joins, halted, stream):
    expected = toy_store(toy_model(), pinned=True)
    with device_engine("simulated", toy_model(), expected, PARTITION, 2) as engine:
        train(engine, BATCHES)
    store = toy_store(toy_model(), pinned=True)
    engine = device_engine("simulated", toy_model(), store, PARTITION, 2, make=halted(stream), hang_timeout_s=TIMEOUT_S)
    with pytest.raises(HangError) as raised:
        train(engine, BATCHES)
    store.close()  # as a run does, while the device may still copy
    lines = [line for line in raised.value.report if line.startswith(f"  its {stream.value} queue")]
    # The other worker has queues that wait for this one.
    assert "has not passed" in lines[0] and "simulated:0/0" in lines[0]
    simulator.run_freely(0)  # the device works again, so that threads in a wait for it end
    for thread in threading.enumerate():
        if thread.name.startswith(("torchround", "finish ")):
            thread.join(20)
    assert engine_threads() == [] and store.is_consistent
    assert simulator.copies_from_unlocked_memory() == 0
    simulator.reset()
    with device_engine("simulated", toy_model(), store, PARTITION, 2) as engine:
        train(engine, BATCHES[store.step :])
    assert_same_state(store.named_views(), expected.named_views())


class UsersError(Exception):
    pass


def test_page_locks_outlive_the_copies_of_an_engine_that_ends_in_the_middle(simulator):
    store = toy_store(toy_model(), pinned=True)
    with (
        scheduled(simulator, hurried()) as make,
        pytest.raises((UsersError, PipelineError)),
        device_engine("simulated", toy_model(), store, PARTITION, 1, make=make) as engine,
    ):
        assert engine.forward_backward(BATCHES[0]).reports(), "everything is enqueued, and little has run"
        raise UsersError
    assert simulator.copies_from_unlocked_memory() == 0
    simulator.reset()
    gc.collect()
    assert engine_threads() == []
    store.close()
