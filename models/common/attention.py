"""Grouped-query self-attention with rotary positions, kept inside documents; and the choice of its kernel.

The kernel is chosen from the batch's facts, shapes, dtype and device alone, never from timing or from the contents of
one micro-batch, so the choice does not depend on how a batch was cut. It never waits for a device.

Shapes: B sequences, T tokens, S tokens so far, T included, D model width, H heads, K kv heads, C channels of a head.
"""

from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.accelerators import (
    device_kind,
    has_offset_attention,
    is_accelerator,
    shares_kv_heads_under_mask,
)
from torchround.keeping import keep
from torchround.layer import KeptWork, LayerWork, MicroBatch, Products
from torchround.models.common.chunks import elements_at_once
from torchround.models.common.lora import kept_linears
from torchround.models.common.packed_attention import attend_by_offsets, backward_scratch_bytes
from torchround.models.common.primitives import RMSNorm, init_part_, rotate
from torchround.models.common.rope import Rope, rotation
from torchround.models.common.sinks import SinkAttention
from torchround.models.kernels.projections import Projection, project_all


class Attention(nn.Module):
    """Self-attention of one block, `[B, T, D]` in and out. Everything here may differ from block to block.

    With `qk_norm_eps`, an RMS norm of that epsilon is applied to queries and keys head by head before rotation. With
    a `window`, a token sees that many tokens, itself included. With `sinks`, each head has one learnt score more in
    its softmax.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rope: Rope,
        bias: bool = False,
        qk_norm_eps: float | None = None,
        sinks: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.rope, self.head_dim, self.window = rope, head_dim, window
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.query = Projection(hidden_size, width, bias)
        self.key = Projection(hidden_size, kv_width, bias)
        self.value = Projection(hidden_size, kv_width, bias)
        self.output = Projection(width, hidden_size, bias)
        self.query_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.key_norm = None if qk_norm_eps is None else RMSNorm(head_dim, qk_norm_eps)
        self.sinks = nn.Parameter(torch.empty(num_heads, device="meta")) if sinks else None

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        query, key, value = (
            flat.unflatten(-1, (-1, self.head_dim))  # [B, T, H C] -> [B, T, H, C], or K heads
            for flat in keep("qkv", project_all, x, (self.query, self.key, self.value))
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        # The tables are made anew in each block: stored ones would be buffers that travel with the weights.
        cos, sin = rotation(self.rope, self.head_dim, micro_batch.positions)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        cache, past = micro_batch.cache, 0
        if cache is not None:
            past = cache.length
            keys, values = cache.append(key, value)
        if past:
            # Later calls of a text take a mask; the one that begins it takes the kernel that `attend` chooses.
            mask = past_mask(micro_batch, keys.shape[1], self.window, query.dtype)
            return self.output(_attend_under_mask(query, keys, values, mask, self.sinks).flatten(2))
        mixed = keep(
            "attention", attend, query, key, value, micro_batch, self.window, self.sinks
        )  # [B, T, H, C]
        return keep("output", self.output, mixed.flatten(2))  # [B, T, H C] -> [B, T, D]

    init_weights = init_part_

    def work(self, batch: int, tokens: int, element_bytes: int, device: str) -> LayerWork:
        """Count projections, and scores and mixing over all T^2 pairs (RoundPipe appendix B, equation 2).

        The half above the diagonal, which is never used, is counted, as is customary for MFU (PaLM appendix B); so
        are pairs outside a window.
        """
        heads, kv_heads, channels = self.num_heads, self.num_kv_heads, self.head_dim
        num_tokens, flops = batch * tokens, 4.0 * batch * tokens * tokens * heads * channels
        dtype = torch.float32 if element_bytes == 4 else torch.bfloat16
        # Any batch may be a packed one.
        kernel = choose_kernel(device, dtype, channels, tokens, 2, self.window)
        mask_tokens = tokens if kernel is AttentionKernel.MASK else 0
        # Query, key, value and mixed heads, and in fp32 the RoPE tables and the log-sum-exp. Appendix B.1 leaves the mask out.
        elements = (2 * heads + 2 * kv_heads) * channels + mask_tokens
        token_bytes = elements * element_bytes + 4 * (channels + heads)
        # The backward needs the values, and the norms' inputs; it needs queries and keys as they are after rotation.
        saved_heads = kv_heads
        if self.query_norm is not None:  # the norms' inputs, and an fp32 scale per head
            token_bytes += (heads + kv_heads) * (channels * element_bytes + 4)
            saved_heads += heads + kv_heads
        # The larger of two moments: rotating in fp32 while the mask is made, or all heads' gradients. The residual stream's
        # gradient takes the place of what the feed-forward's norm kept.
        rotating = 3 * num_tokens * mask_tokens
        rotating += 4 * 4 * elements_at_once(num_tokens * heads * channels, device, num_tokens)
        gradients = num_tokens * (3 * heads + 2 * kv_heads) * channels * element_bytes
        if kernel is AttentionKernel.OFFSETS:
            gradients += backward_scratch_bytes(batch, tokens, heads, kv_heads, channels)
        # The kernel's output and log-sum-exp. An accelerator's kernel may pad channels to 8 and tokens to 32.
        pad_channels, pad_tokens = (-channels % 8, -tokens % 32) if is_accelerator(device) else (0, 0)
        output_bytes = num_tokens * heads * (channels + pad_channels) * element_bytes
        sizes = (output_bytes, 4 * batch * heads * (tokens + pad_tokens))
        # The backward needs both as they are with the sinks.
        saved_bytes = num_tokens * heads * (channels * element_bytes + 4) if self.sinks is None else 0
        kept = KeptWork.of("attention", sizes, flops, saved_bytes)
        mixing = LayerWork(
            (Products(flops),),
            num_tokens * token_bytes,
            workspace_bytes=max(rotating, gradients),
            keepable=(kept,),
        )
        inward = (self.query, self.key, self.value)
        parts = (
            kept_linears("qkv", inward, num_tokens, element_bytes, saved_heads * channels),
            mixing,
            kept_linears("output", (self.output,), num_tokens, element_bytes),
        )
        return sum(parts, start=LayerWork())


class AttentionKernel(Enum):
    """The three ways to keep documents apart. Only `MASK` builds a tensor of size T^2, `[B, 1, T, T]`."""

    CAUSAL = "one document per sequence, the whole past"
    OFFSETS = "variable length: a flash kernel that takes the offset of each document"
    MASK = "a mask of all pairs, added to the scores"


def choose_kernel(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    tokens: int,
    max_documents: int | Tensor | None,
    window: int | None,
    sinks: bool = False,
) -> AttentionKernel:
    """Choose for sequences of `tokens` tokens on a `device` of this type. All three take sinks."""
    single = isinstance(max_documents, int) and max_documents == 1
    whole_past = single and (window is None or window >= tokens)
    # With sinks the two others repeat keys and values for each query head.
    takes_offsets = max_documents is not None and (sinks or not whole_past)
    if takes_offsets and has_offset_attention(device, dtype, head_dim):
        return AttentionKernel.OFFSETS
    return AttentionKernel.CAUSAL if whole_past else AttentionKernel.MASK


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    micro_batch: MicroBatch,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute softmax attention over earlier tokens of the same document, scaled by `scale`, or else `1 / sqrt(C)`.

    `query` is `[B, T, H, C]`, `key` and `value` `[B, T, K, C]`; the result is `[B, T, H, C]`. Each kv head serves
    `H / K` query heads. With a `window` a token sees itself and the `window - 1` before it. `sinks [H]` are scores that
    join each softmax without a value; with them the scale is the usual one. Values may be narrower than C.
    """
    tokens, channels, value_channels = query.shape[1], query.shape[3], value.shape[3]
    if value_channels < channels:
        # The kernels take one width.
        value = F.pad(value, (0, channels - value_channels))
        return attend(query, key, value, micro_batch, window, sinks, scale)[..., :value_channels]
    most, has_sinks = micro_batch.max_documents, sinks is not None
    kernel = choose_kernel(device_kind(query), query.dtype, channels, tokens, most, window, has_sinks)
    if kernel is AttentionKernel.OFFSETS:
        return attend_by_offsets(query, key, value, micro_batch, window, sinks, scale)
    mask = None
    if kernel is AttentionKernel.MASK:
        mask = additive_mask(allowed_pairs(micro_batch.document_ids, window), query.dtype)
    return _attend_under_mask(query, key, value, mask, sinks, scale)


def _attend_under_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Attend under an additive mask, to the whole past without one; shapes as in `attend`, keys may be more."""
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))  # [B, H or K, T, C]
    if sinks is not None:
        return SinkAttention.apply(query, key, value, sinks, mask).transpose(1, 2)
    if mask is not None and not shares_kv_heads_under_mask(device_kind(query)):
        repeats = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(repeats, dim=1) for heads in (key, value))
    shares_heads = key.shape[1] < query.shape[1]
    mixed = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=shares_heads
    )
    return mixed.transpose(1, 2)  # [B, H, T, C] -> [B, T, H, C]


def allowed_pairs(document_ids: Tensor, window: int | None = None) -> Tensor:
    """Mark the pairs of `[B, 1, T, T]` with s <= t, t - s < window and both of one document."""
    allowed = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()
    return allowed if window is None else allowed.triu(1 - window)


def past_mask(micro_batch: MicroBatch, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Make the mask `[B, 1, T, S]` to add to the scores of the last T of S = `length` tokens: 0 or minus infinity.

    The positions `[B, T]` say how many tokens of its document come before each of them; only padding comes before
    those. With a `window` a token sees itself and the `window - 1` before it. All blocks of the same window share one
    mask.
    """

    def make() -> Tensor:
        positions = micro_batch.positions
        tokens = positions.shape[1]
        every = torch.arange(length, device=positions.device)  # [S]
        own = every[length - tokens :]  # [T]: where the new tokens are
        seen = positions if window is None else positions.clamp(max=window - 1)
        first = (own - seen)[:, None, :, None]  # [B, 1, T, 1]: the first token that each one sees
        allowed = (every >= first) & (every <= own[:, None])  # [B, 1, T, S]
        return additive_mask(allowed, dtype)

    mask: Tensor = micro_batch.once(("mask of the past", window, length), make)
    return mask


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Write 0 for allowed pairs `[B, 1, T, S]`, else -inf, in rows padded to 16 elements, as CUDA kernels want them."""
    *rows, length = allowed.shape
    mask = torch.zeros((*rows, length + -length % 16), dtype=dtype, device=allowed.device)[..., :length]
    return mask.masked_fill_(~allowed, -torch.inf)


# Keys and values of the tokens so far, kept on the device that runs a block: text grows by one token a pass. A group of
# sequences is padded on the left, so that all of them end at the same place. Padding has positions too, but they are those of
# documents of their own: the first real token of a sequence is at position 0.


class KeysAndValues:
    """The keys and values `[B, S, K, C]` of one block, in memory for `capacity` tokens that the first call takes.

    One thread at a time may use it. The memory belongs to the device of the first call, and later calls must come from
    there.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._held: list[Tensor] = []  # the keys, and the values

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add `[B, T, K, C]` each, and return all keys and values so far, `[B, S, K, C]`."""
        start, self.length = self.length, self.length + key.shape[1]
        assert self.length <= self.capacity, f"{self.length} tokens, and room for {self.capacity}"
        if not self._held:
            self._held = [new.new_empty((len(new), self.capacity, *new.shape[2:])) for new in (key, value)]
        for held, new in zip(self._held, (key, value), strict=True):
            assert held.device == new.device, (
                f"keys and values are on {held.device}, the block on {new.device}"
            )
            held[:, start : self.length] = new
        keys, values = (held[:, : self.length] for held in self._held)
        return keys, values

    def clear(self) -> None:
        self._held = []
