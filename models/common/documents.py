"""Attention over packed documents by a flash kernel that is told where each document begins.

Nothing of size T^2 is built, windows and shared kv heads are the kernel's own, and sinks are folded in as in
`sinks.py`. The kernel is PyTorch's, called as `torch.nn.attention.varlen` calls it; that function's own gradient
would not know the sinks.

Shapes: B sequences, T tokens, N = B T, H heads, K kv heads, C channels of a head, Q documents.
"""

from typing import Any

import torch
from torch import Tensor

from models.common.sinks import add_sinks, sink_gradient


def document_offsets(document_ids: Tensor, max_documents: int) -> Tensor:
    """First tokens of all documents of `[B, T]` in flat order, and N: int32 `[B max_documents + 1]`.

    What is left of the list is N, too: documents without a token. Found on the tensor's device without waiting for it.
    """
    begins = torch.ones_like(document_ids)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    numbers = begins.flatten().cumsum(0) - 1  # of each token's document, counted through the batch
    every = torch.arange(len(document_ids) * max_documents + 1, device=document_ids.device)
    return torch.searchsorted(numbers, every, out_int32=True)


def attend_by_offsets(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, window: int | None, sinks: Tensor | None
) -> Tensor:
    """`[B, T, H, C]` from query of that shape, key and value `[B, T, K, C]` and `offsets [Q + 1]`.

    CUDA and 16 bits only. With a `window` a token sees that many, itself included. `sinks [H]` as in `attend`.
    """
    flat = (heads.flatten(0, 1).contiguous() for heads in (query, key, value))  # [N, H or K, C]
    mixed = _OffsetAttention.apply(*flat, offsets, query.shape[1], window, sinks)
    return mixed.view_as(query)


class _OffsetAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: Tensor,
        longest: int,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        output, log_sums, random_state = _forward_kernel(query, key, value, offsets, longest, window)
        if sinks is not None:
            share, log_sums = add_sinks(log_sums, sinks.float()[:, None])  # [H, N]
            output = output * share.T[..., None].to(output.dtype)
        ctx.save_for_backward(query, key, value, offsets, sinks, output, log_sums, random_state)
        ctx.longest, ctx.window = longest, window
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, offsets, sinks, output, log_sums, random_state = ctx.saved_tensors
        grad = grads[0].contiguous()
        gradients = _backward_kernel(
            grad, query, key, value, output, log_sums, offsets, ctx.longest, ctx.window, random_state
        )
        grad_sinks = None
        if sinks is not None:
            moved = (grad.float() * output).sum(dim=-1).T  # [H, N]
            grad_sinks = sink_gradient(moved, log_sums, sinks.float()[:, None]).sum(dim=1)
        return *gradients, None, None, None, grad_sinks


def _forward_kernel(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[N, H, C]`, fp32 log-sum-exp `[H, N]`, and a state for dropout, of which there is none."""
    output, log_sums, random_state, _, _ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        window is None,
        False,
        window_size_left=_left(window),
        window_size_right=0,
    )
    return output, log_sums, random_state


def _backward_kernel(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    offsets: Tensor,
    longest: int,
    window: int | None,
    random_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        output,
        log_sums,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        window is None,
        random_state,
        torch.empty(0, device=query.device),
        window_size_left=_left(window),
        window_size_right=0,
    )


def _left(window: int | None) -> int:
    """Tokens before itself that a token sees; the kernel's -1 is all of them."""
    return -1 if window is None else window - 1
