"""The layers of a decoder (embedding, blocks, head with the loss), put together from the settings of each block.

A model is a list of `BlockSettings`: the blocks of one model may differ in kind of attention, kind of feed-forward,
rotary base, norm, activation and the Hugging Face names of their parameters. A kind of your own keeps to `FeedForward` or
`Norm`; an attention derives from `Attention`. docs/models.md ("Adding a family") has a whole family with one.

Shapes: B sequences, T tokens, D model width, V vocabulary, E experts, L layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.accelerators import PLANNED_KIND, has_triton
from torchround.keeping import output_is_read
from torchround.layer import (
    IGNORED_LABEL,
    HFNames,
    HFTensors,
    Hidden,
    LayeredModel,
    LayerWork,
    MicroBatch,
    renamed,
)
from torchround.models.common import chunks
from torchround.models.common.attention import Attention, KeysAndValues
from torchround.models.common.config import ModelConfigError, TransformerConfig
from torchround.models.common.feed_forward import MoE, balance_penalty, expert_load
from torchround.models.common.lora import init_adapters
from torchround.models.common.loss import loss_work, token_loss_sum
from torchround.models.common.primitives import init_embedding_, init_linear_, lookup


class Norm(Protocol):
    """A norm over the last dimension: a module of `[B, T, D]` to `[B, T, D]`, built on `meta`. `RMSNorm` is one."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def init_weights(self) -> None: ...

    def work(self, num_tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork: ...


class FeedForward(Protocol):
    """A feed-forward: a module of `[B, T, D]` to `[B, T, D]`, built on `meta`. `GatedMLP` and `MoE` are two.

    Linear layers that are a `Projection` take adapters. It has no buffers and no dropout, and waits for no value of a device.
    """

    def __call__(self, x: Tensor, is_read: bool = True) -> Tensor:
        """Compute the output. Unless it `is_read`, only its graph counts, and the last product may be left out."""

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None:
        """Fill all parameters in a fixed order; the one that writes to the residual stream is scaled by `output_scale`."""

    def work(self, num_tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count a micro-batch of `num_tokens` tokens; `kept_linears` counts the linear layers of a part that `keep` names."""


@dataclass(frozen=True)
class BlockSettings:
    """One block: how its parts are made, and the names of its parameters in Hugging Face files.

    Each maker takes the width that it works on and returns a part on `meta`; `functools.partial` of the part's class
    with its settings is one: `partial(Attention, num_heads=8, ..., rope=Rope(10000.0), window=128)`. The norm of the last
    block is also that of the head.

    `hf_names`: each parameter of the block, such as `mlp.up.weight`, to the tensor, or tensors, below `model.layers.<i>.`.
    """

    attention: Callable[[int], Attention]
    feed_forward: Callable[[int], FeedForward]
    norm: Callable[[int], Norm]
    hf_names: Mapping[str, HFTensors]


# Our parameter of a block to the tensor below `model.layers.<i>.`: the names that all families share.
ATTENTION_NAMES: Mapping[str, HFTensors] = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
}
GATED_MLP_NAMES: Mapping[str, HFTensors] = {
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def attention_maker(config: TransformerConfig, **settings: Any) -> Callable[[int], Attention]:
    """Make the maker of an attention of these sizes, with other `settings` of `Attention`."""
    return partial(
        Attention,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope=config.rope,
        **settings,
    )


class Embedding(nn.Module):
    """First layer: tokens to `[B, T, D]`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, device="meta"))

    def forward(self, hidden: None, micro_batch: MicroBatch) -> Tensor:
        return lookup(self.weight, micro_batch.tokens)

    def init_weights(self, generator: torch.Generator) -> None:
        init_embedding_(self.weight, generator)

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        output_bytes = batch * tokens * self.weight.shape[1] * element_bytes
        scratch = 0
        if self.weight.requires_grad:
            # fp32 gradients of the output and of the table, before the latter is added to the layer's own.
            scratch = 4 * (batch * tokens * self.weight.shape[1] + self.weight.numel())
        return LayerWork(boundary_bytes=output_bytes, workspace_bytes=output_bytes + scratch)


class Block(nn.Module):
    """Pre-norm residual block: attention, then feed-forward; `[B, T, D]` in and out.

    From the first block with a balance penalty on, the load `[B, 2, E]` fp32, summed over blocks so far, travels
    beside the hidden state. `load_experts` is E, or 0 if no load leaves this block.
    """

    def __init__(self, settings: BlockSettings, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        # Each block adds twice to the residual stream; see `init_linear_`.
        self.output_scale = (2 * num_layers) ** -0.5
        self.attention_norm = settings.norm(hidden_size)
        self.attention = settings.attention(hidden_size)
        self.mlp_norm = settings.norm(hidden_size)
        self.mlp = settings.feed_forward(hidden_size)
        self.load_experts = 0
        self.most_compiled_tokens = chunks.CHUNK_TOKENS

    def forward(self, hidden: Hidden, micro_batch: MicroBatch) -> Hidden:
        stream, *loads = (hidden,) if isinstance(hidden, Tensor) else hidden
        stream = stream + self.attention(self.attention_norm(stream), micro_batch)
        x = self.mlp_norm(stream)
        is_read = output_is_read()
        if isinstance(self.mlp, MoE) and self.mlp.shape.balance_coefficient:
            mixed, probabilities, chosen = self.mlp.forward_with_choice(x, is_read)
            return stream + mixed, sum(loads, start=expert_load(probabilities, chosen))
        stream = stream + self.mlp(x, is_read)
        return (stream, *loads) if loads else stream

    def new_cache(self, capacity: int) -> KeysAndValues:
        return KeysAndValues(capacity)

    def cache_bytes(self, batch: int, tokens: int, element_bytes: int) -> int:
        return 2 * batch * tokens * self.attention.num_kv_heads * self.attention.head_dim * element_bytes

    def init_weights(self, generator: torch.Generator) -> None:
        """Fill all parts in order; projections into the residual stream are scaled by `1 / sqrt(2 L)`."""
        self.attention_norm.init_weights()
        self.attention.init_weights(generator, self.output_scale)
        self.mlp_norm.init_weights()
        self.mlp.init_weights(generator, self.output_scale)
        self.init_adapters(generator)

    init_adapters = init_adapters

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Add up the parts: FLOPs of RoundPipe's equation 2, activations of equation 1 and small fp32 tables.

        The scratch is an estimate from above: with the kept activations, 1 to 1.5 times the measured peak on small
        models.
        """
        num_tokens = batch * tokens
        parts = (
            self.attention_norm.work(num_tokens, element_bytes, device),
            self.attention.work(batch, tokens, element_bytes, device),
            self.mlp_norm.work(num_tokens, element_bytes, device),
            self.mlp.work(num_tokens, element_bytes, device),
        )
        load_bytes = batch * 2 * self.load_experts * 4
        work = sum(
            parts, start=LayerWork(boundary_bytes=num_tokens * self.hidden_size * element_bytes + load_bytes)
        )
        # One weight's gradient exists twice while it is added to its fp32 sum; the largest weight decides. Kernels add to
        # the gradients of stacks themselves.
        adds_itself = 3 if has_triton(device) else None
        trained = (one.numel() for one in self.parameters() if one.requires_grad and one.ndim != adds_itself)
        gradient_bytes = max(trained, default=0) * (4 if element_bytes == 4 else 4 + element_bytes)
        return replace(work, workspace_bytes=work.workspace_bytes + gradient_bytes)


class Head(nn.Module):
    """Last layer: norm, projection to the vocabulary, and the fp32 sum of token losses.

    If the micro-batch wants logits, it returns those of each sequence's last token instead.

    While training it adds the balance penalty of `num_loads` blocks, weighted by each sequence's number of labels.
    Divided by the step's labels like the rest of the loss, that is `balance_coefficient` times the mean penalty.
    """

    never_compiled = True  # the loss adds to the weight's gradient itself

    def __init__(
        self,
        config: TransformerConfig,
        embedding: Embedding,
        norm: Callable[[int], Norm],
        balance_coefficient: float = 0.0,
        num_loads: int = 0,
    ) -> None:
        super().__init__()
        self.tied = config.tied_embeddings
        self.balance_coefficient, self.num_loads = balance_coefficient, num_loads
        self.norm = norm(config.hidden_size)
        shape = (config.vocab_size, config.hidden_size)
        self.weight = embedding.weight if self.tied else nn.Parameter(torch.empty(shape, device="meta"))

    def forward(self, hidden: Hidden, micro_batch: MicroBatch) -> Tensor:
        stream, *loads = (hidden,) if isinstance(hidden, Tensor) else hidden
        if micro_batch.wants == "logits":
            return self.logits(stream[:, -1:].contiguous())[:, 0].float()  # [B, T, D] -> [B, V]
        flat = self.norm(stream).flatten(0, 1)  # [B, T, D] -> [B T, D]
        loss = token_loss_sum(flat, self.weight, micro_batch.labels.flatten(), micro_batch.loss_factor)
        if not loads or not torch.is_grad_enabled():  # an evaluation measures the model alone
            return loss
        labels = micro_batch.labels
        penalties = balance_penalty(loads[0], self.num_loads * labels.shape[1])  # [B]
        return loss + self.balance_coefficient * (penalties * (labels != IGNORED_LABEL).sum(dim=1)).sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute all logits at once, `[B, T, V]`: for checks and generation, never for training."""
        return F.linear(self.norm(hidden), self.weight)

    def init_weights(self, generator: torch.Generator) -> None:
        self.norm.init_weights()
        if not self.tied:
            init_linear_(self.weight, generator)

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        num_tokens, (vocab, width) = batch * tokens, self.weight.shape
        trained = self.weight.requires_grad
        projection = loss_work(num_tokens, vocab, width, element_bytes, trained, device)
        return self.norm.work(num_tokens, element_bytes, device) + projection


def assemble(config: TransformerConfig, blocks: Sequence[BlockSettings]) -> LayeredModel:
    """Build the layers `embedding`, `block.0` .., `head`, on `meta`: no memory.

    The config gives the residual stream's width, the vocabulary and the tie; the last block gives the last norm. Everything
    else is each block's own. Raises `ModelConfigError` for blocks with balance penalties that cannot be added up.
    """
    embedding = Embedding(config)
    layers = [Block(settings, config.hidden_size, len(blocks)) for settings in blocks]
    mixtures = [block.mlp.shape for block in layers if isinstance(block.mlp, MoE)]
    penalties = {
        (shape.num_experts, shape.balance_coefficient) for shape in mixtures if shape.balance_coefficient
    }
    if len(penalties) > 1:
        raise ModelConfigError(
            "blocks with a balance penalty must agree on (num_experts, balance_coefficient), "
            f"got {', '.join(map(str, sorted(penalties)))}"
        )
    num_experts, coefficient = penalties.pop() if penalties else (0, 0.0)
    num_loads = 0
    for block in layers:
        num_loads += isinstance(block.mlp, MoE) and block.mlp.shape.balance_coefficient > 0
        block.load_experts = num_experts if num_loads else 0
    head = Head(config, embedding, blocks[-1].norm, coefficient, num_loads)
    names = ("embedding", *(f"block.{index}" for index in range(len(blocks))), "head")
    return LayeredModel(names, (embedding, *layers, head))


def decoder_names(config: TransformerConfig, blocks: Sequence[BlockSettings]) -> HFNames:
    """Map every stored parameter to its tensors. A tied head has no entry: the embedding stores it."""
    names: HFNames = {"embedding.weight": "model.embed_tokens.weight"}
    last_norm = blocks[-1].norm(config.hidden_size)
    assert isinstance(last_norm, nn.Module), "a part is a module"
    names |= {f"head.norm.{name}": f"model.norm.{name}" for name, _ in last_norm.named_parameters()}
    if not config.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    for index, settings in enumerate(blocks):
        prefix = f"model.layers.{index}."
        for ours, theirs in settings.hf_names.items():
            names[f"block.{index}.{ours}"] = renamed(theirs, prefix.__add__)
    return names
