"""GPT-OSS: attention with sinks and biases, every other block within a window, and a kind of experts of its own.

The experts have biases, and a SwiGLU whose inputs are clamped and whose gates alternate with its values. Parameters
have the shapes and order of the released 16-bit files.

Shapes: R rows sorted by expert, E experts, D model width, F expert width, A inputs, Z outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.keeping import keep
from torchround.models.common.chunks import elements_at_once, in_slices
from torchround.models.common.config import ModelConfigError, TransformerConfig
from torchround.models.common.decoder import ATTENTION_NAMES, BlockSettings, attention_maker
from torchround.models.common.experts import ExpertStack, Routes
from torchround.models.common.family import Family, HFConfig, mixture_content, transformer_content
from torchround.models.common.feed_forward import MoE, MoEShape
from torchround.models.common.primitives import RMSNorm, lookup_gradient
from torchround.models.common.rope import Rope, YarnScaling

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

BIAS_COLUMNS = 1024  # of the gradients of biases that are added up at once


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(TransformerConfig):
    """GPT-OSS: experts in every block. In blocks 0, 2, 4 and so on a token sees `window` tokens, itself included.

    SwiGLU's inputs are clamped at `swiglu_limit`, its gate is `x sigmoid(swiglu_alpha x)`.
    """

    moe: MoEShape
    window: int
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ModelConfigError(f"window = {self.window}, must be at least 1")

    def window_of(self, index: int) -> int | None:
        return None if index % 2 else self.window


def block_settings(config: GptOssConfig) -> list[BlockSettings]:
    experts = partial(GptOssExperts, limit=config.swiglu_limit, alpha=config.swiglu_alpha)
    return [
        BlockSettings(
            attention=attention_maker(config, bias=True, sinks=True, window=config.window_of(index)),
            feed_forward=partial(MoE, shape=config.moe, make_experts=experts, router_bias=True),
            norm=partial(RMSNorm, eps=config.norm_eps),
            hf_names={**ATTENTION_NAMES, **OWN_NAMES},
        )
        for index in range(config.num_layers)
    ]


class GptOssExperts(ExpertStack):
    """`weight * (down_e(act(gate_up_e(row) + bias_e)) + bias_e)` for each row of expert e.

    Stacks have inputs first, `[E, A, Z]`. Biases have no adapters.
    """

    adaptable = ("gate_up", "down")
    inputs_first = True
    undecayed = ("gate_up_bias", "down_bias")

    def __init__(self, hidden_size: int, num_experts: int, ffn_size: int, limit: float, alpha: float) -> None:
        super().__init__()
        self.ffn_size, self.limit, self.alpha = ffn_size, limit, alpha
        inward, outward = (num_experts, hidden_size, 2 * ffn_size), (num_experts, ffn_size, hidden_size)
        self.gate_up = nn.Parameter(torch.empty(inward, device="meta"))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * ffn_size, device="meta"))
        self.down = nn.Parameter(torch.empty(outward, device="meta"))
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size, device="meta"))

    def forward(self, rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        gate_up = keep("gate_up", self.product, "gate_up", rows, routes)  # [R, 2 F]
        experts = routes.experts
        product = ClampedSwiGLU.apply(gate_up, self.gate_up_bias, experts, weights, self.limit, self.alpha)
        mixed = keep("down", self.product, "down", product, routes)  # [R, F] -> [R, D]
        # The product holds the routing weight already; the bias still needs it.
        return WeightedBias.apply(mixed, self.down_bias, experts, weights)

    def activation_scratch_bytes(self, num_rows: int, element_bytes: int, device: str) -> int:
        """Count gate and up with their biases, clamped, and gradients; or columns of the biases' gradients in fp32."""
        at_once = elements_at_once(2 * self.ffn_size * num_rows, device)
        return max(6 * at_once * element_bytes, 2 * 4 * num_rows * min(BIAS_COLUMNS, 2 * self.ffn_size))


class ClampedSwiGLU(torch.autograd.Function):
    """`(up + 1) * gate * sigmoid(alpha gate) * weight` with gate <= limit and |up| <= limit.

    `gate_up [R, 2 F]`, with the `bias [E, 2 F]` of each row's expert added, has gates in its even channels and ups in the
    odd ones. `weights` is `[R]` fp32. Only the inputs are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor, limit: float, alpha: float
    ) -> Tensor:
        ctx.save_for_backward(gate_up, bias, experts, weights)
        ctx.limit, ctx.alpha = limit, alpha
        return in_slices(partial(_activate, bias, limit, alpha), gate_up, experts, weights)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, bias, experts, weights = ctx.saved_tensors
        differentiate = partial(_differentiate, bias, ctx.limit, ctx.alpha)
        grad_gate_up, grad_weights = in_slices(differentiate, gate_up, experts, weights, grads[0])
        grad_bias = _sum_by_expert(grad_gate_up, experts, len(bias)) if ctx.needs_input_grad[1] else None
        return grad_gate_up, grad_bias, None, grad_weights, None, None


def _activate(
    bias: Tensor, limit: float, alpha: float, gate_up: Tensor, experts: Tensor, weights: Tensor
) -> tuple[Tensor]:
    gate, up = _clamp(gate_up + F.embedding(experts, bias), limit)
    return ((gate * torch.sigmoid(alpha * gate)).mul_(up + 1).mul_(weights[:, None]),)


def _differentiate(
    bias: Tensor, limit: float, alpha: float, gate_up: Tensor, experts: Tensor, weights: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    gate_up = gate_up + F.embedding(experts, bias)
    gate, up = _clamp(gate_up, limit)
    up += 1
    open_share = torch.sigmoid(alpha * gate)
    active = gate * open_share
    grad_weights = (grad * active * up).sum(dim=-1, dtype=torch.float32)  # [R, F] -> [R]
    grad = grad * weights[:, None].to(gate_up.dtype)
    grad_gate = grad * up * (open_share + alpha * active * (1 - open_share))
    grad_gate_up = torch.stack((grad_gate, grad * active), dim=-1).flatten(-2)  # [R, F, 2] -> [R, 2 F]
    return grad_gate_up.mul_(_inside_clamp(gate_up, limit)), grad_weights


class WeightedBias(torch.autograd.Function):
    """`rows [R, D]` with the `bias [E, D]` of each row's expert added, times the row's weight (`weights [R]` fp32)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(bias, experts, weights)
        return in_slices(partial(_add_bias, bias), rows, experts, weights)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bias, experts, weights = ctx.saved_tensors
        (grad_weights,) = in_slices(partial(_along_bias, bias), grads[0], experts)
        grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_bias = _sum_by_expert(grads[0], experts, len(bias), weights)
        return grads[0], grad_bias, None, grad_weights


def _add_bias(bias: Tensor, rows: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor]:
    return (rows + F.embedding(experts, bias).mul_(weights[:, None]),)


def _along_bias(bias: Tensor, grad: Tensor, experts: Tensor) -> tuple[Tensor]:
    return ((grad * F.embedding(experts, bias)).sum(dim=-1, dtype=torch.float32),)  # [R, D] -> [R]


def _sum_by_expert(rows: Tensor, experts: Tensor, num_experts: int, weights: Tensor | None = None) -> Tensor:
    """Add up each expert's rows `[R, Z]`, times their `weights [R]` if given, in fp32, to `[E, Z]`."""
    sums = []
    for part in rows.split(BIAS_COLUMNS, dim=1):  # so that few of the rows are in fp32 at once
        wide = part.float() if weights is None else part.float() * weights[:, None]
        sums.append(lookup_gradient(wide, experts, num_experts))
    return torch.cat(sums, dim=1)


def _clamp(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]  # [R, F] each
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def _inside_clamp(gate_up: Tensor, limit: float) -> Tensor:
    """Mark where the clamp passes gradients, bool `[R, 2 F]`; gates have no lower limit."""
    within = gate_up <= limit
    within[..., 1::2] &= gate_up[..., 1::2] >= -limit
    return within


MODEL_TYPES = ("gpt_oss",)
# Keys of its files of which no other value is supported.
FIXED = {"hidden_act": "silu", "attention_bias": True, "attention_dropout": 0.0}
EXPERT_KEYS = {
    "num_experts": ("num_local_experts",),
    "num_chosen": ("num_experts_per_tok",),
    "ffn_size": ("intermediate_size",),
}


def config_from_hf(content: Mapping[str, Any]) -> GptOssConfig:
    hf = HFConfig(content, MODEL_TYPES, **FIXED)
    fields = hf.transformer_fields()
    hf.expect("layer_types", _layer_types(fields["num_layers"]))
    return GptOssConfig(
        rope=hf.rope(150000.0, "yarn"),
        moe=hf.mixture(EXPERT_KEYS),
        window=hf.get("sliding_window", int),
        swiglu_limit=hf.number("swiglu_limit", 7.0),
        swiglu_alpha=hf.number("swiglu_alpha", 1.702),
        **fields,
    )


def config_to_hf(config: GptOssConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": config.window,
        "layer_types": _layer_types(config.num_layers),
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
        **FIXED,
        **mixture_content(config.moe, EXPERT_KEYS),
        **transformer_content(config),
    }


def _layer_types(num_layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[index % 2] for index in range(num_layers)]


_ROPE = Rope(150000.0, YarnScaling(factor=32.0, original_positions=4096, truncate=False))


def _sized(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, moe: MoEShape) -> GptOssConfig:
    return GptOssConfig(layers, hidden, heads, kv_heads, 64, ffn, 201088, _ROPE, 131072, moe=moe, window=128)


# Vocabulary of 260: 256 bytes and 4 special tokens; the tokenizer's own size replaces it. 1.3 M parameters.
_DEBUG = replace(
    _sized(6, 128, 4, 2, 56, MoEShape(8, 2, 56, balance_coefficient=0.001)),
    head_dim=32,
    vocab_size=260,
    window=16,
)

FLAVORS: Mapping[str, GptOssConfig] = {
    "debug": _DEBUG,
    "20B": _sized(24, 2880, 64, 8, 2880, MoEShape(32, 4, 2880)),
    "120B": _sized(36, 2880, 64, 8, 2880, MoEShape(128, 4, 2880)),
}

GPT_OSS: Family[GptOssConfig] = Family(
    "gpt_oss", FLAVORS, config_from_hf, config_to_hf, block_settings, MODEL_TYPES, "20B"
)
