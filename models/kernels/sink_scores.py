"""Sinks added to the result of a flash kernel, by Triton: one kernel forward and one backward.

`models/common/sinks.py` explains the formulas. Computed in fp32 and rounded where a result is written.

Shapes: N tokens, H heads, C channels of a head, P partial sums of the sinks' gradient.
"""

import torch
from torch import Tensor

from torchround.models.kernels.norms import num_partials
from torchround.models.kernels.operation import operation


def join_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output `[N, H, C]` and log-sum-exp `[H, N]` fp32 with `sinks [H]` in the softmax."""
    return torch.ops.torchround.join_sinks(output, log_sums, sinks)


def sinks_gradient(grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the sinks' gradient `[H]` fp32. Output and log-sum-exp have the sinks in them."""
    return torch.ops.torchround.join_sinks_backward(grad, output, log_sums, sinks).sum(dim=0)


@operation(
    "join_sinks(Tensor output, Tensor log_sums, Tensor sinks) -> (Tensor, Tensor)",
    "sink_scores_triton.launch_join_sinks",
)
def joined_results(output: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Make room for the output and the log-sum-exp."""
    return torch.empty_like(output), torch.empty_like(log_sums)


@operation(
    "join_sinks_backward(Tensor grad, Tensor output, Tensor log_sums, Tensor sinks) -> Tensor",
    "sink_scores_triton.launch_join_sinks_backward",
)
def partial_gradients(grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Make room for partial sums of the sinks' gradient, `[P, H]` fp32."""
    return log_sums.new_empty((num_partials(len(grad)), len(sinks)))
