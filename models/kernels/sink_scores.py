"""Sinks added to the result of a flash kernel by document offsets, with Triton by one kernel forward and one backward.

`models/common/sinks.py` explains the formulas. Triton's kernels compute in fp32 and round where a result is written.

Shapes: N tokens, H heads, C channels of a head, P partial sums of the sinks' gradient.
"""

import torch
from torch import Tensor

from torchround.models.common.sinks import add_sinks, sink_gradient
from torchround.models.kernels.operation import operation, uses_triton

MOST_PARTIALS = 512  # programs of a backward; each adds up its own tokens


def tokens_each(tokens: int) -> int:
    """Count how many tokens' gradients one program adds up, by `tokens` alone: equal runs add alike on every card."""
    return max(1, -(-tokens // MOST_PARTIALS))


def join_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Compute output `[N, H, C]` and log-sum-exp `[H, N]` fp32 with `sinks [H]` in the softmax."""
    if uses_triton(output):
        return torch.ops.torchround.join_sinks(output, log_sums, sinks)
    share, log_sums = add_sinks(log_sums, sinks.float()[:, None])  # [H, N]
    return output * share.T[..., None].to(output.dtype), log_sums


def sinks_gradient(grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Compute the sinks' gradient `[H]` fp32. Output and log-sum-exp have the sinks in them."""
    if uses_triton(grad):
        return torch.ops.torchround.join_sinks_backward(grad, output, log_sums, sinks).sum(dim=0)
    moved = (grad.float() * output).sum(dim=-1).T  # [H, N]
    return sink_gradient(moved, log_sums, sinks.float()[:, None]).sum(dim=1)


@operation(
    "join_sinks(Tensor output, Tensor log_sums, Tensor sinks) -> (Tensor, Tensor)",
    "sink_scores_triton.launch_join_sinks",
)
def joined_results(output: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(output), torch.empty_like(log_sums)


@operation(
    "join_sinks_backward(Tensor grad, Tensor output, Tensor log_sums, Tensor sinks) -> Tensor",
    "sink_scores_triton.launch_join_sinks_backward",
)
def partial_gradients(grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    return log_sums.new_empty((-(-len(grad) // tokens_each(len(grad))), len(sinks)))
