"""The optimizer of a pipeline: our AdamW on the flat store."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchround.config import OptimizerTable
from torchround.library.refusals import PipelineUsageError


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer that a pipeline was asked for: our AdamW with these settings."""

    ours: OptimizerTable

    def for_engine(self) -> OptimizerTable:
        """Return what an engine takes."""
        return self.ours


def choose_optimizer(
    asked: str | Callable[..., torch.optim.Optimizer],
    *,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> OptimizerChoice:
    """Return the optimizer that is asked for. Raises `PipelineUsageError` if there is no such one."""
    if asked != "adamw":
        raise PipelineUsageError(f'optimizer = {asked!r}; legal: "adamw"')
    return OptimizerChoice(OptimizerTable(betas=betas, eps=eps, weight_decay=weight_decay))
