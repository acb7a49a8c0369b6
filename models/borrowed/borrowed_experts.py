"""Experts of `transformers` that take adapters.

Since its release 5 the experts of a block are one module with two stacks of matrices. With adapters such a module computes
as recognised experts do, because the adapters' products need the rows of each expert. Without any it runs its own code.

Shapes: N tokens, D model width, E experts, k experts per token, R = N k rows sorted by expert.
"""

import functools
from abc import ABCMeta
from typing import Any

from torch import Tensor, nn

from torchround.models.borrowed.recognised_parts import run_experts
from torchround.models.common.experts import ExpertStack

# What the decorator of `transformers` for classes of experts sets, and how the module computes follows from.
FACTS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")


class BorrowedExperts(ExpertStack):
    """A base beside a class of `transformers`, whose attributes and parameters it finds in the module."""

    own_forward: Any

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """Pass tokens `[N, D]` through their `chosen [N, k]` experts, with `weights [N, k]`."""
        if not self.adapted:
            return self.own_forward(hidden, chosen, weights)
        return run_experts(self, hidden, chosen, weights)

    def matrix(self, stack: Tensor) -> Tensor:
        return stack if self.inputs_first else stack.transpose(1, 2)


def let_adapt(model: nn.Module) -> None:
    """Let all experts of a model take adapters whose class is of the form that `transformers` knows itself."""
    for module in model.modules():
        if not all(hasattr(module, fact) for fact in FACTS):
            continue
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        stacks = [getattr(module, name, None) for name in names]
        if all(isinstance(stack, nn.Parameter) and stack.ndim == 3 for stack in stacks):
            experts: Any = module
            kind: Any = type(module)
            experts.__class__ = _adaptable(kind)
            experts.adaptable, experts.inputs_first = names, module.is_transposed


@functools.cache
def _adaptable(kind: Any) -> Any:
    # Under the same name: layers are of one kind if their modules' names are.
    return ABCMeta(kind.__name__, (BorrowedExperts, kind), {"own_forward": kind.forward})
