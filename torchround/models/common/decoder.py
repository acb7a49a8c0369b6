"""The three kinds of layer that every family is made of: embedding, block, head with the loss.

Shapes: B sequences, T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.layer import IGNORED_LABEL, Hidden, LayeredModel, LayerWork, MicroBatch
from torchround.models.common.attention import Attention
from torchround.models.common.config import TransformerConfig
from torchround.models.common.family import HFNames, HFTensors
from torchround.models.common.lora import Adapter
from torchround.models.common.loss import loss_workspace_bytes, token_loss_sum
from torchround.models.common.moe import MoE, MoEShape, balance_penalty
from torchround.models.common.primitives import RMSNorm, init_embedding_, init_linear_, lookup


class FeedForward(Protocol):
    """What a block asks of its feed-forward part, dense or of experts. The object is also an `nn.Module`."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None: ...

    def forward_flops(self, num_tokens: int) -> float: ...

    def frozen_flops(self, num_tokens: int) -> float: ...

    def activation_bytes(self, num_tokens: int, element_bytes: int) -> int: ...

    def workspace_bytes(self, num_tokens: int, element_bytes: int) -> int: ...


class Embedding(nn.Module):
    """First layer: tokens to `[B, T, D]`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, device="meta"))

    def forward(self, hidden: None, micro_batch: MicroBatch) -> Tensor:
        return lookup(self.weight, micro_batch.tokens)

    def init_weights(self, generator: torch.Generator) -> None:
        init_embedding_(self.weight, generator)

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = "cuda") -> LayerWork:
        elements = batch * tokens * self.weight.shape[1]
        # Scratch: fp32 gradients of the output and of the table, before that is added to the layer's own.
        scratch = 4 * (elements + self.weight.numel()) if self.weight.requires_grad else 0
        return LayerWork(0.0, 0, elements * element_bytes, elements * element_bytes + scratch)


class Block(nn.Module):
    """Pre-norm residual block: attention, then feed-forward; `[B, T, D]` in and out."""

    def __init__(self, config: TransformerConfig, attention: Attention, mlp: FeedForward) -> None:
        super().__init__()
        self.output_scale = (2 * config.num_layers) ** -0.5
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(self, hidden: Tensor, micro_batch: MicroBatch) -> Hidden:
        hidden = hidden + self.attention(self.attention_norm(hidden), micro_batch)
        return hidden + self.mlp(self.mlp_norm(hidden))

    def init_weights(self, generator: torch.Generator) -> None:
        """Norms 1, linear layers as in `torchround.models.common.primitives`, residual outputs scaled by 1/sqrt(2 L)."""
        self.attention_norm.init_weights()
        self.attention.init_weights(generator, self.output_scale)
        self.mlp_norm.init_weights()
        self.mlp.init_weights(generator, self.output_scale)
        self.init_adapters(generator)

    def init_adapters(self, generator: torch.Generator) -> None:
        """Fill low-rank adapters alone, where there are any."""
        for adapter in self._adapters():
            adapter.init_adapter(generator)

    def _adapters(self) -> list[Adapter]:
        return [module for module in self.modules() if isinstance(module, Adapter)]

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = "cuda") -> LayerWork:
        """RoundPipe appendix B: FLOPs of equation 2, kept activations of equation 1 and small fp32 tables."""
        num_tokens, width = batch * tokens, self.attention_norm.weight.numel()
        flops = self.attention.forward_flops(batch, tokens) + self.mlp.forward_flops(num_tokens)
        frozen_flops = self.attention.frozen_flops(num_tokens) + self.mlp.frozen_flops(num_tokens)
        # Inputs of two norms and of the two sets of linear layers behind them; two fp32 scales per token.
        kept = 4 * num_tokens * width * element_bytes + 2 * 4 * num_tokens
        kept += self.attention.activation_bytes(batch, tokens, element_bytes, device)
        kept += self.mlp.activation_bytes(num_tokens, element_bytes)
        for adapter in self._adapters():
            flops += adapter.adapter_flops(num_tokens)
            kept += adapter.adapter_bytes(num_tokens, element_bytes)
        scratch = self._workspace(batch, tokens, element_bytes, device)
        return LayerWork(flops, kept, num_tokens * width * element_bytes, scratch, frozen_flops)

    def _workspace(self, batch: int, tokens: int, element_bytes: int, device: str) -> int:
        """Scratch of the hungriest part, and one weight's gradient on its way into an fp32 one.

        An estimate from above: with the kept activations, 1 to 1.5 times the measured peak on small models.
        """
        num_tokens, width = batch * tokens, self.attention_norm.weight.numel()
        norm_bytes = 4 * 4 * num_tokens * width  # input, gradient, normed, inner, all fp32
        attention_bytes = self.attention.workspace_bytes(batch, tokens, element_bytes, device)
        mlp_bytes = self.mlp.workspace_bytes(num_tokens, element_bytes)
        trained = (parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        largest = max(trained, default=0)
        gradient_bytes = largest * (4 if element_bytes == 4 else 4 + element_bytes)
        return max(norm_bytes, attention_bytes, mlp_bytes) + gradient_bytes


class Head(nn.Module):
    """Last layer: norm, projection to the vocabulary, and the fp32 sum of token losses."""

    def __init__(self, config: TransformerConfig, embedding: Embedding) -> None:
        super().__init__()
        self.tied = config.tied_embeddings
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        shape = (config.vocab_size, config.hidden_size)
        self.weight = embedding.weight if self.tied else nn.Parameter(torch.empty(shape, device="meta"))

    def forward(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        flat = self.norm(hidden).flatten(0, 1)  # [B T, D]
        return token_loss_sum(flat, self.weight, micro_batch.labels.flatten())

    def logits(self, hidden: Tensor) -> Tensor:
        """`[B, T, V]`: all logits at once, for checks and generation, never for training."""
        return F.linear(self.norm(hidden), self.weight)

    def init_weights(self, generator: torch.Generator) -> None:
        self.norm.init_weights()
        if not self.tied:
            init_linear_(self.weight, generator)

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = "cuda") -> LayerWork:
        num_tokens, (vocab, width) = batch * tokens, self.weight.shape
        # Norm input, normed input, and the gradient that the loss keeps for it.
        kept = 3 * num_tokens * width * element_bytes + 4 * num_tokens
        norm_bytes, flops = 4 * 4 * num_tokens * width, 2.0 * num_tokens * vocab * width
        trained = self.weight.requires_grad
        loss_bytes = loss_workspace_bytes(num_tokens, vocab, width, element_bytes, trained)
        return LayerWork(flops, kept, 4, max(norm_bytes, loss_bytes), 0.0 if trained else flops)


# Block and head of models with experts. With a balance coefficient the load travels beside the hidden state.
#
# Shapes: B sequences, T tokens, D model width, E experts.


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


# Putting a decoder together: embedding, blocks, head; and their Hugging Face names.


# Our parameter of a block to the tensor below `model.layers.<i>.`: what all families name alike.
ATTENTION_NAMES: Mapping[str, HFTensors] = MappingProxyType(
    {
        "attention_norm.weight": "input_layernorm.weight",
        "attention.query.weight": "self_attn.q_proj.weight",
        "attention.key.weight": "self_attn.k_proj.weight",
        "attention.value.weight": "self_attn.v_proj.weight",
        "attention.output.weight": "self_attn.o_proj.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
    }
)
SWIGLU_NAMES: Mapping[str, HFTensors] = MappingProxyType(
    {
        "mlp.gate.weight": "mlp.gate_proj.weight",
        "mlp.up.weight": "mlp.up_proj.weight",
        "mlp.down.weight": "mlp.down_proj.weight",
    }
)


def assemble(
    config: TransformerConfig,
    make_block: Callable[[int], Block],
    make_head: Callable[[TransformerConfig, Embedding], Head] = Head,
) -> LayeredModel:
    """Layers `embedding`, `block.0` .., `head`. `make_block(index)` gives the family's block."""
    embedding = Embedding(config)
    blocks = [make_block(index) for index in range(config.num_layers)]
    layers: tuple[nn.Module, ...] = (embedding, *blocks, make_head(config, embedding))
    names = ("embedding", *(f"block.{index}" for index in range(config.num_layers)), "head")
    return LayeredModel(names, layers)


def decoder_names(config: TransformerConfig, block_names: Mapping[str, HFTensors]) -> HFNames:
    """Names for every stored parameter. A tied head has no entry: the embedding stores it.

    `block_names`: our parameter of a block to the tensor, or tensors, below `model.layers.<i>.`.
    """
    names: HFNames = {
        "embedding.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
    }
    if not config.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    for index in range(config.num_layers):
        for ours, theirs in block_names.items():
            prefix = f"model.layers.{index}."
            names[f"block.{index}.{ours}"] = (
                prefix + theirs if isinstance(theirs, str) else tuple(prefix + name for name in theirs)
            )
    return names
