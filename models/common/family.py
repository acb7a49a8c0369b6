"""The interface of a model family to the rest of the program, and the form of a Hugging Face `config.json`."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Generic, TypeVar

from torchround.layer import HFNames, LayeredModel
from torchround.models.common.config import SIZES, ModelConfigError, TransformerConfig
from torchround.models.common.decoder import BlockSettings, assemble, decoder_names
from torchround.models.common.feed_forward import MoEShape
from torchround.models.common.rope import Llama3Scaling, Rope, YarnScaling

Config = TypeVar("Config", bound=TransformerConfig)

SHAPE_KEYS = (*SIZES, "max_positions", "rope_theta", "norm_eps", "tied_embeddings")
EXPERT_KEYS = ("num_experts", "num_chosen", "balance_coefficient")
NEEDED_SIZES = ("num_layers", "hidden_size", "num_heads", "ffn_size")

# The fields of `TransformerConfig` that a `config.json` names alike in all families, with their keys there.
HF_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
MOST = {"num_layers": 10_000, "max_positions": 2**40}
# Scalings of RoPE by their `rope_type`.
SCALINGS: Mapping[str, type[Llama3Scaling] | type[YarnScaling]] = {
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
# The key of one field of theirs has another name in a file.
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class FolderNames:
    """The tensors of one folder: those that hold each stored parameter, and those that no parameter needs.

    An export leaves out `redundant` ones and copies `carried` ones, which other programs use.
    """

    names: HFNames
    redundant: frozenset[str]
    carried: frozenset[str] = frozenset()


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
        return assemble(config, self.blocks(config))

    def hf_names(self, config: Config) -> HFNames:
        """Map each stored parameter to the tensors of Hugging Face files (MXFP4 files: once dequantised)."""
        return decoder_names(config, self.blocks(config))

    def module_names(self, config: Config) -> HFNames:
        """Map each stored parameter to its name in the modules of `transformers`, which PEFT adapts; here the files' name."""
        return self.hf_names(config)

    def names_in_folder(self, config: Config, tensors: Collection[str]) -> FolderNames:
        """Map each stored parameter to its tensors in a folder that holds `tensors`; here all folders have one form."""
        # Some files hold tensors that no parameter needs: a tied head, rotation tables.
        redundant = {
            f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(config.num_layers)
        }
        redundant |= {"lm_head.weight"} if config.tied_embeddings else set()
        return FolderNames(self.hf_names(config), frozenset(redundant))

    def config_from_flavor(self, name: str, vocab_size: int | None = None, **overrides: Any) -> Config:
        if name not in self.flavors:
            raise ModelConfigError(
                f"unknown {self.name} flavor {name!r}; known: {', '.join(sorted(self.flavors))}"
            )
        if vocab_size is not None:
            overrides["vocab_size"] = vocab_size
        return replace(self.flavors[name], **overrides)

    def config_from_shape(
        self, shape: Mapping[str, Any], flavor: str | None = None, vocab_size: int | None = None
    ) -> Config:
        """Make the config of a flavor with `shape` in it, or of `shape` alone.

        The keys are those of `TransformerConfig` but `rope`, and `rope_theta`; in a family with experts `num_experts`,
        `num_chosen` and `balance_coefficient`; `window` in a family that has one. `vocab_size` is the tokenizer's, used
        if the shape gives none. Raises `ModelConfigError`.
        """
        base = self.config_from_flavor(self.usual if flavor is None else flavor)
        own = [item.name for item in fields(base)]
        legal = [*SHAPE_KEYS, *(EXPERT_KEYS if "moe" in own else ()), *({"window"} & set(own))]
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
    """A `config.json` read key by key: every value is checked, every message names the key and the value.

    Values other than `fixed` are refused; a file may leave their keys out.
    """

    def __init__(self, content: Mapping[str, Any], model_types: Sequence[str], **fixed: Any) -> None:
        self.content = content
        if model_types:
            self.expect("model_type", *model_types)
        for key, value in fixed.items():
            self.expect(key, value)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Read the value of `key`, of type `kind`. An absent or null key gives `default`; without one, an error."""
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

    def number(self, key: str, default: Any = ...) -> float:
        return float(self.get(key, (int, float), default))

    def expect(self, key: str, *legal: Any) -> None:
        """Refuse values other than `legal`. A file may leave the key out."""
        value = self.content.get(key)
        if value is not None and value not in legal:
            wanted = " or ".join(repr(item) for item in legal)
            raise ModelConfigError(f"config.json: {key} = {value!r} is not supported, only {wanted}")

    def rope(self, usual_theta: float, *rope_types: str) -> Rope:
        """Read the RoPE settings, whose `rope_type` has to be one of `rope_types`.

        Current files hold them in `rope_parameters`; older ones in `rope_theta` and `rope_scaling`.
        """
        table = dict(self.get("rope_parameters", dict, None) or self.get("rope_scaling", dict, None) or {})
        table.setdefault("rope_theta", self.get("rope_theta", (int, float), None))
        table["rope_type"] = table.get("rope_type") or table.get("type") or "default"
        hf = HFConfig(table, (), mscale=None, mscale_all_dim=None)
        hf.expect("rope_type", *rope_types)
        theta = hf.number("rope_theta", usual_theta)
        scaling = SCALINGS.get(table["rope_type"])
        if scaling is None:
            return Rope(theta)
        found: dict[str, Any] = {"factor": hf.number("factor"), "original_positions": hf.get(ORIGINAL, int)}
        for item in fields(scaling):
            if item.name not in found:
                kind = bool if item.name == "truncate" else (int, float)
                value = hf.get(item.name, kind, item.default)
                found[item.name] = float(value) if isinstance(item.default, float) else value
        return Rope(theta, scaling(**found))

    def mixture(self, keys: Mapping[str, Sequence[str]], **settings: Any) -> MoEShape:
        """Read the mixture. `keys` are a family's keys for fields of `MoEShape`, the one that is written first.

        The balance loss is on if the file turns it on, as `transformers` reads it.
        """
        for name, legal in keys.items():
            given = [key for key in legal if self.content.get(key) is not None]
            settings[name] = self.get(given[-1] if given else legal[0], int)
        is_balanced = self.get("output_router_logits", bool, False)
        settings["balance_coefficient"] = self.number("router_aux_loss_coef") if is_balanced else 0.0
        return MoEShape(**settings)

    def transformer_fields(self) -> dict[str, Any]:
        """Read the fields of `TransformerConfig` but `rope`."""
        found = {"norm_eps": self.number("rms_norm_eps")}
        found["tied_embeddings"] = self.get("tie_word_embeddings", bool, False)
        for name in (*SIZES, "max_positions"):
            usual: Any = ...
            if name == "num_kv_heads":
                usual = found["num_heads"]
            elif name == "head_dim":
                usual = found["hidden_size"] // found["num_heads"]
            # Bounds far above any real model.
            value, most = self.get(HF_KEYS[name], int, usual), MOST.get(name, 2**24)
            if not 1 <= value <= most:
                raise ModelConfigError(f"config.json: {HF_KEYS[name]} = {value!r}; legal: 1 to {most}")
            found[name] = value
        return found


def transformer_content(config: TransformerConfig) -> dict[str, Any]:
    """Write the keys that `HFConfig.transformer_fields` and `HFConfig.rope` read."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if (scaling := config.rope.scaling) is not None:
        rope["rope_type"] = next(name for name, kind in SCALINGS.items() if isinstance(scaling, kind))
        rope |= {key: value for key, value in asdict(scaling).items() if value is not None}
        rope[ORIGINAL] = rope.pop("original_positions")
    return {**{key: getattr(config, name) for name, key in HF_KEYS.items()}, "rope_parameters": rope}


def mixture_content(moe: MoEShape, keys: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Write the keys that `HFConfig.mixture` reads."""
    return {
        **{legal[0]: getattr(moe, name) for name, legal in keys.items()},
        "output_router_logits": moe.balance_coefficient > 0,
        "router_aux_loss_coef": moe.balance_coefficient or 0.001,
    }
