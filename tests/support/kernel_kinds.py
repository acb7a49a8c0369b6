"""Kinds of compiled updates, with two rules for tests beside AdamW."""

import copy
from dataclasses import dataclass, replace

import torch

from torchround.optim import COMPACT, EXACT, StateValue, UpdateBuffers, UpdateRule
from torchround.optim.formats import exact_root
from torchround.optim.kernel import KernelKind
from torchround.optim.rules.adamw import AdamWRule

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ADAMW = AdamWRule((0.9, 0.95), 1e-8, 0.1)


@dataclass(frozen=True)
class DirectedRule(UpdateRule):
    values = (StateValue("largest", is_signed=False),)
    uses_direction = True
    kernel_source = """
inline void update_values(float *values, float gradient, Numbers n) {
    values[0] = values[0] * n[1] + gradient * n[0] * gradient;
}
inline float updated_weight(float weight, const float *rooted, float, float direction, Numbers) {
    return weight - direction * rooted[0];
}
"""

    def numbers(self, lr, update, gradient_scale):
        return gradient_scale, 1.0 - lr

    def new_values(self, weight, values, gradient, numbers, direction):
        assert direction is not None
        grown = values[0] * numbers[1] + gradient * numbers[0] * gradient
        return weight - direction * exact_root(grown), (grown,)


@dataclass(frozen=True)
class StatelessRule(UpdateRule):
    values = ()
    kernel_source = """
inline void update_values(float *, float, Numbers) {}
inline float updated_weight(float weight, const float *, float gradient, float, Numbers n) { return weight - gradient * n[0]; }
"""

    def numbers(self, lr, update, gradient_scale):
        return (lr * gradient_scale,)

    def new_values(self, weight, values, gradient, numbers, direction):
        return weight - gradient * numbers[0], ()


def kind_of(rule=ADAMW, state=EXACT, gradient=BF16, written=BF16, splits=False, predicts=False):
    assert rule.kernel_source is not None
    return KernelKind(
        rule.kernel_source,
        tuple(value.is_signed for value in rule.values),
        len(rule.numbers(1e-3, 1, 1.0)),
        state,
        splits,
        gradient,
        BF16 if rule.uses_direction else None,
        written,
        predicts,
        rule,
    )


SPLIT = [kind_of(state=state, splits=True) for state in (EXACT, COMPACT)]
# What engines ask for: gradients in the device weight's dtype, or in fp32 if they are added up on the host. Every
# other kind is compared with the plain pass when a run gets it (`kernel.check_bits`).
KINDS = [
    *SPLIT,
    *(kind_of(state=state, gradient=F32, splits=True) for state in (EXACT, COMPACT)),
    *(
        kind_of(ADAMW, state, gradient, written, predicts=predicts)
        for state in (EXACT, COMPACT)
        for gradient, written in ((F32, F32), (BF16, BF16), (F16, F16))
        for predicts in (False, True)
    ),
    kind_of(gradient=BF16, written=F32),  # weights that lag
    *(kind_of(DirectedRule(), state, splits=splits) for state in (EXACT, COMPACT) for splits in (False, True)),
    kind_of(StatelessRule(), splits=True),
]


def cut_out(buffers, start, stop):
    """Return the buffers' elements `[start, stop)`; `start` begins a block."""
    names = ("weight", "residual", "current", "written", "gradient", "direction")
    tensors = {name: getattr(buffers, name) for name in names}
    parts = {}
    for value in buffers.rule.values:
        ranges = buffers.format.ranges(value, buffers.parts, start, stop)
        parts.update(zip((part.name for part in buffers.format.parts(value)), ranges, strict=True))
    cut = {name: tensor[start:stop] for name, tensor in tensors.items() if tensor is not None}
    return replace(buffers, parts=parts, **cut)


def example_buffers(kind, numel, seed=0):
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


def written_in_place(buffers, predicts):
    """Return a copy whose device weights are written over what is read, if the dtypes allow that."""
    copied = copy_of(buffers)
    if copied.weight is None:
        return replace(copied, written=copied.current)
    if copied.written.dtype == torch.float32 and not predicts:
        return replace(copied, written=copied.weight)
    return copied


def copy_of(buffers):
    """Return buffers of the same content. Two that are one stay one."""
    return replace(copy.deepcopy(buffers), rule=buffers.rule, format=buffers.format)


def have_same_bits(left, right):
    written = [(each.weight, each.residual, each.written, *each.parts.values()) for each in (left, right)]
    pairs = zip(*written, strict=True)
    # As bytes: two NaNs of the same bits are equal, and the two zeros are not.
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs if a is not None)
