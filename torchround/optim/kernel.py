"""The update of a segment as compiled machine code: getting it from the cache or a compiler, and calling it.

`kernel.cpp` is the pass over every state format and dtype; a rule adds the arithmetic of one element
(`UpdateRule.kernel_source`). A compiler makes a shared library for each kind of update in about a second, as a child
process of low priority. The library is called through ctypes, which releases the interpreter lock: the threads that
drive devices do not wait for updates.

A missing kernel never stops a run: one line says why, and the uncompiled pass gives the same bits.
"""

import ctypes
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from torchround.compiled_loops import (
    DTYPES,
    KernelError,
    RangeThreads,
    cache_folder,
    compile_libraries,
    library_name,
)
from torchround.optim.formats import EXACT, StateFormat
from torchround.optim.optimizer import UpdateRule
from torchround.optim.split_weights import split
from torchround.optim.update_pass import UpdateBuffers, UpdateKernel, update_

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernel.cpp")

# Elements that a thread takes at once: 1.7 MB of exact state in bf16. A multiple of the source's span.
CHUNK_ELEMENTS = 64 * 1024

PLAIN_COST = "the optimizer uses its uncompiled update, which is several times slower"
CHECKED_ELEMENTS = 10_007


@dataclass(frozen=True)
class KernelKind:
    """The properties of an update that decide its code. `rule` is one of the rules with this code."""

    source: str
    are_signed: tuple[bool, ...]
    num_numbers: int
    format: StateFormat
    splits: bool
    gradient: torch.dtype
    direction: torch.dtype | None
    written: torch.dtype
    predicts: bool
    rule: UpdateRule = field(compare=False)

    @classmethod
    def of(cls, buffers: UpdateBuffers, predicts: bool) -> "KernelKind | None":
        """Return the kind of an update of these buffers; None if there can be no kernel for it."""
        rule, gradient = buffers.rule, buffers.gradient
        direction = buffers.direction.dtype if buffers.direction is not None else None
        dtypes = (buffers.written.dtype, direction or torch.float32)
        if rule.kernel_source is None or gradient is None or not DTYPES.keys() >= {gradient.dtype, *dtypes}:
            return None
        return cls(
            rule.kernel_source,
            tuple(value.is_signed for value in rule.values),
            len(rule.numbers(1e-3, 1, 1.0)),
            buffers.format,
            buffers.weight is None,
            gradient.dtype,
            direction if rule.uses_direction else None,
            buffers.written.dtype,
            predicts,
            rule,
        )

    def header(self) -> str:
        """Return `kind.h`, which `kernel.cpp` includes."""
        signed = ", ".join(str(is_signed).lower() for is_signed in (*self.are_signed, True))
        return f"""
constexpr int NUM_VALUES = {len(self.are_signed)}, NUM_NUMBERS = {self.num_numbers};
constexpr bool IS_SIGNED[] = {{{signed}}};
constexpr bool IS_COMPACT = {str(self.format is not EXACT).lower()};
constexpr bool USES_DIRECTION = {str(self.direction is not None).lower()};
constexpr bool PREDICTS = {str(self.predicts).lower()};
using Format = {"Exact" if self.format is EXACT else "Compact"};
using Weights = {"Split" if self.splits else "Whole"};
using Gradient = {DTYPES[self.gradient]};
using Direction = {DTYPES[self.direction or torch.float32]};
using DeviceWeight = {DTYPES[self.written]};
{self.source}
"""

    def library(self) -> str:
        return library_name(f"update-{self.format.name}", SOURCE, self.header())


class CompiledUpdate:
    """A compiled in-place update of one kind; an `UpdateKernel`.

    It takes any length and any number of threads and gives the bits of `update_`. A call either raises `KernelError`
    before it has touched anything, or does all of its work.
    """

    def __init__(self, library: Path, threads: RangeThreads) -> None:
        try:
            self._update = ctypes.CDLL(str(library)).update
        except (OSError, AttributeError) as error:
            raise KernelError(f"{library} cannot be loaded: {error}") from error
        self._update.restype = None
        self._threads = threads

    def __call__(self, buffers: UpdateBuffers, numbers: tuple[Tensor, ...]) -> None:
        tensors = _tensors(buffers)
        given = [tensor for tensor in tensors if tensor is not None]
        if not all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in given):
            raise KernelError("the compiled update takes contiguous buffers in host memory only")
        addresses = (ctypes.c_void_p * len(tensors))(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors)
        )
        factors = (ctypes.c_float * len(numbers))(*map(float, numbers))

        def work(following: ctypes.c_int64) -> None:
            stop, chunk = ctypes.c_int64(buffers.numel), ctypes.c_int64(CHUNK_ELEMENTS)
            self._update(addresses, factors, ctypes.byref(following), stop, chunk)

        self._threads.run(buffers.numel, CHUNK_ELEMENTS, work)


def _tensors(buffers: UpdateBuffers) -> list[Tensor | None]:
    """Return the tensors in the order of the source's `Buffers`."""
    tensors = [buffers.weight, buffers.residual, buffers.current, buffers.written]
    tensors += [buffers.gradient, buffers.direction]
    for value in buffers.rule.values:
        parts = [buffers.parts[part.name] for part in buffers.format.parts(value)]
        tensors += [*parts, None][:2]
    return tensors


def get_kernels(
    wanted: Collection[KernelKind], meanwhile: Callable[[], None], threads: RangeThreads | None = None
) -> dict[KernelKind, UpdateKernel]:
    """Return a kernel for each kind, or, after one warning, no kernel at all if one cannot be had.

    Compiles the kernels that the cache lacks, all at once, at low priority: about a second of a core each. Calls
    `meanwhile` many times a second; an exception from it ends the compilers and is raised from here.
    """
    threads = threads or RangeThreads(1)
    try:
        folder = cache_folder()
        libraries = {kind: folder / kind.library() for kind in wanted}
        missing = {path: kind.header() for kind, path in libraries.items() if not path.exists()}
        compile_libraries(SOURCE, missing, meanwhile)
        kernels: dict[KernelKind, UpdateKernel] = {}
        for kind, path in libraries.items():
            kernels[kind] = CompiledUpdate(path, threads)
            check_bits(kind, kernels[kind])
        return kernels
    except (KernelError, OSError) as error:
        logger.warning("%s; %s", error, PLAIN_COST)
        return {}


def check_bits(kind: KernelKind, kernel: UpdateKernel) -> None:
    """Raise `KernelError` unless the kernel gives the uncompiled update's bits, in two updates of random weights.

    Weights, gradients and so the state are of all sizes down to denormals. As engines ask for it, device weights are written
    beside what is read, and over it.
    """
    generator = torch.Generator().manual_seed(0)
    shape = 3, CHECKED_ELEMENTS
    exponents = torch.randint(-46, 3, shape, generator=generator)
    start, gradient, direction = torch.randn(shape, generator=generator) * 10.0**exponents
    state = [part for value in kind.rule.values for part in kind.format.parts(value)]
    for in_place in (False, True):
        results = []
        for used in (None, kernel):
            upper, residual = split(start) if kind.splits else (None, None)
            weight = None if kind.splits else start.clone()
            over = (upper if kind.splits else weight) if in_place else None
            if over is None or over.dtype != kind.written or kind.predicts:
                over = torch.zeros(CHECKED_ELEMENTS, dtype=kind.written)
            buffers = UpdateBuffers(
                *(kind.rule, kind.format, weight, residual, upper, over),
                parts={
                    part.name: torch.zeros(part.numel(CHECKED_ELEMENTS), dtype=part.dtype) for part in state
                },
                gradient=gradient.to(kind.gradient),
                direction=None if kind.direction is None else direction.to(kind.direction),
            )
            kept: list[Tensor] = []
            for number in (1, 2):
                update_(
                    buffers, lr=1e-2, update=number, gradient_scale=0.7, kernel=used, predicts=kind.predicts
                )
                written = (buffers.weight, buffers.residual, buffers.written, *buffers.parts.values())
                # As bytes: two NaNs of the same bits are equal, and the two zeros are not.
                kept += [tensor.view(torch.uint8).clone() for tensor in written if tensor is not None]
            results.append(kept)
        if not all(map(torch.equal, *results)):
            raise KernelError("the compiled optimizer does not give the uncompiled one's bits here")
