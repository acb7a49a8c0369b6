"""Sinks added to the result of a flash kernel, for accelerators: one kernel forward and one backward.

`models/common/sinks.py` explains the formulas. Computed in fp32 and rounded where a result is written.

Shapes: N tokens, H heads, C channels of a head, P partial sums of the sinks' gradient.
"""

import torch
from torch import Tensor

from torchround.models.kernels.norms import num_partials, partial_sums
from torchround.models.kernels.operation import operation, uses_triton


def join_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output `[N, H, C]` and log-sum-exp `[H, N]` fp32 with `sinks [H]` in the softmax."""
    return torch.ops.torchround.join_sinks(output, log_sums, sinks)


def sinks_gradient(grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the sinks' gradient `[H]` fp32. Output and log-sum-exp have the sinks in them."""
    return torch.ops.torchround.join_sinks_backward(grad, output, log_sums, sinks).sum(dim=0)


def _shapes(output: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(output), torch.empty_like(log_sums)


@operation("join_sinks(Tensor output, Tensor log_sums, Tensor sinks) -> (Tensor, Tensor)", _shapes)
def run_join_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `join_sinks`."""
    if uses_triton(output):
        from torchround.models.kernels.sink_scores_triton import launch_join_sinks

        return launch_join_sinks(output, log_sums, sinks)
    with_sinks = torch.logaddexp(log_sums, sinks.float()[:, None])
    share = (log_sums - with_sinks).exp().T[..., None]  # [N, H, 1]
    return (output.float() * share).to(output.dtype), with_sinks


def _backward_shape(grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    return log_sums.new_empty((num_partials(len(grad)), len(sinks)))


@operation(
    "join_sinks_backward(Tensor grad, Tensor output, Tensor log_sums, Tensor sinks) -> Tensor",
    _backward_shape,
)
def run_join_sinks_backward(grad: Tensor, output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return partial sums of the sinks' gradient, `[P, H]` fp32."""
    if uses_triton(grad):
        from torchround.models.kernels.sink_scores_triton import launch_join_sinks_backward

        return launch_join_sinks_backward(grad, output, log_sums, sinks)
    moved = (grad.float() * output.float()).sum(dim=-1)  # [N, H, C] -> [N, H]
    return partial_sums(-(sinks.float() - log_sums.T).exp() * moved)
