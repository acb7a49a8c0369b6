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

from torchround.checkpoint import Checkpointer, uncached_io
from torchround.checkpoint.tensor_file import plan_files
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


def written(path, pieces):
    """Write `pieces` of the space, each (start, length), to a new file. Returns the content of the file."""
    path.unlink(missing_ok=True)
    with closing(DirectFile(path)) as file:
        for start, length in pieces:
            file.write(SPACE[start : start + length])
        file.sync()
    return path.read_bytes()


def given_bytes(pieces):
    return b"".join(SPACE[start : start + length] for start, length in pieces)


def address_of(memory):
    return int(np.frombuffer(memory, np.uint8).ctypes.data) if len(memory) else 0


class Disk:
    """A disk behind `os.write` that refuses direct transfers unless they are whole blocks in memory and in the file.

    `copied_bytes` are written from other memory than `memories`, so somebody has copied them.
    """

    def __init__(self, monkeypatch, block_bytes, cut_bytes=None, memories=(SPACE,)):
        self.block_bytes = block_bytes
        self.cut_bytes = cut_bytes  # the first large direct transfer ends there
        self.ranges = [(address_of(memory), len(memory)) for memory in memories]
        self.direct_bytes = self.cached_bytes = self.copied_bytes = self.refused = 0
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def write(self, descriptor, memory):
        place, address = os.lseek(descriptor, 0, os.SEEK_CUR), address_of(memory)
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if is_direct and (address | len(memory) | place) % self.block_bytes:
            self.refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
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
        if len(memory) % self.block_bytes:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return len(memory)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Make the sizes small, so that tests fill the buffer and transfer some pieces directly."""
    monkeypatch.setattr(uncached_io, "_BUFFER_BYTES", 8192)
    monkeypatch.setattr(uncached_io, "_DIRECT_BYTES", 4096)


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


def test_a_disk_with_larger_blocks_than_any_known_is_written_through_the_cache_after_one_warning(
    tmp_path, monkeypatch, caplog
):
    uncached_io._warn_once.cache_clear()
    pieces = [(0, 2**16), (77, 2**18)]
    disk = Disk(monkeypatch, 2**16)
    for _ in range(2):
        assert written(tmp_path / "file", pieces) == given_bytes(pieces)
    assert disk.direct_bytes == disk.refused == 0 and disk.cached_bytes == 2 * (2**16 + 2**18)
    assert caplog.text.count("no direct transfers") == 1


@pytest.mark.parametrize("cut_bytes", [1, 512, 5000])
def test_a_transfer_that_is_cut_short_continues_where_it_stopped(tmp_path, monkeypatch, cut_bytes):
    disk = Disk(monkeypatch, 512, cut_bytes=cut_bytes)
    pieces = [(0, 2**17), (2**17, 2**17), (4096, 2**18), (0, 700)]
    assert written(tmp_path / "file", pieces) == given_bytes(pieces)
    assert disk.refused == (cut_bytes % 512 != 0)


def test_a_platform_without_direct_transfers_writes_ordinary_files(tmp_path, monkeypatch):
    pieces = [(3, 10_000), (0, 2**18)]
    monkeypatch.delattr(os, "O_DIRECT")
    assert written(tmp_path / "file", pieces) == given_bytes(pieces)


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_whose_first_write_fails_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", failing(errno.EIO))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Input/output"):
        DirectFile(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_full_disk_and_an_existing_file_raise_the_ordinary_errors(tmp_path, monkeypatch):
    written(tmp_path / "file", [(0, 10)])
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")
    monkeypatch.setattr(os, "write", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "file", [(0, 8192)])


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
    Checkpointer(tmp_path).save(1, views, {})
    assert disk.refused == 0 and disk.direct_bytes > 0.9 * file.size_bytes
    odd = [view.nbytes for view in views.values() if view.nbytes % SMALLEST_BLOCK_BYTES or view.nbytes < 4096]
    assert disk.copied_bytes <= len(file.header) + sum(odd)
