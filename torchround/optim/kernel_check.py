"""The check of a compiled update before its first use: it has to give the uncompiled one's bits on this machine."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from torchround.optim.kernel_kind import KernelError, KernelKind
from torchround.optim.update_pass import UpdateBuffers, UpdateKernel, update_

CHECKED_ELEMENTS = 10_007


def check_bits(kind: KernelKind, kernel: UpdateKernel) -> None:
    """Raise `KernelError` unless the kernel gives the uncompiled update's bits."""
    example = example_buffers(kind, CHECKED_ELEMENTS)
    for plain in (example, written_in_place(example, kind.predicts)):
        compiled = copy_of(plain)
        for buffers, with_kernel in ((plain, None), (compiled, kernel)):
            update_(
                buffers, lr=1e-2, update=3, gradient_scale=0.7, kernel=with_kernel, predicts=kind.predicts
            )
        if not have_same_bits(plain, compiled):
            raise KernelError(
                "the compiled optimizer does not give the uncompiled one's bits on this machine"
            )


def example_buffers(kind: KernelKind, numel: int, seed: int = 0) -> UpdateBuffers:
    """Return buffers of this kind with random numbers; state down to denormal numbers and zero."""
    generator = torch.Generator().manual_seed(seed)
    weight, gradient, direction = (torch.randn(numel, generator=generator) for _ in range(3))
    parts = {}
    for value in kind.rule.values:
        exponents = torch.randint(-46, 3, (numel,), generator=generator)
        numbers = torch.randn(numel, generator=generator) * 10.0**exponents
        kept = kind.format.encode(value, numbers if value.is_signed else numbers.abs())
        for part, tensor in zip(kind.format.parts(value), kept, strict=True):
            parts[part.name] = tensor.contiguous()
    residual = torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(torch.int16)
    return UpdateBuffers(
        kind.rule,
        kind.format,
        None if kind.splits else weight,
        residual if kind.splits else None,
        weight.bfloat16() if kind.splits else None,
        torch.full((numel,), 7.0, dtype=kind.written),
        parts,
        gradient.to(kind.gradient),
        direction.to(kind.direction) if kind.direction is not None else None,
    )


def written_in_place(buffers: UpdateBuffers, predicts: bool) -> UpdateBuffers:
    """Return a copy whose device weights are written over what is read, if the dtypes allow that."""
    copied = copy_of(buffers)
    if copied.weight is None:
        assert copied.current is not None, "split weights have both halves"
        return replace(copied, written=copied.current)
    if copied.written.dtype == torch.float32 and not predicts:
        return replace(copied, written=copied.weight)
    return copied


def copy_of(buffers: UpdateBuffers) -> UpdateBuffers:
    """Return buffers of the same content. Two that are one stay one."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        return copies.setdefault(id(tensor), tensor.clone())

    def copy_if_any(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else copy(tensor)

    return UpdateBuffers(
        buffers.rule,
        buffers.format,
        copy_if_any(buffers.weight),
        copy_if_any(buffers.residual),
        copy_if_any(buffers.current),
        copy(buffers.written),
        {name: copy(tensor) for name, tensor in buffers.parts.items()},
        copy_if_any(buffers.gradient),
        copy_if_any(buffers.direction),
    )


def have_same_bits(left: UpdateBuffers, right: UpdateBuffers) -> bool:
    """Return whether everything that an update writes is equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(_results(left), _results(right), strict=True))


def _results(buffers: UpdateBuffers) -> Iterator[Tensor]:
    for tensor in (buffers.weight, buffers.residual, buffers.written, *buffers.parts.values()):
        if tensor is not None:
            yield tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
