"""Getting AdamW's kernels for a run: from the cache on disk, else from a compiler in child processes.

Nothing here can stop a run. Where a kernel cannot be had, one line says why, and the plain pass does the same
update with the same bits.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from torchround.optim.adamw import adamw_update_
from torchround.optim.kernel import AdamWKernel, KernelError, kernel_library

logger = logging.getLogger(__name__)

# (gradient dtype, master dtype): what a kernel is compiled for.
Dtypes = tuple[torch.dtype, torch.dtype]

COMPILE_LIMIT_S = 600.0
CHECKED_ELEMENTS = 10_007
POLL_S = 0.05
PLAIN_COST = "the optimizer uses its uncompiled pass, which is several times slower"


def get_kernels(wanted: Collection[Dtypes], meanwhile: Callable[[], None]) -> dict[Dtypes, AdamWKernel]:
    """A kernel for each of `wanted`; none at all, after one warning, where one cannot be had.

    Compiles what the cache does not hold, all at once, at low priority: about 15 s of a core each. Calls
    `meanwhile` many times a second; what it raises ends the compilers and is raised from here.
    """
    try:
        libraries = {dtypes: kernel_library(*dtypes) for dtypes in wanted}
        for path in libraries.values():
            _make_private(path.parent)
        _compile({dtypes: path for dtypes, path in libraries.items() if not path.exists()}, meanwhile)
        kernels = {dtypes: AdamWKernel(path) for dtypes, path in libraries.items()}
        for dtypes, kernel in kernels.items():
            _check_bits(kernel, *dtypes)
        return kernels
    except (KernelError, OSError) as error:
        logger.warning("%s; %s", error, PLAIN_COST)
        return {}


def _compile(libraries: dict[Dtypes, Path], meanwhile: Callable[[], None]) -> None:
    if not libraries:
        return
    if shutil.which(cxx_compiler()) is None:
        raise KernelError(
            f"there is no C++ compiler {cxx_compiler()!r} to compile the optimizer with (CXX names another)"
        )
    started = time.monotonic()
    compilations = []
    try:
        compilations = [_Compilation(dtypes, path) for dtypes, path in libraries.items()]
        while any(compilation.is_running() for compilation in compilations):
            meanwhile()
            if time.monotonic() - started > COMPILE_LIMIT_S:
                raise KernelError(f"compiling the optimizer took more than {COMPILE_LIMIT_S:g} s")
            time.sleep(POLL_S)
        for compilation in compilations:
            compilation.check()
    finally:
        for compilation in compilations:
            compilation.close()


def cxx_compiler() -> str:
    """The C++ compiler that Inductor will call."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


class _Compilation:
    """A child process that makes one library. What it prints is read only when it fails."""

    def __init__(self, dtypes: Dtypes, library: Path) -> None:
        self._library = library
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchround.optim.compile_kernel", *names, str(library)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=_environment(),
            start_new_session=True,  # Ctrl-C stops the run, which then stops this
        )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raises `KernelError` with the child's last line, where it left no library."""
        if self._process.returncode == 0 and self._library.exists():
            return
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")
        raise KernelError(f"compiling the optimizer failed ({reason[:300]})")

    def close(self) -> None:
        if self.is_running():
            os.killpg(self._process.pid, signal.SIGKILL)  # with the compiler that it started
        self._process.wait()
        self._output.close()


def _check_bits(kernel: AdamWKernel, gradient: torch.dtype, master: torch.dtype) -> None:
    """Raises `KernelError` unless the kernel gives the plain pass's bits on this machine."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(CHECKED_ELEMENTS, generator=generator) for _ in range(4)]
    plain = [values[0], values[1], values[2].square(), values[3].to(gradient), values[0].to(master)]
    compiled = [tensor.clone() for tensor in plain]
    for buffers, with_kernel in ((plain, None), (compiled, kernel)):
        adamw_update_(
            *buffers,
            lr=1e-2,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            bias_correction_step=3,
            gradient_scale=0.7,
            kernel=with_kernel,
        )
    if not all(torch.equal(left, right) for left, right in zip(plain, compiled, strict=True)):
        raise KernelError("the compiled optimizer does not give the uncompiled one's bits on this machine")


def _make_private(folder: Path) -> None:
    """The folder, which must be this user's: code is loaded from it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise KernelError(f"{folder} belongs to another user (TORCHINDUCTOR_CACHE_DIR names another folder)")


def _environment() -> dict[str, str]:
    """The child finds this very torchround, touches no GPU, and uses one core."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
