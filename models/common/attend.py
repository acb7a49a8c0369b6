"""Causal attention inside documents: one function chooses the kernel.

The choice is made from the micro-batch's contents and device alone, never from timing, so that the engine
and a plain loop over the same micro-batches compute the same bits. It never waits for a CUDA device.

Shapes: B sequences, T tokens, H heads, K kv heads, C channels of a head.
"""

from torch import Tensor
from torch.nn import functional as F


def attend(query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor) -> Tensor:
    """Softmax attention scaled by `1 / sqrt(C)` over earlier tokens of the same document.

    `query` is `[B, T, H, C]`, `key` and `value` `[B, T, K, C]`, `document_ids` `[B, T]`; the result is
    `[B, T, H, C]`. Each kv head serves `H / K` query heads.
    """
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, H or K, T, C]
    if known_single_documents(document_ids):
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    else:
        mask = document_mask(document_ids)
        if query.device.type == "cuda":
            # With a mask and shared kv heads CUDA only has the kernel that writes all scores to memory.
            repeats = query.shape[1] // key.shape[1]
            key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return mixed.transpose(1, 2)


def known_single_documents(document_ids: Tensor) -> bool:
    """Whether each sequence is one document; False off the CPU, where asking would mean to wait."""
    if document_ids.device.type != "cpu":
        return False
    return bool((document_ids[:, 1:] == document_ids[:, :-1]).all())


def document_mask(document_ids: Tensor) -> Tensor:
    """`[B, 1, T, T]` bool: token t may look at token s if s <= t and both are of one document."""
    same_document = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same_document.tril()
