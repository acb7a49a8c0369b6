"""GPT-OSS as an ordered list of layers, and the Hugging Face names of its parameters."""

from typing import Any

import torch
from torch import Tensor, nn

from torchround.layer import LayeredModel
from torchround.models.common.attention import Attention
from torchround.models.common.decoder import (
    ATTENTION_NAMES,
    Block,
    MoEBlock,
    MoEHead,
    assemble,
    decoder_names,
)
from torchround.models.common.family import HFNames
from torchround.models.common.feed_forward import ExpertAdapter, grouped_product
from torchround.models.common.lora import LoraShape
from torchround.models.common.moe import MoE, Routes
from torchround.models.common.primitives import frozen_elements, init_linear_, lookup, lookup_gradient
from torchround.models.gpt_oss.config import GptOssConfig

OWN_NAMES = {
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.output.bias": "self_attn.o_proj.bias",
    "attention.sinks": "self_attn.sinks",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.experts.gate_up": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down": "mlp.experts.down_proj",
    "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
}


def build(config: GptOssConfig) -> LayeredModel:
    """Embedding, blocks, head, on `meta`: no memory."""
    return assemble(
        config,
        lambda index: _block(config, index),
        lambda shape, embedding: MoEHead(shape, embedding, config.moe),
    )


def _block(config: GptOssConfig, index: int) -> Block:
    moe, width = config.moe, config.hidden_size
    attention = Attention(config, bias=True, sinks=True, window=config.window_of(index))
    experts = GptOssExperts(width, moe.num_experts, moe.ffn_size, config.swiglu_limit, config.swiglu_alpha)
    return MoEBlock(config, attention, MoE(width, moe, experts, router_bias=True))


def hf_names(config: GptOssConfig) -> HFNames:
    """Where 16-bit Hugging Face files hold each stored parameter (MXFP4 files: once dequantised)."""
    return decoder_names(config, {**ATTENTION_NAMES, **OWN_NAMES})


# GPT-OSS experts: biases, and a SwiGLU whose inputs are cut and whose gates alternate with its values.
#
# Parameters have the shapes and order of the released 16-bit files. Shapes: R rows sorted by expert, E experts,
# D model width, F expert width.


class GptOssExperts(nn.Module):
    """`weight * (down_e(act(gate_up_e(row) + bias_e)) + bias_e)` for each row of expert e."""

    adaptable: tuple[str, ...] = ("gate_up", "down")
    undecayed = ("gate_up_bias", "down_bias")

    def __init__(self, hidden_size: int, num_experts: int, ffn_size: int, limit: float, alpha: float) -> None:
        super().__init__()
        self.limit, self.alpha = limit, alpha
        inward, outward = (num_experts, hidden_size, 2 * ffn_size), (num_experts, ffn_size, hidden_size)
        self.gate_up = nn.Parameter(torch.empty(inward, device="meta"))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * ffn_size, device="meta"))
        self.down = nn.Parameter(torch.empty(outward, device="meta"))
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size, device="meta"))

    def forward(self, rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        gate_up = self.product("gate_up", rows, routes)  # [R, 2 F]
        gate_up = gate_up + lookup(self.gate_up_bias, routes.experts)
        product = _ClampedSwiGLU.apply(gate_up, weights, self.limit, self.alpha)  # [R, F]
        mixed = self.product("down", product, routes)
        return mixed + _WeightedLookup.apply(self.down_bias, routes.experts, weights)

    def product(self, name: str, rows: Tensor, routes: Routes) -> Tensor:
        """Rows times their expert's `gate_up` or `down`."""
        return grouped_product(rows, getattr(self, name), routes.ends)

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None:
        init_linear_(self.gate_up, generator)
        init_linear_(self.down, generator, output_scale)
        with torch.no_grad():
            self.gate_up_bias.zero_()
            self.down_bias.zero_()

    def row_flops(self) -> float:
        return 2.0 * (self.gate_up[0].numel() + self.down[0].numel())

    def frozen_row_flops(self) -> float:
        return 2.0 * frozen_elements(self.gate_up, self.down) / len(self.down)

    def row_elements(self) -> int:
        """Gates and values together, and their product."""
        return 3 * self.down.shape[1]

    def with_adapters(self, lora: LoraShape, place: int, adapted: tuple[str, ...]) -> "LoraGptOssExperts":
        return LoraGptOssExperts(self, lora, place, adapted)


class LoraGptOssExperts(ExpertAdapter, GptOssExperts):
    """The experts, frozen, with adapters of PEFT's shapes: `<name>_lora_a [E r, A]`, `<name>_lora_b [Z, r E]`.

    A's rows go expert by expert, B's columns rank by rank. Biases have none.
    """

    def __init__(self, base: GptOssExperts, lora: LoraShape, place: int, adapted: tuple[str, ...]) -> None:
        num_experts, ffn_size, hidden_size = base.down.shape
        super().__init__(hidden_size, num_experts, ffn_size, base.limit, base.alpha)
        for name, parameter in base.named_parameters():
            setattr(self, name, parameter)
        self.lora, self.place, self.seed, self.adapted = lora, place, None, adapted
        for name in adapted:
            _, inputs, outputs = getattr(base, name).shape
            a = torch.empty(num_experts * lora.rank, inputs, device="meta")
            b = torch.empty(outputs, lora.rank * num_experts, device="meta")
            setattr(self, f"{name}_lora_a", nn.Parameter(a))
            setattr(self, f"{name}_lora_b", nn.Parameter(b))

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        a = getattr(self, f"{name}_lora_a").unflatten(0, (-1, self.lora.rank))  # [E, r, A]
        b = getattr(self, f"{name}_lora_b").unflatten(1, (self.lora.rank, -1))  # [Z, r, E]
        return a.transpose(1, 2), b.permute(2, 1, 0).contiguous()


class _ClampedSwiGLU(torch.autograd.Function):
    """`(up + 1) * gate * sigmoid(alpha gate) * weight` with gate <= limit and |up| <= limit.

    Gates are the even channels, ups the odd ones. Only the inputs are kept.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.limit, ctx.alpha = limit, alpha
        gate, up = _cut(gate_up, limit)
        return (gate * torch.sigmoid(alpha * gate)).mul_(up + 1).mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate_up, weights = ctx.saved_tensors
        gate, up = _cut(gate_up, ctx.limit)
        open_share = torch.sigmoid(ctx.alpha * gate)
        active = gate * open_share
        grad_weights = (grads[0] * active * (up + 1)).sum(dim=-1, dtype=torch.float32)
        grad = grads[0] * weights[:, None].to(gate_up.dtype)
        grad_gate = grad * (up + 1) * (open_share + ctx.alpha * active * (1 - open_share))
        grad_gate_up = torch.stack((grad_gate, grad * active), dim=-1).flatten(-2)
        return grad_gate_up.mul_(_within(gate_up, ctx.limit)), grad_weights, None, None


def _cut(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def _within(gate_up: Tensor, limit: float) -> Tensor:
    """Where the cut passes gradients."""
    within = gate_up <= limit
    within[..., 1::2] &= gate_up[..., 1::2] >= -limit
    return within


class _WeightedLookup(torch.autograd.Function):
    """`table[index] * weight`, keeping neither the rows nor their product."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(table, index, weights)
        return table[index].mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        table, index, weights = ctx.saved_tensors
        grad_weights = (grads[0] * table[index]).sum(dim=-1, dtype=torch.float32)
        return lookup_gradient(grads[0].float() * weights[:, None], index, len(table)), None, grad_weights
