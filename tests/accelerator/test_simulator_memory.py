"""Device memory of the simulated accelerator: limits, reuse, poison, statistics; and page-locked host memory."""

import mmap

import pytest
import torch

DEVICE = "simulated:0"
MIB = 2**20
PAGE = mmap.PAGESIZE
ALREADY_LOCKED, NOT_LOCKED, INVALID = 712, 713, 1


def buffer(nbytes, device=DEVICE):
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def host_pages(pages):
    memory = torch.frombuffer(mmap.mmap(-1, pages * PAGE), dtype=torch.uint8)
    return memory, memory.data_ptr()


@pytest.fixture
def late_stream(simulator):
    stream = torch.Stream(device=DEVICE)
    torch.accelerator.synchronize()
    simulator.run_adversarially(0, {stream: "late"})
    return stream


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
