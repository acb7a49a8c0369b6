"""Attention over packed documents by a variable-length flash kernel, which takes the offset of each document.

Nothing of size T^2 is built. The kernel itself handles windows and shared kv heads; sinks are added as in `sinks.py`.
It is PyTorch's kernel, called as `torch.nn.attention.varlen` calls it. That function itself cannot be used, because
its gradient would leave out the sinks.

Shapes: B sequences, T tokens, N = B T, H heads, K kv heads, C channels of a head, Q documents.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from torchround.models.common.sinks import add_sinks, sink_gradient
from torchround.models.kernels.operation import uses_fused
from torchround.models.kernels.sink_scores import join_sinks, sinks_gradient

# `MicroBatch.once`: keeps with the micro-batch what is computed for a key.
Once = Callable[[Hashable, Callable[[], Tensor]], Tensor]


def document_offsets(document_ids: Tensor, max_documents: int) -> Tensor:
    """Return the first token of each document of `[B, T]` in flat order, and N: int32 `[B max_documents + 1]`.

    The list has a fixed length, so that no device has to be asked for the number of documents. Its unused rest is N:
    documents without tokens.
    """
    begins = torch.ones_like(document_ids)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    numbers = begins.flatten().cumsum(0) - 1  # [N]: each token's document, counted through the batch
    every = torch.arange(len(document_ids) * max_documents + 1, device=document_ids.device)
    return torch.searchsorted(numbers, every, out_int32=True)


def attend_by_offsets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor,
    max_documents: int | Tensor,
    window: int | None,
    sinks: Tensor | None,
    once: Once | None = None,
) -> Tensor:
    """Compute `[B, T, H, C]` from a query of that shape, key and value `[B, T, K, C]`; the rest is as in `attend`.

    Works on CUDA in 16 bits only.
    """
    flat = (heads.flatten(0, 1).contiguous() for heads in (query, key, value))  # [B, T, ..] -> [N, H or K, C]
    tokens = document_ids.shape[1]
    if not isinstance(max_documents, int):
        mixed = _OffsetAttention.apply(*flat, document_ids, max_documents, tokens, window, sinks)
        return mixed.view_as(query)
    bound = max_documents

    def make_offsets() -> Tensor:
        return document_offsets(document_ids, bound)

    offsets = make_offsets() if once is None else once("document offsets", make_offsets)
    return _OffsetAttention.apply(*flat, offsets, None, tokens, window, sinks).view_as(query)


class _OffsetAttention(torch.autograd.Function):
    """`documents` are offsets, or under a compiler the documents' ids and as `bound` their largest number, as data."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor,
        bound: Tensor | None,
        longest: int,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if bound is None:
            found = _forward_kernel(query, key, value, documents, longest, window)
        else:
            found = _opaque_forward(query, key, value, documents, bound, window)
        output, log_sums, random_state = found
        if sinks is not None and uses_fused(output):
            output, log_sums = join_sinks(output, log_sums, sinks)
        elif sinks is not None:
            share, log_sums = add_sinks(log_sums, sinks.float()[:, None])  # [H, N]
            output = output * share.T[..., None].to(output.dtype)
        ctx.longest, ctx.window = longest, window
        ctx.save_for_backward(query, key, value, documents, bound, sinks, output, log_sums, random_state)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, documents, bound, sinks, *found = ctx.saved_tensors
        grad, (output, log_sums, random_state) = grads[0].contiguous(), found
        if bound is None:
            gradients = _backward_kernel(
                grad, query, key, value, output, log_sums, documents, ctx.longest, ctx.window, random_state
            )
        else:
            gradients = _opaque_backward(query, key, value, documents, bound, ctx.window, grad, *found)
        grad_sinks = None
        if sinks is not None and uses_fused(grad):
            grad_sinks = sinks_gradient(grad, output, log_sums, sinks)
        elif sinks is not None:
            moved = (grad.float() * output).sum(dim=-1).T  # [H, N]
            grad_sinks = sink_gradient(moved, log_sums, sinks.float()[:, None]).sum(dim=1)
        return *gradients, None, None, None, None, grad_sinks


# The same kernels for a compiler. To it the number of documents is data, so that one piece of code serves every batch.


@torch.library.custom_op("torchround::attend_by_offsets", mutates_args=())
def _opaque_forward(
    query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor, max_documents: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    offsets = document_offsets(document_ids, int(max_documents))
    return _forward_kernel(query, key, value, offsets, document_ids.shape[1], window)


@_opaque_forward.register_fake
def _opaque_forward_shapes(
    query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor, max_documents: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    log_sums = query.new_empty(query.shape[1::-1], dtype=torch.float32)  # [H, N]
    return torch.empty_like(query), log_sums, query.new_empty(2, dtype=torch.uint64)


@torch.library.custom_op("torchround::attend_by_offsets_backward", mutates_args=())
def _opaque_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor,
    max_documents: Tensor,
    window: int | None,
    grad: Tensor,
    output: Tensor,
    log_sums: Tensor,
    random_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    offsets, longest = document_offsets(document_ids, int(max_documents)), document_ids.shape[1]
    return _backward_kernel(grad, query, key, value, output, log_sums, offsets, longest, window, random_state)


@_opaque_backward.register_fake
def _opaque_backward_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor,
    max_documents: Tensor,
    window: int | None,
    grad: Tensor,
    output: Tensor,
    log_sums: Tensor,
    random_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _forward_kernel(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output `[N, H, C]`, the fp32 log-sum-exp `[H, N]`, and the (unused) state of dropout."""
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
    """Return how many tokens before itself a token sees; to the kernel -1 means all of them."""
    return -1 if window is None else window - 1
