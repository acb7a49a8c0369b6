"""The tensor files: readable by the safetensors library, and written and read without a second copy."""

import ctypes
import errno
import mmap
import os
import resource

import safetensors.torch
import torch

from torchround.checkpoint import Checkpointer, verify_checkpoint
from torchround.checkpoint.tensor_file import (
    DTYPE_NAMES,
    PIECE_BYTES,
    Unwatched,
    plan_files,
    read_header,
    read_tensor_file,
    write_tensor_file,
)


def one_of_each_dtype():
    tensors = {str(dtype): (torch.arange(15).view(3, 5) % 2).to(dtype).view(5, 3).contiguous() for dtype in DTYPE_NAMES}
    return {**tensors, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "odd": torch.ones(3).bool()}


def test_the_safetensors_library_reads_what_is_written_and_what_it_writes_is_read(tmp_path):
    tensors = one_of_each_dtype()
    (file,) = plan_files(tensors)
    write_tensor_file(tmp_path / "ours", file, Unwatched())
    safetensors.torch.save_file(tensors, tmp_path / "theirs", metadata={"by": "the library"})
    layout = read_header(tmp_path / "theirs")
    assert layout == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_tensor_file(tmp_path / "theirs", layout, read)
    for found in (read, safetensors.torch.load_file(tmp_path / "ours")):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name].float(), tensor.float())


def test_tensors_are_spread_over_files_in_order():
    tensors = {f"t{index}": torch.zeros(size) for index, size in enumerate([10, 10, 30, 2, 2, 50, 2])}
    files = plan_files(tensors, file_bytes=80)
    assert [list(file.tensors) for file in files] == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"], ["t6"]]
    assert [file.name for file in files][:2] == ["tensors-00000.safetensors", "tensors-00001.safetensors"]
    assert plan_files({}) == []


def test_updates_wait_for_the_tensors_of_their_own_layer_alone_unless_those_are_of_odd_sizes():
    sizes = {"first": 8, "odd": 3, "wide": 2, "last": 40}
    tensors = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    tensors["wide"] = torch.zeros(1)
    [file] = plan_files(tensors)
    assert list(file.tensors) == ["first", "last", "wide", "odd"], "each is aligned to its element"


def save_and_load(folder):
    def peak_bytes():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    flat = torch.full((40 * 2**20,), 3.0)  # 160 MiB; one tensor takes most of it
    state = dict(zip(("large", "a", "b"), flat.split([30 * 2**20, 5 * 2**20, 5 * 2**20]), strict=True))
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, {"small": torch.zeros(2)}, {})  # what is loaded on first use is not the state's
    before = peak_bytes()
    checkpointer.save(2, state, {})
    flat.zero_()
    checkpointer.load_latest(state)
    assert flat[::4096].eq(3.0).all()
    print(peak_bytes() - before, flat.nbytes)


def test_saving_and_loading_take_no_second_copy_of_the_state(processes, tmp_path):
    child = processes.run("tests.checkpoint.test_tensor_file:save_and_load", str(tmp_path), folder=tmp_path)
    assert child.wait() == 0, child.text()
    extra_bytes, state_bytes = map(int, child.text().split())
    assert extra_bytes < 0.05 * state_bytes


# A checkpoint leaves no pages in the page cache, and never holds many.

FILE_BYTES = 5 * PIECE_BYTES
PAGES = FILE_BYTES // mmap.PAGESIZE


def large_tensors():
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
    target = {name: torch.zeros_like(tensor) for name, tensor in large_tensors().items()}
    loaded = Checkpointer(checkpoint.parent).load_latest(target)
    assert loaded is not None and all(torch.equal(target[name], tensor) for name, tensor in large_tensors().items())


def test_no_page_of_a_checkpoint_stays_in_the_page_cache(tmp_path):
    """Compare with a file whose pages the test drops, since a folder in memory keeps every page."""
    plain = tmp_path / "plain"
    with open(plain, "xb") as file:
        file.write(bytes(FILE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        assert cached_pages(plain) > PAGES // 2, "a plain file is cached: else nothing is shown below"
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    path = Checkpointer(tmp_path / "checkpoints").save(1, large_tensors(), {})
    (tensor_file,) = path.glob("*.safetensors")
    for use in (lambda path: None, load, verify_checkpoint):
        use(path)
        assert cached_pages(tensor_file) <= cached_pages(plain) + PAGES // 50


def test_pages_are_given_back_while_a_file_is_still_written(tmp_path, monkeypatch):
    """The kernel is advised to drop pages after three pieces at most."""
    told, advise = [], os.posix_fadvise

    def recorded(descriptor, offset, nbytes, advice):
        assert offset == 0 and advice == os.POSIX_FADV_DONTNEED
        told.append((nbytes, os.fstat(descriptor).st_size))
        advise(descriptor, offset, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", recorded)
    path = Checkpointer(tmp_path).save(1, large_tensors(), {})
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
    load(Checkpointer(tmp_path).save(1, large_tensors(), {}))
