"""`AcceleratorDevice` on a real device of its kind: buffers, streams, marks and links, as the engine relies on them."""

import pytest
import torch

from torchround import accelerators
from torchround.engine.device import UPLOADS, AcceleratorDevice, Stream
from torchround.engine.store.host_memory import HostAllocator


@pytest.mark.parametrize("stream", Stream)
def test_a_fresh_buffer_is_ordered_after_the_stream_that_allocated_it(simulator, kind, stream):
    """The memory's previous user still has work in that stream, which destroys what others write before it."""
    memory = HostAllocator(True)
    landed = memory.allocate(2**20, for_devices=True)
    roles = {torch.accelerator.current_stream(kind + ":0"): "late"}
    device = AcceleratorDevice(f"{kind}:0")
    simulator.run_adversarially(0, roles | {device._streams[stream]: "early"})
    before = torch.empty(2**20, dtype=torch.uint8, device=f"{kind}:0")
    address = before.data_ptr()
    before.fill_(1)
    del before
    buffer = device.allocate(2**20)
    assert buffer.data_ptr() == address, "freed memory is used again"
    device.run(stream, lambda: buffer.fill_(2))
    device.copy(stream, landed, buffer)
    # The event alone, so that the schedule runs nothing else for it.
    device.record(stream).synchronize()
    device.finish()
    torch.accelerator.synchronize()
    device.copy(stream, landed, buffer)
    device.finish()
    assert landed.eq(2).all()
    memory.close()


def test_only_the_stream_that_rounds_gradients_goes_before_computation(kind, monkeypatch):
    asked = []
    stream = accelerators.kind_of(kind).stream
    monkeypatch.setattr(
        type(accelerators.kind_of(kind)),
        "stream",
        lambda self, device, priority: asked.append(priority) or stream(device, priority),
    )
    AcceleratorDevice(f"{kind}:0")
    priorities = dict(zip(Stream, asked, strict=True))
    assert priorities.pop(Stream.GRADIENT_DOWNLOAD) < 0
    assert set(priorities.values()) == {0} and set(UPLOADS) < set(priorities)


def test_marks_of_two_streams_wait_for_both(kind):
    """Either stream may reach its mark last."""
    device = AcceleratorDevice(f"{kind}:0")
    buffer = device.allocate(2**20)
    device.run(Stream.COMPUTE, buffer.zero_)
    earlier = device.mark(Stream.COMPUTE)
    device.run(Stream.WEIGHT_UPLOAD, buffer.zero_)
    later = device.mark(Stream.WEIGHT_UPLOAD)
    assert later.seconds_since(earlier) == pytest.approx(-earlier.seconds_since(later))
    # Traces place marks on the host's clock, one after the other.
    apart_s = device.host_s(later) - device.host_s(earlier)
    assert apart_s == pytest.approx(later.seconds_since(earlier), abs=1e-6) and device.host_s(later) > 0
    assert earlier.event.query() and later.event.query()


@pytest.mark.parametrize("crosses", [False, True])
def test_work_that_waits_for_another_device_comes_after_it_whether_or_not_events_cross(
    simulator, kind, monkeypatch, crosses
):
    """If a stream cannot wait for another device's event, the host waits in its place."""
    monkeypatch.setattr(type(accelerators.kind_of(kind)), "events_cross_devices", crosses)
    memory = HostAllocator(True)
    host = memory.allocate(2**20, for_devices=True)
    makes, takes = (AcceleratorDevice(f"{kind}:{index}") for index in range(2))
    made, taken = makes.allocate(2**20), takes.allocate(2**20)
    simulator.run_adversarially(0, {makes._streams[Stream.COMPUTE]: "late"})
    makes.run(Stream.COMPUTE, lambda: made.fill_(3))
    makes.wait(Stream.ACTIVATION_DOWNLOAD, makes.record(Stream.COMPUTE))
    makes.copy(Stream.ACTIVATION_DOWNLOAD, host, made)
    landed = makes.record(Stream.ACTIVATION_DOWNLOAD)
    takes.wait(Stream.ACTIVATION_UPLOAD, landed)
    assert landed.query() is not crosses
    takes.copy(Stream.ACTIVATION_UPLOAD, taken, host)
    takes.finish()
    assert taken.cpu().eq(3).all()
    memory.close()


def test_each_thread_drives_the_device_that_it_entered(kind, two_devices):
    try:
        for index in (1, 0):
            AcceleratorDevice(f"{kind}:{index}").enter_thread()
            assert torch.accelerator.current_device_index() == index
    finally:
        torch.accelerator.set_device_index(0)
