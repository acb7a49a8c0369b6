"""Files written past the page cache hold the given bytes, on any disk and after any interrupted transfer."""

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

from torchround.checkpoint.tensor_file import memory_of, plan_files
from torchround.checkpoint.uncached_io import SMALLEST_BLOCK_BYTES, DirectFile
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

    `copied_bytes` are written from other memory than `memories`, so somebody has copied them. With `error` it fails.
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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=PIECES)
def test_a_file_holds_what_it_was_given(tmp_path, pieces):
    assert written(tmp_path / "file", pieces) == given_bytes(pieces)


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
