"""The kinds of compiled updates: what decides the code of each, and the place of its library."""

import hashlib
import platform
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torchround.optim.formats import EXACT, StateFormat
from torchround.optim.optimizer import UpdateRule
from torchround.optim.update_pass import UpdateBuffers

SOURCE = Path(__file__).with_name("kernel.cpp")
# Each rounding where the source has it: no fused multiply-add, no reordering. The last two flags change no result.
FLAGS = (
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
DTYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}


class KernelError(RuntimeError):
    """The kernel cannot be compiled, loaded or called; the message says why in one line."""


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
        """Return the name of the library's file.

        It has a key made of everything that decides the code: the sources, the flags, and the processor, whose own
        instructions are used.
        """
        parts = (SOURCE.read_text(), self.header(), *compiler_flags(), platform.platform(), _processor())
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return f"update-{self.format.name}-{key}.so"


def compiler_flags() -> tuple[str, ...]:
    """Return the compiler's options, among them the one that asks for this processor's own instructions.

    With AVX-512, compilers would prefer 256-bit vectors on many processors. The compact pass is 1.75 times as fast with
    512 bits (AMD Zen 5). Processors without AVX-512 are not affected.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return (*FLAGS, *(("-march=native", "-mprefer-vector-width=512") if is_x86 else ("-mcpu=native",)))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model", "flags", "Features", "CPU"))})
    )
