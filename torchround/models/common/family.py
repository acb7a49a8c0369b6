"""What a model family offers to the rest of the program, as one table of functions."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torchround.layer import LayeredModel
from torchround.models.common.config import ModelConfigError, TransformerConfig, unknown_name
from torchround.models.common.moe import MoEShape

# The tensor of a Hugging Face file that holds a parameter, or several, to be stacked along a new first dimension
# (one tensor for each expert).
HFTensors = str | tuple[str, ...]
# `"<layer>.<parameter>"`, as the host store names it, to its tensors.
HFNames = dict[str, HFTensors]

Config = TypeVar("Config", bound=TransformerConfig)


@dataclass(frozen=True)
class Family(Generic[Config]):
    """A family's public face.

    `flavors`: published sizes by name. `config_from_hf`: from the content of a Hugging Face `config.json`;
    raises `ModelConfigError`. `build`: the layers, on `meta`. `hf_names`: where Hugging Face files hold each
    stored parameter (a tied head is stored in the embedding). `config_to_hf`: a `config.json` that gives the same
    config back. `hf_model_types`: the `model_type` of every `config.json` that the family reads.
    """

    name: str
    flavors: Mapping[str, Config]
    config_from_hf: Callable[[Mapping[str, Any]], Config]
    build: Callable[[Config], LayeredModel]
    hf_names: Callable[[Config], HFNames]
    config_to_hf: Callable[[Config], dict[str, Any]]
    hf_model_types: tuple[str, ...]

    def config_from_flavor(self, name: str, vocab_size: int | None = None, **overrides: Any) -> Config:
        """A flavor's config, with the tokenizer's vocabulary size and any other field put in its place."""
        if name not in self.flavors:
            raise unknown_name(f"{self.name} flavor", name, self.flavors)
        if vocab_size is not None:
            overrides["vocab_size"] = vocab_size
        try:
            return replace(self.flavors[name], **overrides)
        except TypeError as error:
            raise ModelConfigError(f"{self.name} config: {error}") from None

    def hf_redundant(self, config: Config) -> frozenset[str]:
        """Tensors that some files hold though nothing is stored in them: a tied head, tables of rotations."""
        blocks = (f"model.layers.{index}.self_attn." for index in range(config.num_layers))
        rotations = {f"{block}rotary_emb.inv_freq" for block in blocks}
        return frozenset(rotations | ({"lm_head.weight"} if config.tied_embeddings else set()))


# Reading a Hugging Face `config.json`: every value checked, every refusal with the key and the value.


class HFConfig:
    """A `config.json` read key by key, with messages that name the key and the value."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value of `key`, of type `kind`. Absent or null gives `default`; without one, an error."""
        value = self.content.get(key)
        if value is None:
            if default is ...:
                raise ModelConfigError(f"config.json has no {key!r}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelConfigError(f"config.json: {key} = {value!r} has the wrong type")
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelConfigError(f"config.json: {key} = {value!r} is no number to compute with")
        return value

    def size(self, key: str, most: int = 2**24, default: Any = ...) -> int:
        """A number of things: at least 1, and no more than `most`, which no model comes near."""
        value: int = self.get(key, int, default)
        if not 1 <= value <= most:
            raise ModelConfigError(f"config.json: {key} = {value!r}; legal: 1 to {most}")
        return value

    def expect(self, key: str, *legal: Any) -> None:
        """Refuse values other than `legal`; an absent key counts as the first."""
        value = self.content.get(key, legal[0])
        if value not in legal:
            wanted = " or ".join(repr(item) for item in legal)
            raise ModelConfigError(f"config.json: {key} = {value!r} is not supported, only {wanted}")

    def rope(self, *rope_types: str) -> "HFConfig":
        """The RoPE settings as one table: `rope_theta`, `rope_type` (of `rope_types`) and its parameters.

        Current files hold them in `rope_parameters`; older ones in `rope_theta` and `rope_scaling`.
        """
        table = dict(self.get("rope_parameters", dict, None) or self.get("rope_scaling", dict, None) or {})
        table.setdefault("rope_theta", self.get("rope_theta", (int, float), None))
        table["rope_type"] = table.get("rope_type", table.get("type", "default"))
        settings = HFConfig(table)
        settings.expect("rope_type", *rope_types)
        return settings

    def balance_coefficient(self) -> float:
        """`router_aux_loss_coef` where the file asks for that loss, as `transformers` reads it; else 0."""
        if not self.get("output_router_logits", bool, False):
            return 0.0
        return float(self.get("router_aux_loss_coef", (int, float)))

    def transformer_fields(self) -> dict[str, Any]:
        """The fields of `TransformerConfig` that every family names alike; RoPE is left to the family."""
        self.expect("attention_dropout", 0.0)
        num_heads, hidden_size = self.size("num_attention_heads"), self.size("hidden_size")
        return {
            "num_layers": self.size("num_hidden_layers", most=10_000),
            "hidden_size": hidden_size,
            "num_heads": num_heads,
            "num_kv_heads": self.size("num_key_value_heads", default=num_heads),
            "head_dim": self.size("head_dim", default=hidden_size // num_heads),
            "ffn_size": self.size("intermediate_size"),
            "vocab_size": self.size("vocab_size"),
            "max_positions": self.size("max_position_embeddings", most=2**40),
            "norm_eps": float(self.get("rms_norm_eps", (int, float))),
            "tied_embeddings": self.get("tie_word_embeddings", bool, False),
        }


def transformer_content(config: TransformerConfig) -> dict[str, Any]:
    """What `HFConfig.transformer_fields` reads, and what `transformers` needs besides."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


def balance_content(moe: MoEShape) -> dict[str, Any]:
    """What `HFConfig.balance_coefficient` reads."""
    return {
        "output_router_logits": moe.balance_coefficient > 0,
        "router_aux_loss_coef": moe.balance_coefficient or 0.001,
    }
