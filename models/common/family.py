"""The interface of a model family to the rest of the program, and the reading of a Hugging Face `config.json`."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, TypeVar

from torchround.layer import HFNames, LayeredModel
from torchround.models.common.config import SIZES, ModelConfigError, TransformerConfig, unknown_name
from torchround.models.common.decoder import BlockSettings, assemble, decoder_names
from torchround.models.common.feed_forward import MoEShape

Config = TypeVar("Config", bound=TransformerConfig)

SHAPE_KEYS = (*SIZES, "max_positions", "rope_theta", "norm_eps", "tied_embeddings")
EXPERT_KEYS = ("num_experts", "num_chosen", "balance_coefficient")
NEEDED_SIZES = ("num_layers", "hidden_size", "num_heads", "ffn_size")


@dataclass(frozen=True)
class FolderNames:
    """The tensors of one folder: those that hold each stored parameter, and those that no parameter needs."""

    names: HFNames
    redundant: frozenset[str]


class KnownShape(Protocol):
    """The facts of any family's config that the program asks for."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def known_positions(self) -> int:
        """Longest document, in tokens, that the model was trained for, or that its scaled RoPE is made for."""
        ...


class ModelFamily(Protocol):
    """The methods that the program needs from a family, be it one of our own or the decoders of `transformers`.

    `Family` says what each returns. The methods raise `ModelConfigError`.
    """

    @property
    def name(self) -> str:
        """The value of `model.family`."""
        ...

    @property
    def flavors(self) -> Mapping[str, Any]:
        """Named sizes; none in a family whose models come from folders alone."""
        ...

    @property
    def hf_model_types(self) -> tuple[str, ...]:
        """The `model_type` of every `config.json` that the family reads; none in one that finds out by trying."""
        ...

    def build(self, config: Any) -> LayeredModel:
        """Build the layers on `meta`."""
        ...

    def hf_names(self, config: Any) -> HFNames:
        """Map each stored parameter to the tensors that an export writes."""
        ...

    def module_names(self, config: Any) -> HFNames:
        """Map each stored parameter to its name in the modules of `transformers`, which PEFT adapts."""
        ...

    def names_in_folder(self, config: Any, tensors: Collection[str]) -> FolderNames:
        """Map each stored parameter to its tensors in a folder that holds `tensors`."""
        ...

    def config_from_hf(self, content: Mapping[str, Any]) -> Any:
        """Read the content of a `config.json`."""
        ...

    def config_to_hf(self, config: Any) -> dict[str, Any]:
        """Return the content of a `config.json` that gives the same config back."""
        ...

    def config_from_flavor(self, name: str, vocab_size: int | None = None, **overrides: Any) -> Any:
        """Return the config of a named size."""
        ...

    def config_from_shape(
        self, shape: Mapping[str, Any], flavor: str | None = None, vocab_size: int | None = None
    ) -> Any:
        """Return the config of a shape of one's own."""
        ...


@dataclass(frozen=True)
class Family(Generic[Config]):
    """A model family: its sizes, and functions from a config to layers and to Hugging Face names and back.

    - `flavors`: published sizes by name.
    - `config_from_hf`: the config from the content of a Hugging Face `config.json`; raises `ModelConfigError`.
    - `config_to_hf`: a `config.json` that gives the same config back.
    - `usual`: the flavor whose settings complete a shape of one's own.
    - `blocks`: the settings of each block of a config.
    - `hf_model_types`: the `model_type` of every `config.json` that the family reads.
    """

    name: str
    flavors: Mapping[str, Config]
    config_from_hf: Callable[[Mapping[str, Any]], Config]
    config_to_hf: Callable[[Config], dict[str, Any]]
    blocks: Callable[[Config], Sequence[BlockSettings]]
    hf_model_types: tuple[str, ...]
    usual: str

    def build(self, config: Config) -> LayeredModel:
        """Build the layers on `meta`: no memory."""
        return assemble(config, self.blocks(config))

    def hf_names(self, config: Config) -> HFNames:
        """Map each stored parameter to the tensors of Hugging Face files (MXFP4 files: once dequantised)."""
        return decoder_names(config, self.blocks(config))

    def module_names(self, config: Config) -> HFNames:
        """Map each stored parameter to its name in the modules of `transformers`, which PEFT adapts; here the files' name."""
        return self.hf_names(config)

    def names_in_folder(self, config: Config, tensors: Collection[str]) -> FolderNames:
        """Map each stored parameter to its tensors in a folder that holds `tensors`; here all folders have one form."""
        return FolderNames(self.hf_names(config), self.hf_redundant(config))

    def config_from_flavor(self, name: str, vocab_size: int | None = None, **overrides: Any) -> Config:
        """Return a flavor's config with the tokenizer's vocabulary size and any other fields replaced."""
        if name not in self.flavors:
            raise unknown_name(f"{self.name} flavor", name, self.flavors)
        if vocab_size is not None:
            overrides["vocab_size"] = vocab_size
        try:
            return replace(self.flavors[name], **overrides)
        except TypeError as error:
            raise ModelConfigError(f"{self.name} config: {error}") from None

    def config_from_shape(
        self, shape: Mapping[str, Any], flavor: str | None = None, vocab_size: int | None = None
    ) -> Config:
        """Return the config of a flavor with `shape` in it, or of `shape` alone.

        The keys are those of `TransformerConfig` but `rope`, and `rope_theta`; in a family with experts `num_experts`,
        `num_chosen` and `balance_coefficient`; `window` in a family that has one. `vocab_size` is the tokenizer's, used
        if the shape gives none. Raises `ModelConfigError`.
        """
        base = self.config_from_flavor(self.usual if flavor is None else flavor)
        own = [item.name for item in fields(base)]
        legal = [
            *SHAPE_KEYS,
            *(EXPERT_KEYS if "moe" in own else ()),
            *(["window"] if "window" in own else ()),
        ]
        if unknown := [key for key in shape if key not in legal]:
            raise ModelConfigError(f"{self.name} has no {', '.join(unknown)}; legal: {', '.join(legal)}")
        changes = dict(shape)
        if vocab_size is not None and changes.setdefault("vocab_size", vocab_size) < vocab_size:
            raise ModelConfigError(
                f"vocab_size = {changes['vocab_size']}, but the tokenizer has {vocab_size} tokens"
            )
        if flavor is None:
            _complete(changes, base)
        if "rope_theta" in changes:
            changes["rope"] = replace(base.rope, theta=float(changes.pop("rope_theta")))
        if "moe" in own:
            changes["moe"] = _mixture(changes, getattr(base, "moe", None), flavor is not None)
        return replace(base, **changes)

    def hf_redundant(self, config: Config) -> frozenset[str]:
        """Name tensors that some files hold although no parameter needs them: a tied head, rotation tables."""
        blocks = (f"model.layers.{index}.self_attn." for index in range(config.num_layers))
        rotations = {f"{block}rotary_emb.inv_freq" for block in blocks}
        return frozenset(rotations | ({"lm_head.weight"} if config.tied_embeddings else set()))


def _complete(changes: dict[str, Any], usual: TransformerConfig) -> None:
    """Add the sizes that follow from others. Raises `ModelConfigError` for missing ones."""
    needed = (*NEEDED_SIZES, *(() if "vocab_size" in changes else ("vocab_size",)))
    if missing := [key for key in needed if key not in changes]:
        reason = " (there is no tokenizer to take it from)" if missing == ["vocab_size"] else ""
        raise ModelConfigError(
            f"missing: {', '.join(missing)}{reason}; or give model.flavor, which has all sizes"
        )
    changes.setdefault("num_kv_heads", changes["num_heads"])
    changes.setdefault("tied_embeddings", False)
    if "head_dim" not in changes:
        if changes["hidden_size"] % changes["num_heads"]:
            raise ModelConfigError(
                f"head_dim is missing, and hidden_size = {changes['hidden_size']} is not a multiple of "
                f"num_heads = {changes['num_heads']}"
            )
        changes["head_dim"] = changes["hidden_size"] // changes["num_heads"]


def _mixture(changes: dict[str, Any], base: MoEShape | None, keeps: bool) -> MoEShape | None:
    """Take the keys of experts out of `changes`. Returns the mixture, or None for a dense feed-forward.

    `keeps`: what is not given is as in `base`, the flavor's mixture. Otherwise `base` only says whether the family is
    one of mixtures alone.
    """
    given = {key: changes.pop(key) for key in EXPERT_KEYS if key in changes}
    if "ffn_size" in changes:
        given["ffn_size"] = changes["ffn_size"]
    if base is not None and keeps:
        return replace(base, **given)
    if base is None and not given.keys() & set(EXPERT_KEYS):
        return None
    if missing := [key for key in ("num_experts", "num_chosen", "ffn_size") if key not in given]:
        raise ModelConfigError(f"missing: {', '.join(missing)}: the model has experts")
    return MoEShape(**{"balance_coefficient": 0.001, **given})


class HFConfig:
    """A `config.json` read key by key: every value is checked, every message names the key and the value."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Return the value of `key`, of type `kind`. An absent or null key gives `default`; without one, an error."""
        value = self.content.get(key)
        if value is None:
            if default is ...:
                raise ModelConfigError(f"config.json has no {key!r}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelConfigError(f"config.json: {key} = {value!r} has the wrong type")
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelConfigError(f"config.json: {key} = {value!r} is not a finite number")
        return value

    def size(self, key: str, most: int = 2**24, default: Any = ...) -> int:
        """Return a count: at least 1, and at most `most`, a bound far above any real model."""
        value: int = self.get(key, int, default)
        if not 1 <= value <= most:
            raise ModelConfigError(f"config.json: {key} = {value!r}; legal: 1 to {most}")
        return value

    def expect(self, key: str, *legal: Any) -> None:
        """Refuse values other than `legal`; an absent key counts as the first of them."""
        value = self.content.get(key, legal[0])
        if value not in legal:
            wanted = " or ".join(repr(item) for item in legal)
            raise ModelConfigError(f"config.json: {key} = {value!r} is not supported, only {wanted}")

    def rope(self, *rope_types: str) -> "HFConfig":
        """Return the RoPE settings as one table: `rope_theta`, `rope_type` (one of `rope_types`) and its parameters.

        Current files hold them in `rope_parameters`; older ones in `rope_theta` and `rope_scaling`.
        """
        table = dict(self.get("rope_parameters", dict, None) or self.get("rope_scaling", dict, None) or {})
        table.setdefault("rope_theta", self.get("rope_theta", (int, float), None))
        table["rope_type"] = table.get("rope_type", table.get("type", "default"))
        settings = HFConfig(table)
        settings.expect("rope_type", *rope_types)
        return settings

    def balance_coefficient(self) -> float:
        """Return `router_aux_loss_coef` if the file turns that loss on, as `transformers` reads it; otherwise 0."""
        if not self.get("output_router_logits", bool, False):
            return 0.0
        return float(self.get("router_aux_loss_coef", (int, float)))

    def transformer_fields(self) -> dict[str, Any]:
        """Return the fields of `TransformerConfig` that all families name alike; RoPE is left to the family."""
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
    """Return the keys that `HFConfig.transformer_fields` reads, and the others that `transformers` needs."""
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
    """Return the keys that `HFConfig.balance_coefficient` reads."""
    return {
        "output_router_logits": moe.balance_coefficient > 0,
        "router_aux_loss_coef": moe.balance_coefficient or 0.001,
    }
