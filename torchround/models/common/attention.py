"""Grouped-query self-attention with rotary positions, kept inside documents.

Shapes: B sequences, T tokens, D model width, H heads, K kv heads, C channels of a head.
"""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.layer import MicroBatch
from torchround.models.common.config import TransformerConfig
from torchround.models.common.packed_attention import attend_by_offsets
from torchround.models.common.primitives import RMSNorm, frozen_elements, init_linear_
from torchround.models.common.rope import rotate, rotation
from torchround.models.common.sinks import attend_with_sinks


class Attention(nn.Module):
    """`[B, T, D]` in and out.

    With `qk_norm`, queries and keys are normed head by head before rotation. With a `window`, a token sees that
    many tokens, itself included. With `sinks`, each head has a learnt score more in its softmax.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        bias: bool = False,
        qk_norm: bool = False,
        sinks: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.rope, self.head_dim, self.window = config.rope, config.head_dim, window
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.hidden_size, width, bias=bias, device="meta")
        self.key = nn.Linear(config.hidden_size, kv_width, bias=bias, device="meta")
        self.value = nn.Linear(config.hidden_size, kv_width, bias=bias, device="meta")
        self.output = nn.Linear(width, config.hidden_size, bias=bias, device="meta")
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.num_heads, device="meta")) if sinks else None

    def forward(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        query = self.query(x).unflatten(-1, (self.num_heads, self.head_dim))  # [B, T, H, C]
        key = self.key(x).unflatten(-1, (self.num_kv_heads, self.head_dim))  # [B, T, K, C]
        value = self.value(x).unflatten(-1, (self.num_kv_heads, self.head_dim))  # [B, T, K, C]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        cos, sin = rotation(self.rope, self.head_dim, micro_batch.positions)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        documents = (micro_batch.document_ids, micro_batch.max_documents)
        mixed = attend(query, key, value, *documents, self.window, self.sinks)  # [B, T, H, C]
        return self.output(mixed.flatten(2))

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None:
        """Linear weights as `init_linear_`; norms 1; biases and sinks 0."""
        for linear in (self.query, self.key, self.value):
            init_linear_(linear.weight, generator)
        init_linear_(self.output.weight, generator, output_scale)
        for norm in (self.query_norm, self.key_norm):
            if norm is not None:
                norm.init_weights()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "sinks" or name.endswith("bias"):
                    parameter.zero_()

    def forward_flops(self, batch: int, tokens: int) -> float:
        """Projections, and scores and mixing over all T^2 pairs (RoundPipe appendix B, equation 2).

        The causal half that is never used is counted, as is customary for MFU (PaLM appendix B); so is what lies
        outside a window.
        """
        projections = sum(linear.weight.numel() for linear in (self.query, self.key, self.value, self.output))
        pairs = batch * tokens * tokens
        return 2.0 * batch * tokens * projections + 4.0 * pairs * self.num_heads * self.head_dim

    def frozen_flops(self, num_tokens: int) -> float:
        """Those of `forward_flops` that frozen projections take."""
        linears = (self.query, self.key, self.value, self.output)
        return 2.0 * num_tokens * frozen_elements(*(linear.weight for linear in linears))

    def activation_bytes(self, batch: int, tokens: int, element_bytes: int, device: str) -> int:
        """Kept besides the input: query, key, value, mixed heads; in fp32 the RoPE tables and log-sum-exp.

        And where packed documents need it a mask, `T` elements per token, which appendix B.1 does not know.
        """
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        mask = tokens if self._needs_mask(tokens, element_bytes, device) else 0
        per_token = (heads * self.head_dim + mask) * element_bytes + 4 * (self.head_dim + self.num_heads)
        if self.query_norm is not None:  # its inputs, and a scale per head
            per_token += (self.num_heads + self.num_kv_heads) * (self.head_dim * element_bytes + 4)
        return batch * tokens * per_token

    def workspace_bytes(self, batch: int, tokens: int, element_bytes: int, device: str) -> int:
        """Either rotation in fp32 with the mask in the making, or the gradients of all heads."""
        masked = self._needs_mask(tokens, element_bytes, device)
        making_mask = batch * tokens * tokens * 3 if masked else 0
        rotating = 4 * 4 * batch * tokens * self.num_heads * self.head_dim
        gradients = (
            batch * tokens * (3 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim * element_bytes
        )
        return max(making_mask + rotating, gradients)

    def _needs_mask(self, tokens: int, element_bytes: int, device: str) -> bool:
        """Of a batch of packed documents, which every batch may be."""
        dtype = torch.float32 if element_bytes == 4 else torch.bfloat16
        return choose_kernel(device, dtype, self.head_dim, tokens, 2, self.window) is AttentionKernel.MASK


# Causal attention inside documents: one function chooses the kernel.
#
# The choice is made from the batch's facts, shapes, dtype and device alone, never from timing or from what one
# micro-batch happens to hold, so that it does not depend on how a batch was cut. It never waits for a CUDA device.
#
# Shapes: B sequences, T tokens, H heads, K kv heads, C channels of a head.


class AttentionKernel(Enum):
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
) -> AttentionKernel:
    """For sequences of `tokens` tokens on a `device` of this kind (`cpu`, `cuda`). Sinks go with each."""
    single = isinstance(max_documents, int) and max_documents == 1
    if single and (window is None or window >= tokens):
        return AttentionKernel.CAUSAL
    if max_documents is not None and device == "cuda" and _fits_flash(dtype, head_dim):
        return AttentionKernel.OFFSETS
    return AttentionKernel.MASK


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
    if kernel is AttentionKernel.OFFSETS:
        assert max_documents is not None, "documents that nobody counted have no list of a known size"
        return attend_by_offsets(query, key, value, document_ids, max_documents, window, sinks)
    mask = None if kernel is AttentionKernel.CAUSAL else attention_mask(document_ids, window, query.dtype)
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
