"""Grouped-query self-attention with rotary positions, kept inside documents.

Shapes: B sequences, T tokens, D model width, H heads, K kv heads, C channels of a head.
"""

import torch
from torch import Tensor, nn

from torchround.layer import MicroBatch
from torchround.models.common.attend import Kernel, attend, choose_kernel
from torchround.models.common.config import TransformerConfig
from torchround.models.common.initialise import init_linear_
from torchround.models.common.norm import RMSNorm
from torchround.models.common.rope import rotate, rotation
from torchround.models.common.work import frozen_elements


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
        return choose_kernel(device, dtype, self.head_dim, tokens, 2, self.window) is Kernel.MASK
