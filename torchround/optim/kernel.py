"""AdamW's pass as one machine-code kernel: its library on disk, and calling it without holding Python's lock.

Inductor compiles `adamw.new_values` ahead of time (`compile_kernel.py`) to a shared library. It is called
through ctypes, which lets go of the interpreter lock: PyTorch's own loader keeps it for the whole call, and the
threads that drive devices would wait for every update.
"""

import ctypes
import getpass
import hashlib
import os
import platform
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from torchround.optim import adamw


class KernelError(RuntimeError):
    """The kernel cannot be compiled, loaded or called; the message says why in one line."""


class AdamWKernel:
    """A compiled update in place, for one gradient dtype and one master dtype; an `adamw.UpdateKernel`.

    Any length, any number of threads, the bits of `adamw_update_`. A call raises `KernelError` before it has
    touched anything, or does all of its work.
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
        self._num_outputs = num_outputs.value  # one: the None that the traced function returns
        weakref.finalize(self, self._library.AOTInductorModelContainerDelete, self._container)

    def __call__(
        self,
        weight: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        gradient: Tensor,
        master: Tensor,
        factors: tuple[Tensor, ...],
    ) -> None:
        tensors = [weight, exp_avg, exp_avg_sq, gradient, master, *factors]
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


def kernel_library(gradient: torch.dtype, master: torch.dtype) -> Path:
    """Where the library for these dtypes lies or belongs: in Inductor's cache folder, by all that decides it.

    That is the arithmetic's source, PyTorch, and the processor, for whose own instructions it is compiled.
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
    return Path(folder) / "torchround" / f"adamw-{_name(gradient)}-{_name(master)}-{key}.so"


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
    """Tensors as the library takes them. It gives the handles up itself."""
    address_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    return (ctypes.c_void_p * len(tensors))(*(address_in(capsule, None) for capsule in capsules))
