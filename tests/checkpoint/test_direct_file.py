"""Files written past the page cache hold the given bytes, on any disk and after any interrupted transfer."""

import errno
import fcntl
import mmap
import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchround.checkpoint import Checkpointer, uncached_io
from torchround.checkpoint.tensor_file import plan_files
from torchround.checkpoint.uncached_io import SMALLEST_BLOCK_BYTES, DirectFile
from torchround.engine.store.bundles import ASYNC, SYNC, UpdatePolicy
from torchround.engine.store.host_store import HostStore
from torchround.models import FAMILIES

SPACE = memoryview(mmap.mmap(-1, 2**20))
SPACE[:] = os.urandom(len(SPACE))
PIECES = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 100, 511, 512, 513, 4096, 5000, 8192]) | st.integers(0, 2**16),
        st.sampled_from([0, 1, 8, 512, 1024, 4096, 12288, 20480]) | st.integers(0, 2**19),
    ),
    max_size=12,
)
WRITE = os.write


def written(folder: Path, pieces: list[tuple[int, int]]) -> bytes:
    """Write `pieces` of the space, each (start, length), to a file. Returns the content of the file."""
    path = folder / "file"
    path.unlink(missing_ok=True)
    with closing(DirectFile(path)) as file:
        for start, length in pieces:
            file.write(SPACE[start : start + length])
        file.sync()
    return path.read_bytes()


def given_bytes(pieces: list[tuple[int, int]]) -> bytes:
    return b"".join(SPACE[start : start + length] for start, length in pieces)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of bytes of each copy into the buffer."""
    sizes: list[int] = []
    hold = DirectFile._hold

    def counted(file: DirectFile, memory: memoryview) -> None:
        sizes.append(len(memory))
        hold(file, memory)

    monkeypatch.setattr(DirectFile, "_hold", counted)
    return sizes


class Disk:
    """A disk behind `os.write` that refuses direct transfers unless they are whole blocks in memory and in the file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, block_bytes: int, cut_bytes: int | None = None) -> None:
        self.block_bytes = block_bytes
        self.cut_bytes = cut_bytes  # the first large direct transfer ends there
        self.direct_bytes = self.cached_bytes = self.refused = 0
        monkeypatch.setattr(os, "write", self._write)
        monkeypatch.setattr(os, "pwrite", self._pwrite)

    def _write(self, descriptor: int, memory: memoryview) -> int:
        place = os.lseek(descriptor, 0, os.SEEK_CUR)
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            self.cached_bytes += len(memory)
        elif (uncached_io._address(memory) | len(memory) | place) % self.block_bytes:
            self.refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        elif self.cut_bytes is not None and len(memory) > self.cut_bytes:
            memory, self.cut_bytes = memory[: self.cut_bytes], None
            self._set_flags(descriptor, direct=False)
            num_written = WRITE(descriptor, memory)
            self._set_flags(descriptor, direct=True)
            return num_written
        else:
            self.direct_bytes += len(memory)
        return WRITE(descriptor, memory)

    def _set_flags(self, descriptor: int, direct: bool) -> None:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def _pwrite(self, descriptor: int, memory: memoryview, place: int) -> int:
        if len(memory) % self.block_bytes:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return len(memory)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sizes small, so that tests fill the buffer and transfer some pieces directly."""
    monkeypatch.setattr(uncached_io, "_BUFFER_BYTES", 8192)
    monkeypatch.setattr(uncached_io, "_DIRECT_BYTES", 4096)


@settings(max_examples=200, deadline=None)
@given(pieces=PIECES)
def test_a_file_holds_what_it_was_given(pieces: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert written(Path(folder), pieces) == given_bytes(pieces)


@pytest.mark.parametrize("block_bytes", [512, 4096])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=PIECES)
def test_a_disk_gets_whole_blocks_and_all_but_the_last_directly(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int, pieces: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        disk = Disk(patch, block_bytes)
        assert written(Path(folder), pieces) == given_bytes(pieces)
    assert disk.refused == 0 and disk.cached_bytes < 8192


def test_aligned_blocks_are_written_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int]
) -> None:
    """Blocks after copied pieces are not copied either, once file and memory are aligned again."""
    disk = Disk(monkeypatch, 512)
    pieces = [(0, 512), (512, 2**16), (2**16, 100), (512 + 100, 2**18), (100, 512), (612, 412)]
    assert written(tmp_path, pieces) == given_bytes(pieces)
    assert copied == [512, 0, 100, 412, 100, 512, 412]
    assert disk.cached_bytes == 1024 and disk.direct_bytes == 512 + 2**16 + 2**18


def test_a_disk_with_larger_blocks_than_any_known_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [(0, 2**16), (77, 2**18)]
    disk = Disk(monkeypatch, 2**16)
    assert written(tmp_path, pieces) == given_bytes(pieces)
    assert disk.direct_bytes == disk.refused == 0 and disk.cached_bytes == 2**16 + 2**18


@pytest.mark.parametrize("cut_bytes", [1, 512, 5000])
def test_a_transfer_that_is_cut_short_continues_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_bytes: int
) -> None:
    disk = Disk(monkeypatch, 512, cut_bytes=cut_bytes)
    pieces = [(0, 2**17), (2**17, 2**17), (4096, 2**18), (0, 700)]
    assert written(tmp_path, pieces) == given_bytes(pieces)
    assert disk.refused == (cut_bytes % 512 != 0)


def test_a_platform_without_direct_transfers_writes_ordinary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [(3, 10_000), (0, 2**18)]
    monkeypatch.delattr(os, "O_DIRECT")
    assert written(tmp_path, pieces) == given_bytes(pieces)


def test_a_disk_without_direct_transfers_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uncached_io._warn_once.cache_clear()
    Disk(monkeypatch, 2**16)
    for _ in range(2):
        written(tmp_path, [(0, 100)])
    assert [record.getMessage()[:41] for record in caplog.records] == ["the disk takes no direct transfers (O_DIR"]


def test_a_file_whose_first_write_fails_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Input/output"):
        DirectFile(tmp_path / "file")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_full_disk_and_an_existing_file_raise_the_ordinary_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, [(0, 10)])
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path, [(0, 8192)])


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=["sync", "async"])
@pytest.mark.parametrize("family, flavor", [("llama3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")])
def test_the_host_store_is_written_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[int], family: str, flavor: str, policy: UpdatePolicy
) -> None:
    """A copy is made only of the header and of parameters that are small or not whole blocks."""
    store = HostStore(FAMILIES[family].build(FAMILIES[family].flavors[flavor]), torch.bfloat16, policy=policy)
    views = store.named_views()
    (file,) = plan_files(views)
    disk = Disk(monkeypatch, SMALLEST_BLOCK_BYTES)
    Checkpointer(tmp_path).save(1, views, {})
    assert disk.refused == 0 and disk.direct_bytes > 0.9 * file.size_bytes
    assert sum(copied) <= len(file.header) + sum(
        view.nbytes for view in views.values() if view.nbytes % SMALLEST_BLOCK_BYTES or view.nbytes < 4096
    )
