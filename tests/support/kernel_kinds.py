"""Kinds of compiled updates, with two rules for tests beside AdamW."""

from dataclasses import dataclass, replace

import torch

from torchround.optim import COMPACT, EXACT, StateValue, UpdateRule
from torchround.optim.formats import exact_root
from torchround.optim.kernel import KernelKind
from torchround.optim.rules.adamw import AdamWRule

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ADAMW = AdamWRule((0.9, 0.95), 1e-8, 0.1)


@dataclass(frozen=True)
class DirectedRule(UpdateRule):
    """A rule with an unsigned value alone, and a second input from devices."""

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
    """A rule without values."""

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
