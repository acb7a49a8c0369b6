"""What differs between kinds of devices: the one file to change for a new kind of accelerator.

An `AcceleratorKind` says how many devices there are, what memory they have, how host memory is page-locked, and which
kernels models may use. A kind is named by PyTorch's device type: `cuda` stands for NVIDIA's cards and for AMD's, whose
build of PyTorch uses the same name. Streams, events and the current device are `torch.Stream`, `torch.Event` and
`torch.accelerator`, which PyTorch has for every kind.

Models ask with the functions at the end, by `tensor.device.type`. A compiler takes their answers as constants.
"""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from torch._subclasses.fake_tensor import FakeTensor

P = ParamSpec("P")

HALVES = (torch.bfloat16, torch.float16)

# Variables by which a user sets PyTorch's allocator.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class AcceleratorKind:
    """A kind of accelerator with what PyTorch has for all of them, and with no special kernel.

    A subclass overrides what its devices have besides. All methods may be called from any thread.
    """

    # Whether existing host memory can be page-locked. Otherwise copies wait, and nothing overlaps with them.
    locks_pages = False
    # Whether a stream can wait for an event of another device. Otherwise the host waits in its place.
    events_cross_devices = False
    # Whether attention with a mask takes fewer kv heads than query heads without writing all scores to memory.
    shares_kv_heads_under_mask = False
    # Whether products of float16 matrices can add up in float16.
    adds_in_fp16 = False
    # Whether Inductor writes code for this kind, so that `engine.compile = "auto"` compiles layers.
    compiles = False

    def __init__(self, name: str) -> None:
        self.name = name

    def count(self) -> int:
        # PyTorch loads other makers' packages itself, if they are installed, and each then adds its module.
        module = getattr(torch, self.name, None)
        return module.device_count() if module is not None and module.is_available() else 0

    def card_name(self, index: int) -> str:
        return str(torch.get_device_module(self.name).get_device_name(index))

    def stream(self, device: torch.device, priority: int) -> torch.Stream:
        """Make a stream. Its kernels start before those of streams with a higher number, if the kind has priorities."""
        return torch.Stream(device=device, priority=priority)

    def event(self, device: torch.device, timed: bool) -> torch.Event:
        """Make an event. A thread that waits for an event that is not `timed` should sleep, not poll."""
        return torch.Event(device=device, enable_timing=timed, blocking=not timed)

    def free_and_total_bytes(self, index: int) -> tuple[int, int]:
        """Count the device memory that no process holds, and all that the device has."""
        return torch.accelerator.get_memory_info(index)

    def cached_bytes(self, index: int) -> int:
        """Count the memory that PyTorch's allocator holds for this process although no tensor uses it."""
        return torch.accelerator.memory_reserved(index) - torch.accelerator.memory_allocated(index)

    def peak_bytes(self, index: int) -> int:
        """Measure the most memory that tensors of this process have used at once."""
        return torch.accelerator.max_memory_allocated(index)

    def prepare_allocator(self) -> None:
        """Set PyTorch's allocator for this process, before the first allocation on a device."""

    def lock_pages(self, address: int, nbytes: int) -> int:
        """Page-lock existing host memory for all devices. Returns the driver's error code, 0 for success."""
        return -1

    def unlock_pages(self, address: int) -> int:
        return -1

    # Kernels, of all devices of this kind here. If there is none here, the answer is for a machine elsewhere.

    def has_offset_attention(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Check whether PyTorch's flash attention by document offsets runs."""
        return False

    def has_grouped_products(self, dtype: torch.dtype) -> bool:
        """Check whether `grouped_mm` takes the offsets of groups on the device."""
        return False

    def has_float32_products(self, dtype: torch.dtype) -> bool:
        """Check whether `mm` and `addmm` of matrices of this 16-bit type can give float32 (`out_dtype`)."""
        return False

    def has_triton(self) -> bool:
        return False


class CudaKind(AcceleratorKind):
    """NVIDIA's cards, and AMD's, for which PyTorch uses the same names.

    `capability` is the cards' compute capability, for models on `meta`. Default: the lowest of the cards here. Plans
    for a machine elsewhere assume `ASSUMED_CAPABILITY`.
    """

    ASSUMED_CAPABILITY = (9, 0)
    PORTABLE = 1  # page-locked for every card of the process, not only the calling thread's

    locks_pages = True
    events_cross_devices = True
    adds_in_fp16 = torch.version.hip is None  # AMD's libraries have no such sums
    compiles = True

    def __init__(self, capability: tuple[int, int] | None = None) -> None:
        super().__init__("cuda")
        self._capability = capability
        self._found: tuple[int, int] | None = None

    def event(self, device: torch.device, timed: bool) -> torch.Event:
        # torch.Event takes `blocking` and ignores it, so threads that wait would poll.
        return torch.cuda.Event(enable_timing=timed, blocking=not timed)

    def stream(self, device: torch.device, priority: int) -> torch.Stream:
        # torch.cuda.Event records on streams of its own module only.
        return torch.cuda.Stream(device, priority)

    def prepare_allocator(self) -> None:
        # Segments that grow: tensors of many sizes then leave no holes that are too small for the next one.
        if torch.version.hip is None and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")

    def lock_pages(self, address: int, nbytes: int) -> int:
        return self._checked(torch.cuda.cudart().cudaHostRegister(address, nbytes, self.PORTABLE))

    def unlock_pages(self, address: int) -> int:
        return self._checked(torch.cuda.cudart().cudaHostUnregister(address))

    def has_offset_attention(self, dtype: torch.dtype, head_dim: int) -> bool:
        # The kernel's own limits: heads of whole 16 bytes up to 256 channels, Ampere or later.
        fits = dtype in HALVES and head_dim % 8 == 0 and head_dim <= 256 and self._is_nvidia((8, 0))
        return fits and (not self._is_here() or torch.backends.cuda.is_flash_attention_available())

    def has_grouped_products(self, dtype: torch.dtype) -> bool:
        # It runs from 8.0 on, by torch's documentation. Except on Hopper and datacentre Blackwell, it waits for the
        # device to read the offsets and then multiplies group by group.
        return dtype == torch.bfloat16 and self._is_nvidia((9, 0)) and self._lowest_capability()[0] in (9, 10)

    def has_float32_products(self, dtype: torch.dtype) -> bool:
        # AMD's libraries are called in another way, which has not been looked at. NVIDIA's refuse results in float32 of
        # sums in float16.
        in_float16 = dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation
        if dtype not in HALVES or torch.version.hip is not None or in_float16:
            return False
        return not self._is_here() or _adds_to_float32(self.name, dtype)

    def has_triton(self) -> bool:
        # Older cards have no instructions for bfloat16, which Triton then cannot compile.
        return self._lowest_capability() >= (8, 0) and (not self._is_here() or missing_for_triton() is None)

    def _is_nvidia(self, least: tuple[int, int]) -> bool:
        # AMD's numbers mean something else, and their kernels were not tried.
        return torch.version.hip is None and self._lowest_capability() >= least

    def _is_here(self) -> bool:
        return self._capability is None and self._capability_here() is not None

    def _lowest_capability(self) -> tuple[int, int]:
        return self._capability or self._capability_here() or self.ASSUMED_CAPABILITY

    def _capability_here(self) -> tuple[int, int] | None:
        """Find the lowest capability of the cards here, None if there are none."""
        # Kept, because every layer asks in every micro-batch, and PyTorch takes as long for the answer of a few cards as
        # for the launch of a kernel.
        if self._found is None and (number := self.count()):
            self._found = min(torch.cuda.get_device_capability(index) for index in range(number))
        return self._found

    def _checked(self, status: object) -> int:
        code = int(status)  # type: ignore[call-overload]
        if code != 0:
            # CUDA reports a failed call again at the thread's next kernel launch, in unrelated code: launch one here.
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")
        return int(code)


# The variable by which a user chooses cards. AMD's library reads it too.
VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"

# The kind of the cards whose rates are known. A plan assumes it if it is not told another kind.
PLANNED_KIND = "cuda"

_HOST = AcceleratorKind("cpu")
_HOST.shares_kv_heads_under_mask = True


@cache
def kinds() -> dict[str, AcceleratorKind]:
    """Give the known kinds by name, to which a program may add its own."""
    # Intel's GPUs, and Huawei's Ascend cards with the package torch_npu, run without special kernels.
    return {kind.name: kind for kind in (CudaKind(), AcceleratorKind("xpu"), AcceleratorKind("npu"))}


@cache
def _on_meta() -> ContextVar[AcceleratorKind | None]:
    return ContextVar("kind of the device that meta stands for", default=None)


def kind_of(device: str) -> AcceleratorKind:
    """Find the kind of a device type, as in `tensor.device.type`. The host is a kind without special kernels."""
    kind = _on_meta().get() if device == "meta" else kinds().get(device)
    return kind or _HOST


def device_kind(tensor: torch.Tensor) -> str:
    """Tell the type of a tensor's device. A tensor without memory that stands for another counts as on `meta`."""
    return "meta" if isinstance(tensor, FakeTensor) else tensor.device.type


def present_kind() -> AcceleratorKind | None:
    """Find the kind of this machine's accelerators, None if it has none that is known here."""
    device = torch.accelerator.current_accelerator(check_available=True)
    kind = None if device is None else kinds().get(device.type)
    return kind if kind is not None and kind.count() else None


@contextmanager
def as_if_on(kind: AcceleratorKind | str) -> Iterator[None]:
    """Let models on `meta` choose as on devices of this kind, in the calling thread, for example to count kernels."""
    token = _on_meta().set(kind_of(kind) if isinstance(kind, str) else kind)
    try:
        yield
    finally:
        _on_meta().reset(token)


@contextmanager
def accumulating_in_fp16(wanted: bool = True) -> Iterator[None]:
    """Let products of float16 matrices add up in float16 on all cards if `wanted`, and restore PyTorch's switch afterwards."""
    if not wanted:
        yield
        return
    products = torch.backends.cuda.matmul
    before, products.allow_fp16_accumulation = products.allow_fp16_accumulation, True
    try:
        yield
    finally:
        products.allow_fp16_accumulation = before


@contextmanager
def deterministic_operations(wanted: bool = True) -> Iterator[None]:
    """Let PyTorch's operations add up in a fixed order if `wanted`, and restore its switches afterwards."""
    if not wanted:
        yield
        return
    # cuBLAS reads it when a device is first used. With this workspace its sums do not depend on other streams.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Only operations that read what they never wrote would differ, and filling takes a pass over all fresh memory.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]


# What models ask.


def _asked(question: Callable[Concatenate[AcceleratorKind, P], bool]) -> Callable[Concatenate[str, P], bool]:
    """Let models put a question to the kind of a device type. A compiler takes the answer as constant.

    `torch.compiler.assume_constant_result` does the same, but it imports the compiler, which changes the environment.
    """

    def asked(device: str, *args: P.args, **kwargs: P.kwargs) -> bool:
        return question(kind_of(device), *args, **kwargs)

    asked._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return asked


# On `meta` each answers for the kind that `as_if_on` names.
is_accelerator = _asked(lambda kind: kind.name != _HOST.name)
has_offset_attention = _asked(lambda kind, dtype, head_dim: kind.has_offset_attention(dtype, head_dim))
has_grouped_products = _asked(lambda kind, dtype: kind.has_grouped_products(dtype))
has_float32_products = _asked(lambda kind, dtype: kind.has_float32_products(dtype))
has_triton = _asked(lambda kind: kind.has_triton())
shares_kv_heads_under_mask = _asked(lambda kind: kind.shares_kv_heads_under_mask)


@cache
def missing_for_triton(headers: Path | None = None) -> str | None:
    """Name what Triton lacks here: it compiles small C programs against Python's headers, and calls the card's driver."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, [compiler] if compiler else ["clang", "gcc", "cc"])):
        return f"there is no C compiler {compiler or 'cc'!r}; install one, or set CC"
    headers = headers or Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"Python's headers are not in {headers}; install the package python3-dev"
    try:
        importlib.import_module("triton.runtime.driver").driver.active  # noqa: B018  (finds the card's driver)
    except Exception as error:  # noqa: BLE001  (Triton raises whatever it likes)
        return f"Triton finds no driver ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return None


@cache
def _adds_to_float32(device: str, dtype: torch.dtype) -> bool:
    """Try whether a product is added to a float32 matrix here. Some versions of PyTorch refuse the matrix's type."""
    total = torch.zeros((16, 16), device=device)
    matrix = total.to(dtype)
    try:
        torch.addmm(total, matrix, matrix, out_dtype=torch.float32, out=total)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True
