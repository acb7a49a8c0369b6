"""Libraries of compiled updates: found again, named by what decides the code; and a run without them."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tests.support.kernel_kinds import ADAMW, KINDS, SPLIT, StatelessRule, kind_of
from torchround.optim import UpdateBuffers, UpdateKernel, kernel, kernel_kind
from torchround.optim.kernel import CompiledUpdate, get_kernels
from torchround.optim.kernel_check import example_buffers
from torchround.optim.kernel_kind import KernelKind
from torchround.optim.node_threads import NodeThreads
from torchround.optim.rules.adamw import AdamWRule
from torchround.untrusted.regular_file import open_regular

pytestmark = pytest.mark.compiles


@pytest.fixture(scope="module")
def kernels() -> dict[KernelKind, UpdateKernel]:
    found = get_kernels([SPLIT[0]], lambda: None)
    assert found.keys() == {SPLIT[0]}
    return found


def test_a_second_run_finds_the_library_without_a_compiler(
    kernels: dict[KernelKind, UpdateKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("PATH", "")
    assert get_kernels([SPLIT[0]], lambda: None).keys() == {SPLIT[0]}


def test_the_library_is_named_by_what_decides_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [kind.library() for kind in KINDS]
    assert len(set(libraries)) == len(KINDS)
    assert kind_of(AdamWRule((0.5, 0.5), 1.0, 0.0)).library() == kind_of(ADAMW).library()  # numbers are arguments
    monkeypatch.setattr(kernel_kind, "FLAGS", ("-O0",))
    assert kind_of(ADAMW).library() not in libraries


def test_there_is_no_kernel_for_a_rule_without_source_or_another_dtype() -> None:
    buffers = example_buffers(SPLIT[0], 10)
    assert KernelKind.of(buffers, predicts=False) == SPLIT[0]
    assert KernelKind.of(replace(buffers, gradient=torch.ones(10).double()), predicts=False) is None
    assert KernelKind.of(replace(buffers, rule=SourcelessRule()), predicts=False) is None


class SourcelessRule(StatelessRule):
    """A rule for the plain pass alone."""

    kernel_source = None


# Without a kernel.

UPDATE_WITHOUT_COMPILER = """
import torch
from torchround.optim import EXACT
from torchround.optim.kernel import get_kernels
from torchround.optim.kernel_kind import KernelKind
from torchround.optim.rules.adamw import AdamWRule
rule, bf16 = AdamWRule((0.9, 0.95), 1e-8, 0.1), torch.bfloat16
kind = KernelKind(rule.kernel_source, (True, False), 8, EXACT, True, bf16, None, bf16, False, rule)
print(get_kernels([kind], lambda: None))
"""


@pytest.mark.parametrize(
    ("compiler", "words"), [("/nonexistent", "there is no C++ compiler '/nonexistent'"), ("false", "failed (")]
)
def test_without_a_working_compiler_one_line_says_so_and_nothing_is_raised(
    tmp_path: Path, compiler: str, words: str
) -> None:
    command = (sys.executable, "-c", UPDATE_WITHOUT_COMPILER)
    path = "" if compiler == "/nonexistent" else os.environ["PATH"]
    environment = {
        **os.environ,
        "CXX": compiler,
        "PATH": path,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert finished.stdout == "{}\n"
    [line] = finished.stderr.splitlines()
    assert words in line and line.endswith("the optimizer uses its uncompiled update, which is several times slower")


def test_a_library_that_cannot_be_loaded_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = tmp_path / "torchround" / SPLIT[0].library()
    library.parent.mkdir(mode=0o700)
    library.write_bytes(b"no library")
    with caplog.at_level(logging.WARNING):
        assert get_kernels([SPLIT[0]], lambda: None) == {}
    [record] = caplog.records
    assert "cannot be loaded" in record.getMessage()


def harm_parent(cache: Path, planted: Path) -> None:
    """Leave the folder above open to all: another user could put a folder in the place of the cache."""
    cache.parent.chmod(0o777)


def harm_folder(cache: Path, planted: Path) -> None:
    """Leave the folder open to all."""
    cache.chmod(0o777)


def harm_file(cache: Path, planted: Path) -> None:
    """Put a link to code from elsewhere into the cache."""
    (cache / planted.name).unlink()
    (cache / planted.name).symlink_to(planted)


@pytest.mark.parametrize("harm", [harm_parent, harm_folder, harm_file])
def test_code_that_another_user_could_have_put_there_is_not_loaded(
    kernels: dict[KernelKind, UpdateKernel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path, Path], None],
) -> None:
    library = kernel.private_folder() / SPLIT[0].library()
    cache = tmp_path / "shared" / "torchround"
    cache.mkdir(parents=True, mode=0o700)
    shutil.copyfile(library, cache / library.name)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache.parent))
    monkeypatch.setenv("CXX", "/nonexistent")
    assert get_kernels([SPLIT[0]], lambda: None).keys() == {SPLIT[0]}
    harm(cache, library)
    with caplog.at_level(logging.WARNING):
        assert get_kernels([SPLIT[0]], lambda: None) == {}


def test_the_file_that_was_opened_is_loaded_even_if_its_name_has_another_by_then(
    kernels: dict[KernelKind, UpdateKernel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "update.so"
    shutil.copyfile(kernel.private_folder() / SPLIT[0].library(), library)

    def opened_then_replaced(path: Path) -> FileIO:
        file = open_regular(path)
        path.unlink()
        path.write_bytes(b"another user's code")
        return file

    monkeypatch.setattr(kernel, "open_regular", opened_then_replaced)
    CompiledUpdate(library, NodeThreads(1))


@pytest.mark.parametrize("harm", ["nothing", "open to all", "a link"])
def test_inductor_loads_no_code_from_a_folder_that_another_user_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    """Inductor itself takes any folder of its name in /tmp."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "restored afterwards")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(default_cache_dir())
    if harm == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    elif harm == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        kernel.keep_inductor_private()
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    assert (given is None) == (harm == "nothing") == (not caplog.records)
    assert Path(given or folder).stat().st_mode & 0o777 == 0o700


class RunStopped(Exception):
    pass


def test_a_kernel_with_other_bits_is_not_used(
    kernels: dict[KernelKind, UpdateKernel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = CompiledUpdate.__call__

    def one_bit_off(self: CompiledUpdate, buffers: UpdateBuffers, numbers: tuple[Tensor, ...]) -> None:
        original(self, buffers, numbers)
        assert buffers.residual is not None
        buffers.residual[-1:].bitwise_xor_(1)

    monkeypatch.setattr(CompiledUpdate, "__call__", one_bit_off)
    with caplog.at_level(logging.WARNING):
        assert get_kernels([SPLIT[0]], lambda: None) == {}
    [record] = caplog.records
    assert "does not give the uncompiled one's bits" in record.getMessage()


SLOW_COMPILER = """#!/bin/sh
exec 3> {pipe}
(echo begun >&3; sleep 60; echo alive >&3) &
wait
"""


def test_a_run_that_stops_meanwhile_takes_its_compilers_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that compilers start end too: a pipe that these write to has no writer left."""
    cache, compiler, pipe = tmp_path / "cache", tmp_path / "compiler", tmp_path / "pipe"
    os.mkfifo(pipe)
    compiler.write_text(SLOW_COMPILER.format(pipe=pipe))
    compiler.chmod(0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setenv("CXX", str(compiler))
    said = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def stop() -> None:
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
