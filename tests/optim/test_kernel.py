"""The compiled update: the plain pass's bits for any length and threads; its library; and a run without it.

A C++ compilation of about a second for each kind, kept in Inductor's cache folder like a user's own.
"""

import logging
import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from tests.support.kernel_kinds import (
    ADAMW,
    BF16,
    KINDS,
    SPLIT,
    copy_of,
    cut_out,
    example_buffers,
    have_same_bits,
    kind_of,
    written_in_place,
)
from torchround import compiled_loops
from torchround.compiled_loops import KernelError, RangeThreads
from torchround.optim import UpdateProgress, update_
from torchround.optim.kernel import CompiledUpdate, KernelKind, get_kernels
from torchround.optim.rules.adamw import AdamWRule

pytestmark = pytest.mark.compiles


def name_of(kind):
    names = [type(kind.rule).__name__, kind.format.name, str(kind.gradient), str(kind.written)]
    return "-".join([*names, *(["split"] if kind.splits else []), *(["predicts"] if kind.predicts else [])])


@pytest.fixture(scope="module")
def threads():
    found = RangeThreads(3)
    yield found
    found.close()


@pytest.fixture(scope="module")
def kernels(threads):
    found = get_kernels(KINDS, lambda: None, threads)
    assert found.keys() == set(KINDS)
    return found


def update(buffers, kernel, progress=None, predicts=False):
    update_(buffers, lr=3e-4, update=3, gradient_scale=0.7, progress=progress, kernel=kernel, predicts=predicts)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_the_kernel_gives_the_plain_passs_bits_for_every_short_length(kernels, kind):
    for numel in (*range(1, 35, 3), 127, 128, 129, 256, 257, 513):
        example = example_buffers(kind, numel, seed=numel)
        for plain in (example, written_in_place(example, kind.predicts)):
            compiled = copy_of(plain)
            update(plain, None, predicts=kind.predicts)
            update(compiled, kernels[kind], predicts=kind.predicts)
            assert have_same_bits(compiled, plain)


def test_its_bits_are_the_same_with_any_number_of_threads(kernels):
    before = threading.active_count()
    for kind in SPLIT:
        plain = example_buffers(kind, 1_000_003)
        example = copy_of(plain)
        update(plain, None)
        for some in (RangeThreads(1), RangeThreads(2), RangeThreads(5)):
            compiled = copy_of(example)
            update(compiled, get_kernels([kind], lambda: None, some)[kind])
            some.close()
            assert have_same_bits(compiled, plain)
    assert threading.active_count() == before


def test_other_threads_run_python_during_an_update():
    """They see an update half done. With the interpreter's lock held they would see none, however often they look."""
    kind = SPLIT[1]
    one_thread = get_kernels([kind], lambda: None)[kind]
    buffers = example_buffers(kind, 2**23)
    written, seen_between = buffers.written, False
    for _ in range(200):
        written.fill_(7.0)  # which no update of these weights gives
        thread = threading.Thread(target=update, args=(buffers, one_thread))
        thread.start()
        while thread.is_alive() and not seen_between:
            seen_between = bool(written[0] != 7.0) and bool(written[-1] == 7.0)
        thread.join()
        if seen_between:
            break
    assert seen_between


@pytest.mark.parametrize("kind", SPLIT, ids=name_of)
def test_a_second_moment_that_overflows_stays_infinite_as_in_the_plain_pass(kernels, kind):
    """The next step is divided by its root: a zero would make that step huge."""
    plain = example_buffers(kind, 300)
    assert plain.gradient is not None
    plain.gradient[5], plain.gradient[140] = 1e25, -1e30
    compiled = copy_of(plain)
    for _ in range(3):
        update(plain, None)
        update(compiled, kernels[kind])
        assert have_same_bits(compiled, plain)
        assert plain.values(0, 300)[1][[5, 140]].isinf().all()


def test_an_update_under_way_is_finished_by_the_plain_pass(kernels):
    """A retry must leave elements alone that hold new values already; `progress` counts them."""
    for kind in SPLIT:
        finished = example_buffers(kind, 5000)
        buffers = copy_of(finished)
        update(finished, None)
        update(cut_out(buffers, 0, 2048), kernels[kind])
        update(buffers, kernels[kind], UpdateProgress(done=2048))
        assert have_same_bits(buffers, finished)


def test_a_kernel_that_refuses_its_arguments_has_touched_nothing(kernels):
    kind, progress = SPLIT[0], UpdateProgress()
    buffers = replace(example_buffers(kind, 500), gradient=torch.ones(1000, dtype=BF16)[::2])
    before = copy_of(buffers)
    with pytest.raises(KernelError, match="contiguous"):
        update(buffers, kernels[kind], progress)
    assert have_same_bits(buffers, before)
    assert progress.done == 0


def test_a_second_run_finds_the_library_without_a_compiler(kernels, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("PATH", "")
    assert get_kernels([SPLIT[0]], lambda: None).keys() == {SPLIT[0]}


def test_the_library_is_named_by_what_decides_its_code(monkeypatch):
    libraries = [kind.library() for kind in KINDS]
    assert len(set(libraries)) == len(KINDS)
    assert kind_of(AdamWRule((0.5, 0.5), 1.0, 0.0)).library() == kind_of(ADAMW).library()  # numbers are arguments
    monkeypatch.setattr(compiled_loops, "FLAGS", ("-O0",))
    assert kind_of(ADAMW).library() not in libraries
    buffers = example_buffers(SPLIT[0], 10)
    assert KernelKind.of(buffers, predicts=False) == SPLIT[0]
    assert KernelKind.of(replace(buffers, gradient=torch.ones(10).double()), predicts=False) is None


@pytest.mark.parametrize(("compiler", "words"), [("/nonexistent", "No such file"), ("false", "failed (")])
def test_without_a_working_compiler_one_line_says_so_and_nothing_is_raised(
    tmp_path, monkeypatch, caplog, compiler, words
):
    monkeypatch.setenv("CXX", compiler)
    if compiler == "/nonexistent":
        monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert get_kernels([SPLIT[0]], lambda: None) == {}
    [record] = caplog.records
    assert words in record.getMessage() and "slower" in record.getMessage()


def test_a_file_that_is_no_library_is_not_used(kernels, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (compiled_loops.cache_folder() / SPLIT[0].library()).write_bytes(b"no library")
    assert get_kernels([SPLIT[0]], lambda: None) == {} and "cannot be loaded" in caplog.text


def test_code_that_another_user_could_have_put_there_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    folder = compiled_loops.cache_folder()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = compiled_loops.cache_folder()
    assert other != folder and other.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("has_links", [True, False])
def test_a_library_that_another_machine_has_made_meanwhile_stays(tmp_path, monkeypatch, has_links):
    """The other one has mapped it; over NFS its pages would be gone."""
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError))
    for content in ("first", "second"):
        (tmp_path / content).write_text(content)
        compiled_loops._publish(tmp_path / content, tmp_path / "library")
    assert (tmp_path / "library").read_text() == ("first" if has_links else "second")


class RunStopped(Exception):
    pass


@pytest.mark.parametrize("flaw", ["one bit", "denormals", "in place"])
def test_a_kernel_with_other_bits_also_for_some_numbers_or_memory_only_is_not_used(kernels, monkeypatch, caplog, flaw):
    original = CompiledUpdate.__call__

    def flawed(self, buffers, numbers):
        original(self, buffers, numbers)
        momentum = buffers.parts["exp_avg"]
        if flaw == "one bit":
            buffers.residual[-1:].bitwise_xor_(1)
        elif flaw == "denormals":
            momentum[momentum.abs() < torch.finfo(torch.float32).tiny] = 0.0
        elif buffers.written.data_ptr() == buffers.current.data_ptr():
            momentum[-1:].neg_()

    monkeypatch.setattr(CompiledUpdate, "__call__", flawed)
    with caplog.at_level(logging.WARNING):
        assert get_kernels([SPLIT[0]], lambda: None) == {}
    [record] = caplog.records
    assert "does not give the uncompiled one's bits" in record.getMessage()


SLOW_COMPILER = """#!/bin/sh
exec 3> {pipe}
(echo begun >&3; sleep 60; echo alive >&3) &
wait
"""


def test_a_run_that_stops_meanwhile_takes_its_compilers_along(tmp_path, monkeypatch):
    """The processes that compilers start end too: a pipe that these write to has no writer left."""
    cache, compiler, pipe = tmp_path / "cache", tmp_path / "compiler", tmp_path / "pipe"
    os.mkfifo(pipe)
    compiler.write_text(SLOW_COMPILER.format(pipe=pipe))
    compiler.chmod(0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setenv("CXX", str(compiler))
    said = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def stop():
        with suppress(BlockingIOError):
            if os.read(said, 100) == b"begun\n":
                raise RunStopped

    try:
        with pytest.raises(RunStopped):
            get_kernels([SPLIT[0]], stop)
        os.set_blocking(said, True)
        assert os.read(said, 100) == b""
    finally:
        os.close(said)
    assert not list((cache / "torchround").iterdir())
