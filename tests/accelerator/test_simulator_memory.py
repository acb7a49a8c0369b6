"""Device memory of the simulated accelerator: limits, reuse, poison, statistics; and page-locked host memory."""

import mmap
import signal
import subprocess
import sys

import pytest
import torch

DEVICE = "simulated:0"
MIB = 2**20
PAGE = mmap.PAGESIZE
ALREADY_LOCKED, NOT_LOCKED, INVALID = 712, 713, 1


def buffer(nbytes, device=DEVICE):
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def host_pages(pages):
    """Return page-aligned host memory and its address."""
    memory = torch.frombuffer(mmap.mmap(-1, pages * PAGE), dtype=torch.uint8)
    return memory, memory.data_ptr()


@pytest.fixture
def late_stream(simulator):
    """A stream whose tasks run only if a thread waits for them."""
    stream = torch.Stream(device=DEVICE)
    torch.accelerator.synchronize()
    simulator.run_adversarially(0, {stream: "late"})
    return stream


def test_memory_without_contents_is_nan(simulator):
    # More than anything else allocates on that device, so some of it was never used before.
    assert torch.empty(16 * MIB, device="simulated:3").isnan().all()
    assert torch.empty(1000, device=DEVICE).isnan().all()
    assert torch.empty(1000, device=DEVICE, dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(1000, device=DEVICE, dtype=torch.int64) == -1).all()


def test_freed_memory_serves_the_next_allocation_of_its_stream_and_of_no_other(simulator):
    other = torch.Stream(device=DEVICE)
    first = buffer(MIB)
    address = first.data_ptr()
    del first
    with other:
        elsewhere = buffer(MIB)
    again = buffer(MIB)
    assert elsewhere.data_ptr() != address == again.data_ptr()
    assert simulator.memory_statistics()["system_allocations"] >= 2


def test_freed_memory_is_poisoned_in_the_order_of_its_stream(simulator, late_stream):
    with late_stream:
        x = torch.full((256,), 3.0, device=DEVICE)
        doubled = x * 2
        view = x.as_strided((256,), (1,))  # what a kernel that was enqueued too late would read
        address = x.data_ptr()
        del x, view
        again = torch.empty(256, device=DEVICE)
    assert again.data_ptr() == address
    late_stream.synchronize()
    assert (doubled.cpu() == 6).all(), "the kernel ran before the memory was freed"
    assert again.isnan().all()


def test_memory_that_another_stream_uses_is_not_reused_before_it_has_passed(simulator, late_stream):
    x = buffer(MIB)
    address = x.data_ptr()
    with late_stream:
        x.add_(1)
    x.record_stream(late_stream)
    del x
    assert buffer(MIB).data_ptr() != address
    late_stream.synchronize()
    assert buffer(MIB).data_ptr() == address


def test_what_does_not_fit_is_an_out_of_memory_error_and_cached_memory_is_given_back_first(simulator):
    simulator.set_memory_limit(2, 10 * MIB)
    held = buffer(4 * MIB, "simulated:2")
    with torch.Stream(device="simulated:2"):
        cached = buffer(4 * MIB, "simulated:2")
    del cached
    larger = buffer(6 * MIB, "simulated:2")  # needs what the other stream has cached
    counts = simulator.memory_statistics(2)
    assert counts["flushes"] >= 1 and simulator.synchronous_operations()["flush of cached memory"] == 1
    with pytest.raises(torch.OutOfMemoryError, match=r"simulated:2 out of memory. Tried to allocate 1048576 bytes"):
        buffer(MIB, "simulated:2")
    assert buffer(MIB, "simulated:1").numel() == MIB
    assert simulator.memory_statistics(2)["out_of_memory"] == counts["out_of_memory"] + 1
    del held, larger
    assert buffer(MIB, "simulated:2").numel() == MIB


def test_other_processes_take_memory_too(simulator):
    simulator.set_memory_limit(2, 10 * MIB)
    simulator.occupy(2, 7 * MIB)
    held = torch.accelerator.memory_reserved(2)
    assert torch.accelerator.get_memory_info(2) == (3 * MIB - held, 10 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="other processes have 7340032 bytes"):
        buffer(4 * MIB, "simulated:2")


def test_statistics_are_those_that_pytorch_asks_for(simulator):
    torch.accelerator.reset_peak_memory_stats(1)
    before = torch.accelerator.memory_allocated(1)
    first, second = buffer(MIB, "simulated:1"), buffer(2 * MIB + 1, "simulated:1")
    assert torch.accelerator.memory_allocated(1) - before == 3 * MIB + 512
    del first
    assert torch.accelerator.memory_allocated(1) - before == 2 * MIB + 512
    assert torch.accelerator.max_memory_allocated(1) - before == 3 * MIB + 512
    assert torch.accelerator.memory_reserved(1) >= 3 * MIB + 512
    assert torch.accelerator.memory_stats(1)["num_device_alloc"] == simulator.memory_statistics(1)["system_allocations"]
    del second
    torch.accelerator.reset_peak_memory_stats(1)
    assert torch.accelerator.max_memory_allocated(1) == before
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(1) == before


READ = """
import ctypes
from tests.simulated_accelerator.simulator import load
import torch
load()
x = torch.ones(4, device="simulated:0")
torch.accelerator.synchronize()
print("touching", flush=True)
ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0]
"""


def test_the_host_cannot_touch_device_memory(simulator, pytestconfig):
    ended = subprocess.run(
        [sys.executable, "-c", READ], cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False
    )
    assert "touching" in ended.stdout, ended.stderr
    assert ended.returncode == -signal.SIGSEGV


def test_page_locking_refuses_what_cuda_refuses(simulator):
    memory, address = host_pages(4)
    assert simulator.host_register(address, 0) == INVALID
    assert simulator.host_register(0, PAGE) == INVALID
    assert simulator.host_register(address, 2 * PAGE) == 0
    for start, nbytes in ((0, 2 * PAGE), (PAGE, 2 * PAGE), (2 * PAGE - 8, 8)):
        assert simulator.host_register(address + start, nbytes) == ALREADY_LOCKED
    assert simulator.host_unregister(address + PAGE) == NOT_LOCKED
    assert simulator.page_locked_bytes() == 2 * PAGE
    assert memory.is_pinned() and not host_pages(1)[0].is_pinned()
    assert simulator.host_unregister(address) == 0
    assert simulator.host_unregister(address) == NOT_LOCKED
    assert simulator.page_locked_bytes() == 0 and simulator.unmapped_while_locked() == 0


def test_memory_that_is_unmapped_is_not_locked_and_memory_that_is_locked_not_unmapped(simulator):
    mapping = mmap.mmap(-1, 2 * PAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    address = memory.data_ptr()
    assert simulator.host_register(address, 2 * PAGE) == 0
    del memory
    mapping.close()
    assert simulator.unmapped_while_locked() == 1
    assert simulator.host_unregister(address) == INVALID
    assert simulator.unmapped_while_locked() == 1
    assert simulator.host_register(address, 2 * PAGE) == INVALID


def test_a_copy_of_locked_memory_comes_later_and_one_of_other_memory_blocks(simulator, late_stream):
    memory, address = host_pages(1)
    memory.fill_(5)
    assert simulator.host_register(address, PAGE) == 0
    target = buffer(PAGE)
    torch.accelerator.synchronize()
    simulator.keep_journal(10)
    with late_stream:
        target.copy_(memory, non_blocking=True)
    assert simulator.journal() == [] and simulator.pageable_copies() == 0
    memory.fill_(6)
    late_stream.synchronize()
    assert (target.cpu() == 6).all(), "the copy reads what is there when it runs"
    other = torch.full((PAGE,), 7, dtype=torch.uint8)
    with late_stream:
        target.copy_(other, non_blocking=True)
        other.zero_()
    assert simulator.pageable_copies() == 1
    assert (target.cpu() == 7).all()
    assert simulator.host_unregister(address) == 0


def test_memory_that_is_unlocked_before_its_copy_ran_is_a_fault(simulator, late_stream):
    memory, address = host_pages(1)
    assert simulator.host_register(address, PAGE) == 0
    with late_stream:
        buffer(PAGE).copy_(memory, non_blocking=True)
    assert simulator.host_unregister(address) == 0
    with pytest.raises(RuntimeError, match="unlocked before it was copied"):
        late_stream.synchronize()
    assert simulator.copies_from_unlocked_memory() == 1


def test_a_copy_between_devices_waits_for_both(simulator, late_stream):
    source = torch.zeros(64, device="simulated:1")
    torch.accelerator.synchronize(1)
    with late_stream:
        target = torch.zeros(64, device=DEVICE)
        source.add_(3)
        target.copy_(source)
        target.mul_(2)
        late_stream.synchronize()
    assert (target.cpu() == 6).all()
