"""A checkpoint leaves no pages in the page cache, and never holds many, written directly or through it."""

import ctypes
import errno
import mmap
import os

import pytest
import torch

from torchround.checkpoint import Checkpointer, verify_checkpoint
from torchround.checkpoint.uncached_io import PIECE_BYTES

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
    """A platform without direct transfers."""
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
