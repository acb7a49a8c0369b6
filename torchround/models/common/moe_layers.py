"""Block and head of models with experts. With a balance coefficient the load travels beside the hidden state.

Shapes: B sequences, T tokens, D model width, E experts.
"""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from torchround.layer import IGNORED_LABEL, Hidden, LayerWork, MicroBatch
from torchround.models.common.attention import Attention
from torchround.models.common.config import TransformerConfig
from torchround.models.common.layers import Block, Embedding, Head
from torchround.models.common.moe import MoE, MoEShape, balance_penalty


class MoEBlock(Block):
    """As `Block`; with a balance coefficient it gives `(hidden, load [B, 2, E])`, the load summed up so far."""

    def __init__(self, config: TransformerConfig, attention: Attention, moe: MoE) -> None:
        super().__init__(config, attention, moe)
        self.moe = moe.shape

    def forward(self, hidden: Hidden, micro_batch: MicroBatch) -> Hidden:
        stream, *loads = (hidden,) if isinstance(hidden, Tensor) else hidden
        stream = stream + self.attention(self.attention_norm(stream), micro_batch)
        x = self.mlp_norm(stream)
        if not self.moe.balance_coefficient:
            return stream + self.mlp(x)
        mixed, load = cast(MoE, self.mlp).forward_with_load(x)
        return stream + mixed, sum(loads, start=load)

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = "cuda") -> LayerWork:
        work = super().work(batch, tokens, element_bytes, device)
        load_bytes = batch * 2 * self.moe.num_experts * 4 if self.moe.balance_coefficient else 0
        return replace(work, boundary_bytes=work.boundary_bytes + load_bytes)


class MoEHead(Head):
    """As `Head`; while training it adds the balance penalty, weighted by each sequence's number of labels.

    Divided by the step's labels like the rest of the loss, that is `coefficient` times the mean penalty.
    """

    def __init__(self, config: TransformerConfig, embedding: Embedding, moe: MoEShape) -> None:
        super().__init__(config, embedding)
        self.moe, self.num_layers = moe, config.num_layers

    def forward(self, hidden: Hidden, micro_batch: MicroBatch) -> Tensor:
        stream, *loads = (hidden,) if isinstance(hidden, Tensor) else hidden
        loss = super().forward(stream, micro_batch)
        if not loads or not torch.is_grad_enabled():  # an evaluation measures the model alone
            return loss
        labels = micro_batch.labels
        penalties = balance_penalty(loads[0], self.num_layers * labels.shape[1])
        return loss + self.moe.balance_coefficient * (penalties * (labels != IGNORED_LABEL).sum(dim=1)).sum()
