"""Causal attention inside documents: one function chooses the kernel.

The choice is made from the micro-batch's contents, shapes and device alone, never from timing, so that the
engine and a plain loop over the same micro-batches compute the same bits. It never waits for a CUDA device.

Shapes: B sequences, T tokens, H heads, K kv heads, C channels of a head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from models.common.sinks import attend_with_sinks


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention scaled by `1 / sqrt(C)` over earlier tokens of the same document.

    `query` is `[B, T, H, C]`, `key` and `value` `[B, T, K, C]`, `document_ids` `[B, T]`; the result is
    `[B, T, H, C]`. Each kv head serves `H / K` query heads. With a `window` a token sees itself and the
    `window - 1` before it. `sinks [H]` are scores that join each softmax without a value.
    """
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, H or K, T, C]
    causal = known_single_documents(document_ids) and (window is None or window >= query.shape[2])
    mask = None if causal else attention_mask(document_ids, window, query.dtype)
    if sinks is not None:
        return attend_with_sinks(query, key, value, sinks, mask).transpose(1, 2)
    if mask is not None and query.device.type == "cuda":
        # With a mask and shared kv heads CUDA only has the kernel that writes all scores to memory.
        repeats = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=key.shape[1] < query.shape[1]
    )
    return mixed.transpose(1, 2)


def known_single_documents(document_ids: Tensor) -> bool:
    """Whether each sequence is one document; False off the CPU, where asking would mean to wait."""
    if document_ids.device.type != "cpu":
        return False
    return bool((document_ids[:, 1:] == document_ids[:, :-1]).all())


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
