"""The accelerator device's own lines, run without an accelerator: a stand-in kind has streams that run at once.

This shows that the engine and `AcceleratorDevice` fit together: which events, waits, marks and threads the device
gets. The tests marked `gpu` show that CUDA orders operations as they ask.
"""

import time

import pytest
import torch

from tests.support.toy import (
    PARTITIONS,
    PlainLoop,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround import accelerators
from torchround.accelerators import AcceleratorKind
from torchround.engine.device import UPLOADS, AcceleratorDevice, Stream
from torchround.engine.errors import DeviceMemoryError
from torchround.engine.store import host_memory
from torchround.engine.worker.link_turns import LEAST_BYTES, measure_rates


class FakeEvent(torch.Event):
    """An event of the stand-in kind, on a device of its own choice."""

    def __new__(cls, **flags):
        return super().__new__(cls, device="cpu")

    def __init__(self, timed=False, device=None):
        self.timed, self.of, self.recorded_s, self.stream = timed, device, None, None

    @property
    def device(self):
        return self.of

    def record(self, stream):
        assert isinstance(stream, FakeStream)
        self.recorded_s, self.stream = time.perf_counter(), stream

    def synchronize(self):
        assert self.recorded_s is not None, "an event that was never recorded orders nothing"

    def query(self):
        return self.recorded_s is not None

    def elapsed_time(self, later):
        assert self.timed and later.timed
        return 1000.0 * (later.recorded_s - self.recorded_s)


class FakeStream:
    def __init__(self, device, priority=0):
        self.device, self.priority, self.waits, self.entered = device, priority, [], False

    def __enter__(self):
        # As PyTorch before 2.13 refuses it: a stream keeps one earlier stream to go back to.
        assert not self.entered, "a stream is entered twice"
        self.entered = True

    def __exit__(self, *error):
        self.entered = False

    def wait_event(self, event):
        assert event.recorded_s is not None, "an event that was never recorded orders nothing"
        self.waits.append(event)

    def record_event(self):
        event = FakeEvent(device=self.device)
        event.record(self)
        return event

    def synchronize(self):
        pass


class StandIn(AcceleratorKind):
    """A kind in the place of `xpu`, whose name every build of PyTorch knows. Its memory is the host's."""

    locks_pages = True
    events_cross_devices = True

    def stream(self, device, priority):
        return FakeStream(device, priority)

    def event(self, device, timed):
        return FakeEvent(timed=timed, device=device)

    def count(self):
        return 1

    def free_and_total_bytes(self, index):
        return 2**30, 2**31

    def peak_bytes(self, index):
        return 12345


class FakeLocker:
    def lock(self, address, nbytes):
        return 0

    def unlock(self, address):
        return 0


@pytest.fixture
def current(monkeypatch):
    """The stream that a thread allocates on."""
    default = FakeStream("default")
    monkeypatch.setitem(accelerators._registered(), "xpu", StandIn("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: default)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(host_memory, "PageLocker", FakeLocker)
    return default


def fake_device(worker, index=0):
    device = AcceleratorDevice(f"xpu:{index}", worker)
    assert device.name == f"xpu:{index}/{worker}" and device.torch_device == torch.device("xpu", index)
    device.torch_device = torch.device("cpu")
    return device


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_engine_trains_on_accelerators_as_on_others(current, num_workers):
    model, batches = toy_model(tied=True), toy_batches(5, micro_batches=4)
    store = toy_store(model, pinned=True)
    loop = PlainLoop(model, {name: view.clone() for name, view in store.weights().items()}, tied=True)
    workers = iter(range(num_workers))
    with toy_engine(
        model,
        store,
        PARTITIONS["forward coarser"],
        num_workers,
        wrap=lambda _: fake_device(next(workers)),
    ) as engine:
        losses = train(engine, batches)
        assert losses == loop.train(batches)
        assert_same_state(store.named_views(), loop.state())
        result = engine.forward_backward(batches[0])
        engine.step(0.0)
    assert sum(report.busy_s for report in result.reports()) > 0
    assert all(result.by_device(lambda slot: slot.uploaded_bytes, num_workers))


def test_devices_of_one_link_wait_for_each_others_uploads(current):
    devices = [fake_device(worker) for worker in range(3)]
    model, left = toy_model(), iter(devices)
    with toy_engine(
        model,
        toy_store(model),
        PARTITIONS["one layer a stage"],
        3,
        wrap=lambda _: next(left),
        turns=[(0, 1)],
    ) as engine:
        train(engine, toy_batches(2, micro_batches=4))
    streams = [device._streams[Stream.WEIGHT_UPLOAD] for device in devices]
    heard_of = [{event.stream for event in stream.waits} & set(streams) for stream in streams]
    assert heard_of == [{streams[1]}, {streams[0]}, set()]


def test_a_link_is_measured_with_the_devices_own_marks(current):
    devices = [fake_device(worker) for worker in range(2)]
    assert all(device.has_link for device in devices)
    rates = measure_rates(devices, torch.zeros(LEAST_BYTES, dtype=torch.uint8))
    assert len(rates.alone) == 2 and list(rates.together) == [(0, 1)]


def test_a_fresh_buffer_is_ordered_after_the_stream_that_allocated_it(current):
    device = fake_device(0)
    assert device.allocate(100).numel() == 100
    for stream in Stream:
        [event] = device._streams[stream].waits
        assert event.recorded_s is not None


def test_only_the_stream_that_rounds_gradients_goes_before_computation(current):
    priorities = {stream: device_stream.priority for stream, device_stream in fake_device(0)._streams.items()}
    assert priorities.pop(Stream.GRADIENT_DOWNLOAD) < 0
    assert set(priorities.values()) == {0} and set(UPLOADS) < set(priorities)


def test_marks_of_two_streams_wait_for_both(current):
    device = fake_device(0)
    earlier, later = device.mark(Stream.COMPUTE), device.mark(Stream.WEIGHT_UPLOAD)
    assert 0 <= later.seconds_since(earlier) == -earlier.seconds_since(later)
    earlier.event.recorded_s = None
    with pytest.raises(AssertionError, match="never recorded"):
        later.seconds_since(earlier)


def test_a_stream_waits_for_another_devices_event_only_if_the_kind_can(current, monkeypatch):
    """Otherwise the host waits, so that nothing starts early on either kind."""
    ours, other, host_waits = AcceleratorDevice("xpu:0"), AcceleratorDevice("xpu:1"), []
    monkeypatch.setattr(FakeEvent, "synchronize", lambda event: host_waits.append(event))
    for crosses in (False, True):
        monkeypatch.setattr(StandIn, "events_cross_devices", crosses)
        event = other.record(Stream.COMPUTE)
        ours.wait(Stream.COMPUTE, event)
        assert (event in host_waits, event in ours._streams[Stream.COMPUTE].waits) == (not crosses, crosses)
    own = ours.record(Stream.WEIGHT_UPLOAD)
    monkeypatch.setattr(StandIn, "events_cross_devices", False)
    ours.wait(Stream.COMPUTE, own)
    assert own not in host_waits and ours._streams[Stream.COMPUTE].waits[-1] is own


def test_threads_that_wait_for_an_event_of_a_cuda_device_sleep(monkeypatch):
    """`torch.Event` takes `blocking` and ignores it, so that kind makes events of its own."""
    made = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **flags: made.append(flags))
    for timed in (False, True):
        accelerators.CudaKind().event(torch.device("cuda", 0), timed)
    assert made == [
        {"enable_timing": False, "blocking": True},
        {"enable_timing": True, "blocking": False},
    ]


def test_an_allocation_that_fails_says_what_is_free(current, monkeypatch):
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("out of memory")

    device = fake_device(2)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(
        DeviceMemoryError, match=r"xpu:0/2 cannot allocate 3\.000 GiB: 1\.000 of its 2\.000 GiB"
    ):
        device.allocate(3 * 2**30)
