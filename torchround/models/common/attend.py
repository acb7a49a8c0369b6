"""Causal attention inside documents: one function chooses the kernel.

The choice is made from the batch's facts, shapes, dtype and device alone, never from timing or from what one
micro-batch happens to hold, so that it does not depend on how a batch was cut. It never waits for a CUDA device.

Shapes: B sequences, T tokens, H heads, K kv heads, C channels of a head.
"""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional as F

from torchround.models.common.documents import attend_by_offsets
from torchround.models.common.sinks import attend_with_sinks


class Kernel(Enum):
    """How documents are kept apart. `MASK` builds scores to add, `[B, 1, T, T]`; the others nothing of that size."""

    CAUSAL = "one document a sequence, the whole past"
    OFFSETS = "variable length: a flash kernel that is told where documents begin"
    MASK = "a mask of all pairs"


def choose_kernel(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    tokens: int,
    max_documents: int | Tensor | None,
    window: int | None,
) -> Kernel:
    """For sequences of `tokens` tokens on a `device` of this kind (`cpu`, `cuda`). Sinks go with each."""
    single = isinstance(max_documents, int) and max_documents == 1
    if single and (window is None or window >= tokens):
        return Kernel.CAUSAL
    if max_documents is not None and device == "cuda" and _fits_flash(dtype, head_dim):
        return Kernel.OFFSETS
    return Kernel.MASK


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor,
    max_documents: int | Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention scaled by `1 / sqrt(C)` over earlier tokens of the same document.

    `query` is `[B, T, H, C]`, `key` and `value` `[B, T, K, C]`, `document_ids` `[B, T]`; the result is
    `[B, T, H, C]`. Each kv head serves `H / K` query heads. `max_documents` is `MicroBatch.max_documents`. With a
    `window` a token sees itself and the `window - 1` before it. `sinks [H]` are scores that join each softmax
    without a value.
    """
    tokens, head_dim = query.shape[1], query.shape[3]
    kernel = choose_kernel(query.device.type, query.dtype, head_dim, tokens, max_documents, window)
    if kernel is Kernel.OFFSETS:
        assert max_documents is not None, "documents that nobody counted have no list of a known size"
        return attend_by_offsets(query, key, value, document_ids, max_documents, window, sinks)
    mask = None if kernel is Kernel.CAUSAL else attention_mask(document_ids, window, query.dtype)
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, H or K, T, C]
    if sinks is not None:
        return attend_with_sinks(query, key, value, sinks, mask).transpose(1, 2)
    if mask is not None and query.device.type == "cuda":
        # With a mask and shared kv heads CUDA only has the kernel that writes all scores to memory.
        repeats = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=key.shape[1] < query.shape[1]
    )
    return mixed.transpose(1, 2)


def attention_mask(document_ids: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """`[B, 1, T, T]`, 0 where token t may look at token s, else minus infinity, to be added to scores.

    It may if s <= t, both are of one document, and t - s < window. Rows are padded in memory to 16 elements,
    as CUDA kernels want them.
    """
    tokens = document_ids.shape[1]
    allowed = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    shape = (len(document_ids), 1, tokens, tokens + -tokens % 16)
    mask = torch.zeros(shape, dtype=dtype, device=document_ids.device)[..., :tokens]
    return mask.masked_fill_(~allowed, -torch.inf)


def _fits_flash(dtype: torch.dtype, head_dim: int) -> bool:
    """16 bits, heads of whole 16 bytes up to 256 channels (the kernel's own limits), on every card from Ampere on."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256 and _has_flash()


def _constant(function: Callable[[], bool]) -> Callable[[], bool]:
    """`torch.compiler.assume_constant_result` without its import of the compiler, which changes the environment."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _has_flash() -> bool:
    """Whether this machine's cards run it; without a card, as when a plan is made for one, yes."""
    if not torch.cuda.is_available():
        return True
    cards = range(torch.cuda.device_count())
    return torch.backends.cuda.is_flash_attention_available() and all(
        torch.cuda.get_device_capability(card) >= (8, 0) for card in cards
    )
