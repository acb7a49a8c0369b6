"""Host memory for devices: exact sizes, filled, page-locked in pieces, and each piece unlocked exactly once.

No CUDA is needed: a recording page locker takes the driver's place, and the memory is real.
"""

import ctypes
import gc
import mmap
import os
import warnings
import weakref

import pytest

from tests.support.toy import toy_model, toy_store
from torchround.engine.board import Observer
from torchround.engine.store import host_memory
from torchround.engine.store.host_memory import HostAllocator, HostPool
from torchround.planning.update_modes import ASYNC

PAGE = 4096
CHUNK = 64 * PAGE


class RecordingLocker:
    """A page locker that refuses, as CUDA does, a range that overlaps locked pages. Also refuses after `capacity` locks.

    `unmapped` are the locked addresses that had no memory any more when they were unlocked.
    """

    def __init__(self):
        self.capacity = 1000
        self.locked = {}
        self.refused = 0
        self.unmapped = []

    def lock_pages(self, address, nbytes):
        pages = range(address // PAGE, -(-(address + nbytes) // PAGE))
        taken = any(pages.start < held.stop and held.start < pages.stop for held in self.locked.values())
        if taken or len(self.locked) == self.capacity:
            self.refused += 1
            return 712 if taken else 2
        self.locked[address] = pages
        return 0

    def unlock_pages(self, address):
        pages = self.locked.pop(address)  # a KeyError would be an unregistration of what never was
        if not is_mapped(address, len(pages) * PAGE):
            self.unmapped.append(address)
        return 0

    def pieces(self):
        return [(address, len(pages) * PAGE) for address, pages in sorted(self.locked.items())]


def is_mapped(address, nbytes):
    """Return whether every page of a range is there: the system cannot write back what is not."""
    libc, asynchronous = ctypes.CDLL(None, use_errno=True), 1
    return libc.msync(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), asynchronous) == 0


@pytest.fixture
def locker(monkeypatch):
    locker = RecordingLocker()
    monkeypatch.setattr(host_memory, "present_kind", lambda: locker)
    return locker


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(host_memory, "REGISTRATION_BYTES", CHUNK)


def test_buffers_have_their_exact_size_are_zeroed_and_share_no_page(small_chunks, locker):
    memory = HostAllocator(True)
    sizes = [4, 256, PAGE, 3 * PAGE + 1, 2 * CHUNK + 100]
    buffers = [memory.allocate(size, for_devices=True) for size in sizes]
    assert [buffer.numel() for buffer in buffers] == sizes
    assert all(buffer.data_ptr() % PAGE == 0 and not buffer.any() for buffer in buffers)
    assert memory.allocated_bytes == sum(sizes)
    assert locker.refused == 0 and len(locker.locked) == 5
    for _ in range(2):  # the second time has nothing to unlock
        memory.close()
        assert locker.locked == {} and not buffers[0].any()


def test_no_buffer_of_a_pool_crosses_two_registrations(small_chunks, locker):
    """CUDA refuses such a copy."""
    pool, sizes = HostPool(True, Observer()), {11 * PAGE: 9, 3 * PAGE: 20, 5 * PAGE: 4}
    pool.reserve(sizes)
    held = locker.pieces()
    for size in [size for size, number in sizes.items() for _ in range(number)]:
        start = pool.take(size).memory.data_ptr()
        assert any(first <= start and start + size <= first + nbytes for first, nbytes in held)
    assert all(nbytes <= CHUNK for _, nbytes in held)
    assert sum(nbytes for _, nbytes in held) == pool.allocated_bytes and pool.num_allocations == len(held) == 3
    pool.close()
    assert locker.locked == {}


def test_a_failed_lock_costs_one_warning_and_leaves_no_buffer_locked_in_part(small_chunks, locker):
    """A copy that begins in locked memory and ends in other memory is an error of CUDA's."""
    locker.capacity = 3
    memory = HostAllocator(True)
    with pytest.warns(RuntimeWarning, match="error 2 of") as caught:
        buffers = [memory.allocate(2 * CHUNK, for_devices=True) for _ in range(6)]
    assert len(caught) == 1 and locker.refused == 1
    assert set(locker.pieces()) == {(buffer.data_ptr(), 2 * CHUNK) for buffer in buffers[:3]}
    assert not any(buffer.any() for buffer in buffers)
    memory.close()
    assert locker.locked == {}


@pytest.mark.parametrize("closes", [False, True])
def test_memory_is_unlocked_and_then_given_back_once_no_view_refers_to_it(small_chunks, locker, closes):
    memory = HostAllocator(True)
    buffer = memory.allocate(2 * CHUNK, for_devices=True)
    address, view = buffer.data_ptr(), buffer[PAGE : 2 * PAGE]
    if closes:
        memory.close()
    del buffer
    gc.collect()
    assert is_mapped(address, 2 * CHUNK) and not view.any() and len(locker.locked) == (0 if closes else 1)
    del view
    gc.collect()
    assert locker.locked == {} and locker.unmapped == [] and not is_mapped(address, 2 * CHUNK)


def test_memory_that_is_still_locked_when_python_ends_is_not_unmapped(monkeypatch, locker):
    """At its end Python drops everything and runs no finalizer any more."""
    memory = HostAllocator(True)
    buffer = memory.allocate(3 * PAGE, for_devices=True)
    address = buffer.data_ptr()
    with monkeypatch.context() as ending:
        ending.setattr(weakref.finalize, "_shutdown", True)
        del buffer
        gc.collect()
    assert is_mapped(address, 3 * PAGE)


def test_a_forked_process_neither_unlocks_the_memory_nor_unmaps_what_took_its_place(locker):
    """The child may collect the object after a library was loaded at the buffer's address."""
    memory = HostAllocator(True)
    buffer = memory.allocate(PAGE, for_devices=True)
    libc, address = ctypes.CDLL(None, use_errno=True), buffer.data_ptr()
    libc.mmap.restype = ctypes.c_void_p
    fixed, readable = 0x100000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: the child only exits
        child = os.fork()
    if child == 0:
        code = 1
        if libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), readable, fixed, -1, ctypes.c_long(0)) == address:
            ctypes.memset(address, 7, PAGE)
            memory.close()
            del buffer, memory
            gc.collect()
            code = 0 if len(locker.locked) == 1 and ctypes.string_at(address, PAGE) == bytes([7]) * PAGE else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(locker.locked) == 1 and not buffer.any()
    memory.close()


def test_a_store_locks_device_weights_and_gradients_and_nothing_else(locker):
    for pinned in (False, True):
        store = toy_store(toy_model(), mode=ASYNC, pinned=pinned)
        store.allocate_gradients(rounds=1)
        assert len(locker.locked) == (3 * len(store.trained) if pinned else 0)
        store.close()
        assert locker.locked == {}


def test_the_pool_hands_out_the_buffer_that_was_given_back_first():
    """The last reader of the newest one may still be at work while older ones are free."""
    pool = HostPool(False, Observer())
    pool.reserve({PAGE: 3})
    first, second, third = (pool.take(PAGE) for _ in range(3))
    for buffer in (second, first, third):
        pool.give(buffer, busy=[])
    assert [pool.take(PAGE) for _ in range(3)] == [second, first, third]
    assert pool.num_allocations == 1
