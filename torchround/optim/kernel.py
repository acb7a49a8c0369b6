"""AdamW's update as compiled machine code: getting it from the cache or a compiler, and calling it.

Inductor compiles `adamw.new_values` ahead of time to a shared library, in child processes (`compile_kernel.py`). The
library is called through ctypes, which releases the interpreter lock. PyTorch's own loader holds it for the whole
call, and the threads that drive devices would wait for every update.

A missing kernel never stops a run: one line says why, and the uncompiled code gives the same bits.
"""

import ctypes
import getpass
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor

from torchround.accelerators import NO_ACCELERATORS
from torchround.optim import adamw
from torchround.optim.adamw import adamw_update_
from torchround.optim.compile_kernel import PLAIN, PREDICT

logger = logging.getLogger(__name__)

# (gradient dtype, device weight dtype): a kernel is compiled for one such pair.
UpdateDtypes = tuple[torch.dtype, torch.dtype]

COMPILE_LIMIT_S = 600.0
CHECKED_ELEMENTS = 10_007
POLL_S = 0.05
PLAIN_COST = "the optimizer uses its uncompiled update, which is several times slower"


class KernelError(RuntimeError):
    """The kernel cannot be compiled, loaded or called; the message says why in one line."""


class AdamWKernel:
    """A compiled in-place update for one gradient dtype and one device weight dtype; an `adamw.UpdateKernel`.

    It takes any length and any number of threads and gives the bits of `adamw_update_`. A call either raises
    `KernelError` before it has touched anything, or does all of its work.
    """

    def __init__(self, library: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
            create = self._library.AOTInductorModelContainerCreateWithDevice
        except (OSError, AttributeError) as error:
            raise KernelError(f"{library} cannot be loaded: {error}") from error
        self._container = ctypes.c_void_p()
        self._check(create(ctypes.byref(self._container), ctypes.c_size_t(1), b"cpu", None))
        num_outputs = ctypes.c_size_t()
        self._check(
            self._library.AOTInductorModelContainerGetNumOutputs(self._container, ctypes.byref(num_outputs))
        )
        self._num_outputs = num_outputs.value  # 1: the None that the traced function returns
        weakref.finalize(self, self._library.AOTInductorModelContainerDelete, self._container)

    def __call__(
        self,
        weight: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gradient: Tensor,
        device_weight: Tensor,
        factors: tuple[Tensor, ...],
    ) -> None:
        tensors = [weight, exp_avg, exp_avg_sq, gradient, device_weight, *factors]
        if not all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors):
            raise KernelError("the compiled update takes contiguous buffers in host memory only")
        nothing = ctypes.c_void_p()
        outputs = (ctypes.c_void_p * self._num_outputs)()
        self._check(
            self._library.AOTInductorModelContainerRun(
                self._container,
                _handles(tensors),
                ctypes.c_size_t(len(tensors)),
                outputs,
                ctypes.c_size_t(self._num_outputs),
                nothing,
                nothing,
            )
        )

    def _check(self, status: int) -> None:
        if status == 0:
            return
        last_error = ctypes.c_char_p()
        self._library.AOTInductorGetLastError(ctypes.byref(last_error))
        raise KernelError(f"the compiled update failed: {(last_error.value or b'no reason given').decode()}")


def kernel_library(gradient: torch.dtype, device_weight: torch.dtype, predicts: bool = False) -> Path:
    """Return the path of the library for these dtypes and this kind of device weight, in Inductor's cache folder.

    Its name has a key made from everything that decides the code: the source of the arithmetic and of the compiling
    program, PyTorch's version, and the processor, whose own instructions are used.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None:
        folder = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    parts = (
        Path(adamw.__file__).read_text(),
        Path(__file__).with_name("compile_kernel.py").read_text(),
        str((torch.__version__, torch.version.git_version)),
        str((platform.platform(), _processor(), torch.backends.cpu.get_cpu_capability())),
    )
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    names = f"{_name(gradient)}-{_name(device_weight)}-{PREDICT if predicts else PLAIN}"
    return Path(folder) / "torchround" / f"adamw-{names}-{key}.so"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model", "flags", "Features", "CPU"))})
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _handles(tensors: list[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return handles of the tensors, as the library takes them. The library frees them itself."""
    address_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    return (ctypes.c_void_p * len(tensors))(*(address_in(capsule, None) for capsule in capsules))


def get_kernels(
    wanted: Collection[UpdateDtypes], meanwhile: Callable[[], None], predicts: bool = False
) -> dict[UpdateDtypes, AdamWKernel]:
    """Return a kernel for each pair in `wanted`, or, after one warning, no kernel at all if one cannot be had.

    They give updates with this `predicts`. Compiles the kernels that the cache lacks, all at once, at low priority: about 15 s of a core each. Calls
    `meanwhile` many times a second; an exception from it ends the compilers and is raised from here.
    """
    try:
        libraries = {dtypes: kernel_library(*dtypes, predicts) for dtypes in wanted}
        for path in libraries.values():
            _make_private(path.parent)
        missing = {dtypes: path for dtypes, path in libraries.items() if not path.exists()}
        _compile(missing, predicts, meanwhile)
        kernels = {dtypes: AdamWKernel(path) for dtypes, path in libraries.items()}
        for dtypes, kernel in kernels.items():
            _check_bits(kernel, *dtypes, predicts)
        return kernels
    except (KernelError, OSError) as error:
        logger.warning("%s; %s", error, PLAIN_COST)
        return {}


def _compile(libraries: dict[UpdateDtypes, Path], predicts: bool, meanwhile: Callable[[], None]) -> None:
    if not libraries:
        return
    if shutil.which(cxx_compiler()) is None:
        raise KernelError(
            f"there is no C++ compiler {cxx_compiler()!r} to compile the optimizer with (CXX names another)"
        )
    started = time.monotonic()
    compilations = []
    try:
        compilations = [_Compilation(dtypes, predicts, path) for dtypes, path in libraries.items()]
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
    """Return the name of the C++ compiler that Inductor will call."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


class _Compilation:
    """A child process that makes one library. Its output is read only if it fails."""

    def __init__(self, dtypes: UpdateDtypes, predicts: bool, library: Path) -> None:
        self._library = library
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        names = [*(_name(dtype) for dtype in dtypes), PREDICT if predicts else PLAIN]
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
        """Raise `KernelError` with the child's last line if it left no library."""
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


def _check_bits(
    kernel: AdamWKernel, gradient: torch.dtype, device_weight: torch.dtype, predicts: bool
) -> None:
    """Raise `KernelError` unless the kernel gives the uncompiled update's bits on this machine."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(CHECKED_ELEMENTS, generator=generator) for _ in range(4)]
    # A copy even in fp32: a predicted device weight cannot be the weight itself.
    device_weights = values[0].to(device_weight, copy=True)
    plain = [values[0], values[1], values[2].square(), values[3].to(gradient), device_weights]
    compiled = [tensor.clone() for tensor in plain]
    runs: list[tuple[list[Tensor], AdamWKernel | None]] = [(plain, None), (compiled, kernel)]
    if device_weight == torch.float32 and not predicts:
        # An update that writes no device weights gives the weight itself in their place.
        twice = [tensor.clone() for tensor in plain[:4]]
        runs.append(([*twice, twice[0]], kernel))
    for buffers, with_kernel in runs:
        adamw_update_(
            *buffers,
            lr=1e-2,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            bias_correction_step=3,
            gradient_scale=0.7,
            kernel=with_kernel,
            predicts=predicts,
        )
    pairs = ((left, right) for buffers, _ in runs[1:] for left, right in zip(plain, buffers, strict=True))
    if not all(torch.equal(left, right) for left, right in pairs):
        raise KernelError("the compiled optimizer does not give the uncompiled one's bits on this machine")


def _make_private(folder: Path) -> None:
    """Make the folder, or check that it belongs to this user: code is loaded from it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise KernelError(f"{folder} belongs to another user (TORCHINDUCTOR_CACHE_DIR names another folder)")


def _environment() -> dict[str, str]:
    """Return the child's environment: it imports this very torchround, touches no GPU, and uses one core."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        **NO_ACCELERATORS,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
