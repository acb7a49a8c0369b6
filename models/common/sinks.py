"""Attention with sinks: every query head has one learnt score more in its softmax, which has no value.

A flash kernel computes the output `o` and the log-sum-exp `l` without the sink `s`. With it they are
`l' = log(exp(l) + exp(s))` and `o' = o exp(l - l')`. The kernel's backward needs only output, log-sum-exp and the
gradient of the output. Called with `o'` and `l'`, it gives the exact gradients of query, key and value; the gradient
of the sink is `-sum exp(s - l') (grad . o')`. Nothing of size T^2 is kept.

Shapes: B sequences, T tokens, N = B T, H heads, K kv heads, C channels of a head, P partial sums of the sinks' gradient.
"""

from typing import Any

import torch
from torch import Tensor

from torchround.models.kernels.operation import operation, uses_triton

MOST_PARTIALS = 512  # programs of a backward; each adds up its own tokens


def add_sinks(log_sums: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the share that each output keeps, and the log-sum-exp with the sink. All fp32; `scores` must broadcast."""
    with_sinks = torch.logaddexp(log_sums, scores)
    return (log_sums - with_sinks).exp(), with_sinks


def sink_gradient(moved: Tensor, log_sums: Tensor, scores: Tensor) -> Tensor:
    """Compute each query's part of a sink's gradient. `moved` is grad times output, summed over C; `log_sums` has the sink."""
    return -((scores - log_sums).exp() * moved)


class SinkAttention(torch.autograd.Function):
    """Attention `[B, H, T, C]` from a query of that shape, key and value `[B, K, T, C]` and `sinks [H]`.

    `mask` is an additive `[B, 1, T, T]` in the query's dtype. Without a mask attention is causal.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor | None
    ) -> Tensor:
        plain, plain_sums = _forward_kernel(query, key, value, mask)
        scores = sinks.float()[:, None]  # [H, 1]
        share, log_sums = add_sinks(plain_sums[..., : query.shape[2]], scores)  # [B, H, T] fp32
        output = plain * share[..., None].to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, mask, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, key, value, sinks, mask, output, log_sums = ctx.saved_tensors
        moved = (grads[0].float() * output).sum(dim=-1)  # [B, H, T]
        grad_sinks = sink_gradient(moved, log_sums, sinks.float()[:, None]).sum(dim=(0, 2))
        gradients = _backward_kernel(grads[0], query, key, value, output, log_sums, mask)
        return *gradients, grad_sinks, None


def _forward_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the output `[B, H, T, C]` and the fp32 log-sum-exp `[B, H, >= T]`."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, attn_mask=mask
        )
    key, value = _repeat(key, query), _repeat(value, query)
    bias = None if mask is None else mask.expand(-1, query.shape[1], -1, -1)
    output, log_sums, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, mask is None
    )
    return output, log_sums


def _backward_kernel(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, output, log_sums, 0.0, mask is None, attn_mask=mask
        )
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    bias = None if mask is None else mask.expand(-1, query.shape[1], -1, -1)
    # The kernel wants rows of 32, as its forward returned them before our forward cut them to T.
    padded = torch.nn.functional.pad(log_sums, (0, -log_sums.shape[-1] % 32))
    no_seed = torch.zeros((), dtype=torch.int64, device=query.device)  # for dropout, which is 0
    grad_query, grad_key, grad_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        query,
        _repeat(key, query),
        _repeat(value, query),
        bias,
        output,
        padded,
        no_seed,
        no_seed,
        0.0,
        [True, True, True, False],
        mask is None,
    )
    # Each kv head adds up the gradients of the query heads that it serves.
    return grad_query, *(full.unflatten(1, groups).sum(dim=2) for full in (grad_key, grad_value))


def _repeat(heads: Tensor, query: Tensor) -> Tensor:
    """Give each query head its own copy of its kv head: the CUDA kernel with a mask cannot share them."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


# Sinks added to the result of a flash kernel by document offsets. Triton has one kernel forward and one backward, which compute
# in fp32 and round where a result is written.


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
