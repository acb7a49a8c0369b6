"""Files written past the page cache hold the given bytes, on any disk and after any interrupted transfer."""

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchround.checkpoint import Checkpointer, verify_checkpoint
from torchround.checkpoint.tensor_file import memory_of, plan_files
from torchround.checkpoint.uncached_io import PIECE_BYTES, SMALLEST_BLOCK_BYTES, DirectFile
from torchround.engine.store.bundles import ASYNC, SYNC
from torchround.engine.store.host_store import HostStore
from torchround.models import FAMILIES

SPACE = memoryview(mmap.mmap(-1, 2**19))
SPACE[:] = os.urandom(len(SPACE))
PIECES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 100, 511, 512, 513, 4096, 5000, 8192]) | st.integers(0, 2**16),
        st.sampled_from([0, 1, 8, 512, 1024, 4096, 12288, 20480]) | st.integers(0, 2**17),
    ),
    max_size=8,
)
WRITE = os.write


def write(path, memories):
    """Write to a new file with sizes so small that the buffer fills up and some pieces are transferred directly."""
    with closing(DirectFile(path, buffer_bytes=8192, direct_bytes=4096)) as file:
        for memory in memories:
            file.write(memory)
        file.sync()


def written(path, pieces):
    """Write `pieces` of the space, each (start, length), to a new file. Returns the content of the file."""
    path.unlink(missing_ok=True)
    write(path, [SPACE[start : start + length] for start, length in pieces])
    return path.read_bytes()


def given_bytes(pieces):
    return b"".join(SPACE[start : start + length] for start, length in pieces)


def address_of(memory):
    return int(np.frombuffer(memory, np.uint8).ctypes.data) if len(memory) else 0


class Disk:
    """A disk behind `os.write` that refuses direct transfers unless they are whole blocks in memory and in the file.

    `copied_bytes` are written from other memory than `memories`: they were copied. With `error` each write fails.
    """

    def __init__(self, monkeypatch, block_bytes, cut_bytes=None, memories=(SPACE,), error=None):
        self.block_bytes = block_bytes
        self.error = error
        self.cut_bytes = cut_bytes  # the first large direct transfer ends there
        self.ranges = [(address_of(memory), len(memory)) for memory in memories]
        self.direct_bytes = self.cached_bytes = self.copied_bytes = self.refused = 0
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def write(self, descriptor, memory):
        place, address = os.lseek(descriptor, 0, os.SEEK_CUR), address_of(memory)
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        self.fail_with(self.error)
        if is_direct and (address | len(memory) | place) % self.block_bytes:
            self.refused += 1
            self.fail_with(errno.EINVAL)
        if is_direct and self.cut_bytes is not None and len(memory) > self.cut_bytes:
            memory, self.cut_bytes = memory[: self.cut_bytes], None
            return self.write_cached(descriptor, memory)
        if is_direct:
            self.direct_bytes += len(memory)
        else:
            self.cached_bytes += len(memory)
        if not any(start <= address < start + length for start, length in self.ranges):
            self.copied_bytes += len(memory)
        return WRITE(descriptor, memory)

    def write_cached(self, descriptor, memory):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        num_written = WRITE(descriptor, memory)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return num_written

    def pwrite(self, descriptor, memory, place):
        self.fail_with(errno.EINVAL if len(memory) % self.block_bytes else self.error)
        return len(memory)

    def fail_with(self, number):
        if number is not None:
            raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("block_bytes", [512, 4096])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=PIECES)
def test_a_disk_gets_whole_blocks_and_all_but_the_last_directly(monkeypatch, tmp_path, block_bytes, pieces):
    with monkeypatch.context() as patch:
        disk = Disk(patch, block_bytes)
        assert written(tmp_path / "file", pieces) == given_bytes(pieces)
    assert disk.refused == 0 and disk.cached_bytes < 8192


def test_aligned_blocks_are_written_without_a_copy(tmp_path, monkeypatch):
    """Blocks after copied pieces are not copied either, once file and memory are aligned again."""
    disk = Disk(monkeypatch, 512)
    pieces = [(0, 512), (512, 2**16), (2**16, 100), (512 + 100, 2**18), (100, 512), (612, 412)]
    assert written(tmp_path / "file", pieces) == given_bytes(pieces)
    assert disk.copied_bytes == 512 + 100 + 412 + 100 + 512 + 412
    assert disk.cached_bytes == 1024 and disk.direct_bytes == 512 + 2**16 + 2**18


def test_a_disk_with_larger_blocks_than_any_known_is_written_through_the_cache(tmp_path, monkeypatch):
    pieces = [(0, 2**16), (77, 2**18)]
    disk = Disk(monkeypatch, 2**16)
    assert written(tmp_path / "file", pieces) == given_bytes(pieces)
    assert disk.direct_bytes == disk.refused == 0 and disk.cached_bytes == 2**16 + 2**18


@pytest.mark.parametrize("cut_bytes", [1, 512, 5000])
def test_a_transfer_that_is_cut_short_continues_where_it_stopped(tmp_path, monkeypatch, cut_bytes):
    disk = Disk(monkeypatch, 512, cut_bytes=cut_bytes)
    pieces = [(0, 2**17), (2**17, 2**17), (4096, 2**18), (0, 700)]
    assert written(tmp_path / "file", pieces) == given_bytes(pieces)
    assert disk.refused == (cut_bytes % 512 != 0)


def test_a_disk_that_fails_and_an_existing_file_raise_the_ordinary_errors_and_close_the_file(tmp_path, monkeypatch):
    written(tmp_path / "file", [(0, 10)])
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")
    before = os.listdir("/proc/self/fd")
    for number in (errno.EIO, errno.ENOSPC):
        Disk(monkeypatch, 512, error=number)
        with pytest.raises(OSError, match=os.strerror(number)):
            written(tmp_path / "file", [(0, 8192)])
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize(
    ("family", "flavor", "policy"),
    [("llama3", "debug", SYNC), ("qwen3", "debug_moe", ASYNC), ("gpt_oss", "debug", SYNC)],
)
def test_the_host_store_is_written_without_a_copy(tmp_path, monkeypatch, family, flavor, policy):
    """A copy is made only of the header and of parameters that are small or not whole blocks."""
    store = HostStore(FAMILIES[family].build(FAMILIES[family].flavors[flavor]), torch.bfloat16, policy=policy)
    views = store.named_views()
    (file,) = plan_files(views)
    memories = [view.view(-1).view(torch.uint8).numpy().data for view in views.values()]
    disk = Disk(monkeypatch, SMALLEST_BLOCK_BYTES, memories=memories)
    write(tmp_path / "file", [memoryview(file.header), *map(memory_of, file.tensors.values())])
    assert disk.refused == 0 and disk.direct_bytes > 0.9 * file.size_bytes
    odd = [view.nbytes for view in views.values() if view.nbytes % SMALLEST_BLOCK_BYTES or view.nbytes < 4096]
    assert disk.copied_bytes <= len(file.header) + sum(odd)


# A checkpoint leaves no pages in the page cache, and never holds many, written directly or through it.


FILE_BYTES = 5 * PIECE_BYTES
PAGES = FILE_BYTES // mmap.PAGESIZE


def tensors():
    """Make `FILE_BYTES` of tensors, three of them, that end in the middle of pages."""
    half = FILE_BYTES // 8
    return {"a": torch.arange(half).float(), "b": torch.ones(half - 80), "small": torch.ones(80)}


def cached_pages(path):
    """Count the file's pages that are in the page cache, without bringing any in."""
    libc, nbytes = ctypes.CDLL(None, use_errno=True), path.stat().st_size
    residency = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), nbytes) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(nbytes), residency)
        del start
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in residency)


def load(checkpoint):
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    loaded = Checkpointer(checkpoint.parent).load_latest(target)
    assert loaded is not None and all(torch.equal(target[name], tensor) for name, tensor in tensors().items())


@pytest.fixture
def through_the_cache(monkeypatch):
    """Make a platform without direct transfers."""
    monkeypatch.delattr(os, "O_DIRECT")


@pytest.mark.parametrize("written", ["directly", "through_the_cache"])
def test_no_page_of_a_checkpoint_stays_in_the_page_cache(tmp_path, request, written):
    """Compare with a file whose pages the test drops, since a folder in memory keeps every page."""
    if written == "through_the_cache":
        request.getfixturevalue(written)
    plain = tmp_path / "plain"
    with open(plain, "xb") as file:
        file.write(bytes(FILE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        assert cached_pages(plain) > PAGES // 2, "a plain file is cached: else nothing is shown below"
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    path = Checkpointer(tmp_path / "checkpoints").save(1, tensors(), {})
    (tensor_file,) = path.glob("*.safetensors")
    for use in (lambda path: None, load, verify_checkpoint):
        use(path)
        assert cached_pages(tensor_file) <= cached_pages(plain) + PAGES // 50


def test_pages_are_given_back_while_a_file_is_still_written(tmp_path, monkeypatch, through_the_cache):
    """Write through the page cache: the kernel is advised to drop pages after three pieces at most."""
    told, advise = [], os.posix_fadvise

    def recorded(descriptor, offset, nbytes, advice):
        assert offset == 0 and advice == os.POSIX_FADV_DONTNEED
        told.append((nbytes, os.fstat(descriptor).st_size))
        advise(descriptor, offset, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", recorded)
    path = Checkpointer(tmp_path).save(1, tensors(), {})
    *pieces, (last, length) = told
    assert last == 0 and [length] == [file.stat().st_size for file in path.glob("*.safetensors")]
    assert len(pieces) >= 4 and all(nbytes <= written for nbytes, written in pieces)
    before = [0, *(nbytes for nbytes, _ in pieces)]
    assert max(written - earlier for earlier, (_, written) in zip(before, pieces, strict=False)) <= 3 * PIECE_BYTES


def test_checkpoints_work_on_a_system_that_refuses_the_advice(tmp_path, monkeypatch):
    """Python may have the call although the kernel does not."""

    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    load(Checkpointer(tmp_path).save(1, tensors(), {}))
