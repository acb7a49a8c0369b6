"""Attention over packed documents by a variable-length flash kernel, which takes the offset of each document.

Nothing of size T^2 is built. The kernel itself handles windows and shared kv heads; sinks are added as in `sinks.py`.
It is PyTorch's kernel, called as `torch.nn.attention.varlen` calls it. That function itself cannot be used, because
its gradient would leave out the sinks.

Shapes: B sequences, T tokens, N = B T, H heads, K kv heads, C channels of a head, Q documents.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchround.layer import KERNEL_BLOCK, MicroBatch
from torchround.models.common.sinks import join_sinks, sinks_gradient

# Processors of the largest card that PyTorch knows, NVIDIA's B300.
MOST_PROCESSORS = 160


def document_offsets(document_ids: Tensor, max_documents: int) -> Tensor:
    """Find the first token of each document of `[B, T]` in flat order, and N: int32 `[B max_documents + 1]`.

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
    micro_batch: MicroBatch,
    window: int | None,
    sinks: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Compute `attend` for `[B, T, H, C]` from key and value `[B, T, K, C]`. Works on CUDA in 16 bits only."""
    flat = (heads.flatten(0, 1).contiguous() for heads in (query, key, value))  # [B, T, ..] -> [N, H or K, C]
    ids, bound, longest = micro_batch.document_ids, micro_batch.max_documents, micro_batch.longest_document
    if isinstance(bound, int):
        longest = ids.shape[1] if longest is None else longest
        ids, bound = micro_batch.once("document offsets", partial(document_offsets, ids, bound)), None
    return _OffsetAttention.apply(*flat, ids, bound, longest, window, sinks, scale).view_as(query)


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
        longest: Any,
        window: int | None,
        sinks: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        run = _forward if bound is None else _opaque_forward
        output, log_sums, random_state = run(query, key, value, documents, bound, longest, window, scale)
        if sinks is not None:
            output, log_sums = join_sinks(output, log_sums, sinks)
        ctx.longest, ctx.window, ctx.scale = longest, window, scale
        ctx.save_for_backward(query, key, value, documents, bound, sinks, output, log_sums, random_state)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, documents, bound, sinks, output, log_sums, random_state = ctx.saved_tensors
        grad = grads[0].contiguous()
        run = _backward if bound is None else _opaque_backward
        limits, found = (bound, ctx.longest, ctx.window, ctx.scale), (output, log_sums, random_state)
        gradients = run(query, key, value, documents, *limits, grad, *found)
        grad_sinks = None if sinks is None else sinks_gradient(grad, output, log_sums, sinks)
        return *gradients, None, None, None, None, grad_sinks, None


# PyTorch's kernels.
_forward_kernel = torch.ops.aten._flash_attention_forward
_backward_kernel = torch.ops.aten._flash_attention_backward


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    bound: Tensor | None,
    longest: Any,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output `[N, H, C]`, the fp32 log-sum-exp `[H, N]`, and the (unused) state of dropout."""
    offsets, longest = _offsets_and_longest(documents, bound, longest)
    kernel = partial(_forward_kernel, query, key, value, **_sides(window, scale))
    output, log_sums, random_state, *_ = kernel(
        offsets, offsets, longest, longest, 0.0, window is None, False
    )
    return output, log_sums, random_state


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    bound: Tensor | None,
    longest: Any,
    window: int | None,
    scale: float | None,
    grad: Tensor,
    output: Tensor,
    log_sums: Tensor,
    random_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value.

    The kernel's scratch grows with the number of documents. So a call takes a part of them, and writes the gradients of
    their tokens alone.
    """
    offsets, longest = _offsets_and_longest(documents, bound, longest)
    step, unused = documents_at_once(len(query)), torch.empty(0, device=query.device)
    kernel = partial(_backward_kernel, grad, query, key, value, output, log_sums, **_sides(window, scale))
    found: tuple[Tensor, ...] = ()
    for first in range(0, len(offsets) - 1, step):
        part = offsets[first : first + step + 1]
        more = kernel(part, part, longest, longest, 0.0, window is None, random_state, unused)
        if found:
            # Later parts overwrite what this one leaves undefined after its own tokens.
            is_later = (torch.arange(len(query), device=query.device) >= part[0])[:, None, None]
            for old, new in zip(found, more, strict=True):
                torch.where(is_later, new, old, out=old)
        else:
            found = more
    of_query, of_key, of_value = found
    return of_query, of_key, of_value


def _sides(window: int | None, scale: float | None) -> dict[str, Any]:
    # The tokens that one sees before itself, all for -1, and after itself.
    before = -1 if window is None else window - 1
    return {"scale": scale, "window_size_left": before, "window_size_right": 0}


def _offsets_and_longest(documents: Tensor, bound: Tensor | None, longest: Any) -> tuple[Tensor, int]:
    if bound is None:
        return documents, longest
    return document_offsets(documents, int(bound)), documents.shape[1] if longest is None else int(longest)


# The same for a compiler. To it the number of documents is data, so that one piece of code serves every batch.
_OPAQUE_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor documents, Tensor bound, Tensor? longest, int? window, "
    "float? scale"
)
_opaque_forward = torch.library.custom_op(
    "torchround::attend_by_offsets",
    _forward,
    mutates_args=(),
    schema=f"({_OPAQUE_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
_opaque_backward = torch.library.custom_op(
    "torchround::attend_by_offsets_backward",
    _backward,
    mutates_args=(),
    schema=f"({_OPAQUE_INPUTS}, Tensor grad, Tensor output, Tensor log_sums, Tensor random_state)"
    " -> (Tensor, Tensor, Tensor)",
)


@_opaque_forward.register_fake
def _forward_shapes(query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    log_sums = query.new_empty(query.shape[1::-1], dtype=torch.float32)  # [H, N]
    return torch.empty_like(query), log_sums, query.new_empty(2, dtype=torch.uint64)


@_opaque_backward.register_fake
def _backward_shapes(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def documents_at_once(tokens: int) -> int:
    """Count how many documents one call of the backward kernel takes in a batch of N tokens."""
    return max(1, tokens // KERNEL_BLOCK)


def backward_scratch_bytes(batch: int, tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Count what the backward of `[B, T]` holds besides gradients in 16 bits, and the gradients of an earlier call.

    The kernel adds queries' gradients up in fp32, with a block of rows more for each document. Shared kv heads get a
    gradient for each query head first. In a fixed order each processor that shares a head of a document has a sum of its
    own: most with one document in each sequence.
    """
    processors = MOST_PROCESSORS if torch.are_deterministic_algorithms_enabled() else 1
    splits = -(-processors // (batch * num_heads))
    at_least, tokens = batch * (tokens + KERNEL_BLOCK), batch * tokens
    rows = max(splits * at_least, tokens + KERNEL_BLOCK * documents_at_once(tokens))
    scratch = 4 * rows * num_heads * (head_dim + -head_dim % 32 + 1)
    spread = 2 * 2 * tokens * num_heads * head_dim if num_kv_heads < num_heads else 0
    return scratch + spread + 2 * tokens * (num_heads + 2 * num_kv_heads) * head_dim
