"""The family of all decoders of `transformers`: a config.json, the layers that a model is cut into, and its names in files."""

import logging
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchround.layer import HFNames, HFTensors, LayeredModel
from torchround.models.borrowed.borrowed_layers import (
    BorrowedBlock,
    BorrowedEmbedding,
    BorrowedHead,
    BorrowedLayer,
)
from torchround.models.borrowed.construction import (
    build_whole,
    names_in_whole,
    read_config,
    refuse,
    take_apart,
)
from torchround.models.common.config import ModelConfigError
from torchround.models.common.family import FolderNames

logger = logging.getLogger(__name__)

NAME = "transformers"


@dataclass(frozen=True)
class BorrowedConfig:
    """The `config.json` of a borrowed model, and facts of it for the program. `known_positions` as in `TransformerConfig`."""

    content: Mapping[str, Any] = field(repr=False)
    vocab_size: int
    known_positions: int


@dataclass(frozen=True)
class CutModel:
    """A borrowed model as layers, the whole model of `transformers`, and the names of its parameters."""

    whole: nn.Module
    layers: LayeredModel
    names: "ReleasedNames"


class BorrowedFamily:
    """Every decoder of the installed `transformers` that fits; has the methods of `Family`."""

    name = NAME
    flavors: Mapping[str, BorrowedConfig] = MappingProxyType({})
    # It reads every type that fits; a type that one of our own families reads runs faster there.
    hf_model_types: tuple[str, ...] = ()
    # Of the config that was cut last: to cut a model again takes its checks again.
    _latest: "tuple[BorrowedConfig, ReleasedNames] | None" = None

    def config_from_hf(self, content: Mapping[str, Any]) -> BorrowedConfig:
        """Read the content of a `config.json`. Raises `ModelConfigError`."""
        config = read_config(content).get_text_config()
        if content.get("output_router_logits"):
            logger.warning(
                "config.json turns the balance loss of the router on (output_router_logits): a model of family "
                '"transformers" trains without it; a family of torchround has it (family = "qwen3", "gpt_oss")'
            )
        return BorrowedConfig(
            content=MappingProxyType(dict(content)),
            vocab_size=config.vocab_size,
            known_positions=getattr(config, "max_position_embeddings", None) or 2**40,
        )

    def config_to_hf(self, config: BorrowedConfig) -> dict[str, Any]:
        return dict(config.content)

    def config_from_flavor(self, *_: Any, **__: Any) -> BorrowedConfig:
        raise ModelConfigError(
            f"{NAME} has no sizes of its own; give model.hf_path, a folder with a config.json"
        )

    config_from_shape = config_from_flavor

    def build(self, config: BorrowedConfig) -> LayeredModel:
        return self.cut(config).layers

    def cut(self, config: BorrowedConfig) -> CutModel:
        """Build the layers, beside the model that they were cut from. Raises `ModelConfigError`."""
        release, whole = read_config(config.content), None
        hf_config = release.get_text_config()
        if release is not hf_config:
            whole = build_whole(release)
            head = whole.get_output_embeddings()
            is_tied = head is not None and head.weight is whole.get_input_embeddings().weight
            hf_config.tie_word_embeddings = is_tied
        anatomy = take_apart(hf_config)
        model = anatomy.model
        names = {parameter: name for name, parameter in model.named_parameters()}
        layers: dict[str, BorrowedLayer] = {"embedding": BorrowedEmbedding(anatomy)}
        for index in range(anatomy.shell.num_blocks):
            layers[f"block.{index}"] = BorrowedBlock(anatomy, index)
        layers["head"] = BorrowedHead(anatomy)
        own: dict[str, str] = {}
        for layer_name, layer in layers.items():
            for path, parameter in layer.named_parameters():
                if parameter in names:  # the first layer of a tied one stores it
                    own[f"{layer_name}.{path}"] = names.pop(parameter)
        if names:
            unused = ", ".join(sorted(names.values())[:5])
            reason = f"neither its blocks nor what is before and after them use its parameters {unused}"
            raise refuse(hf_config.model_type, reason)
        wide = _kept_wide(model, own)
        cut = LayeredModel(tuple(layers), tuple(layers.values()), own_dtypes=wide)
        if whole is None:
            names_of_all = ReleasedNames(model, own)
        else:
            places = names_in_whole(whole, anatomy)
            others = frozenset(whole.state_dict().keys() - places.values())
            names_of_all = ReleasedNames(
                whole, {stored: places[name] for stored, name in own.items()}, others
            )
        self._latest = config, names_of_all
        return CutModel(model if whole is None else whole, cut, names_of_all)

    def _names(self, config: BorrowedConfig) -> "ReleasedNames":
        if self._latest is not None and self._latest[0] == config:
            return self._latest[1]
        return self.cut(config).names

    def module_names(self, config: BorrowedConfig) -> HFNames:
        """Map each stored parameter to its name in the model of `transformers`."""
        return dict(self._names(config).own)

    # Files may hold a parameter in parts (`names_in_folder`).
    hf_names = module_names

    def names_in_folder(self, config: BorrowedConfig, tensors: Collection[str]) -> FolderNames:
        return self._names(config).in_folder(tensors)


def _kept_wide(model: Any, own: Mapping[str, str]) -> dict[str, torch.dtype]:
    """Name the stored parameters with which transformers computes in fp32 in every model."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    pattern = re.compile("|".join(rf"(?:^|\.){re.escape(part)}(?:$|\.)" for part in parts))
    return {stored: torch.float32 for stored, name in own.items() if parts and pattern.search(name)}


# The joins that are read in place: operation and dimension, in the order in which the loader applies them.
STACK = (("MergeModulelist", 0),)
STACK_OF_JOINS = (("MergeModulelist", 0), ("Concatenate", 1))


# A tensor of a file, and the pattern of the converter that it matched, if it needs one.
Source = tuple[str, str | None]


class ReleasedNames:
    """The names of a borrowed model's parameters in files, by the conversion tables of `transformers`.

    Files name and cut tensors as they did when a family was first released: experts one by one, gate and up apart. The
    modules of `transformers` have moved on since. Its loader renames and joins tensors by a table of each family. The same
    tables are read here, so files old and new are read in place, and an export has the names of its base's files. Two kinds of
    joins can be read in place: experts that are stacked (`MergeModulelist`), and stacked pairs that are joined along their
    rows (`Concatenate`). A family that needs another kind is refused by name.

    `model` is the whole model of `transformers` on `meta`, which may change afterwards. `own` maps stored names to the
    model's own. `others` are its names of what is not trained: a tower of pictures or sound.
    """

    def __init__(self, model: Any, own: Mapping[str, str], others: Collection[str] = ()) -> None:
        from transformers import conversion_mapping, core_model_loading

        self.own, self.others = own, others
        transforms = conversion_mapping.get_model_conversion_mapping(model)
        self._converters = [one for one in transforms if isinstance(one, core_model_loading.WeightConverter)]
        self._by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        self._renamings = [one for one in transforms if isinstance(one, core_model_loading.WeightRenaming)]
        self._known, self._prefix = model.state_dict(), model.base_model_prefix
        self._tied = set(getattr(model, "all_tied_weights_keys", {})) - set(own.values())
        self._unexpected = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        # Constant tables in old files that no parameter needs and the loader of `transformers` drops.
        tables = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
        buffers = [name for name, _ in model.named_buffers()]
        self._tables = [
            pattern for end, pattern in tables.items() if any(name.endswith(end) for name in buffers)
        ]

    def in_folder(self, tensors: Collection[str]) -> FolderNames:
        """Map each stored parameter to the `tensors` of a folder that hold it, as the loader of `transformers` would.

        A parameter that the folder lacks keeps the model's own name. Tensors of `others`, and those that the model's class
        tells the loader to leave out (heads for several tokens), are carried. Copies of a tied parameter and tables of
        rotations are redundant. Raises `ModelConfigError` for a join that is not read in place.
        """
        found, left = self._sources(tensors)
        names = {
            stored: self._names_of(name, found.get(name, [])) or name for stored, name in self.own.items()
        }
        copies = {source for name in self._tied for source, _ in found.get(name, [])}
        carried = {source for name in self.others for source, _ in found.get(name, [])} - copies
        carried |= _matching(self._unexpected, left)
        return FolderNames(
            names, frozenset(copies | _matching(self._tables, left) - carried), frozenset(carried)
        )

    def _sources(self, tensors: Collection[str]) -> tuple[dict[str, list[Source]], set[str]]:
        """Sort tensors by the parameter that each belongs to. The others are returned too."""
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        known, prefix = self._known, self._prefix
        found: dict[str, list[Source]] = defaultdict(list)
        left = set()
        # Experts must come in the order of their numbers.
        for tensor in sorted(tensors, key=dot_natural_key):
            name, pattern = rename_source_key(tensor, self._renamings, self._converters, prefix, known)
            if name not in known and tensor in known:
                # A file of a newer release holds the model's own name, which a rule for older ones has changed.
                name, pattern = rename_source_key(tensor, [], [], prefix, known)
            if name in known:
                found[name].append((tensor, pattern))
            else:
                left.add(tensor)
        return found, left

    def _names_of(self, name: str, sources: Sequence[Source]) -> HFTensors | None:
        """Find the tensors of one parameter in the form in which they are joined; None if some are missing."""
        if not sources:
            return None
        first, matched = sources[0]
        if matched is None:
            return first
        converter = self._by_pattern[matched]
        kind = tuple(_kind(operation) for operation in converter.operations)
        if kind not in (STACK, STACK_OF_JOINS):
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            raise ModelConfigError(
                f"the files hold {name} as {first} and {len(sources) - 1} more, to be joined by {operations}, which torchround does not do "
                "while it reads; legal: what transformers makes of the folder with "
                "AutoModelForCausalLM.from_pretrained(..).save_pretrained(NEW_FOLDER, save_original_format=False)"
            )
        by_pattern = {
            pattern: [source for source, its_pattern in sources if its_pattern == pattern]
            for pattern in converter.source_patterns
        }
        num_experts = self._known[name].shape[0]
        if any(len(some) != num_experts for some in by_pattern.values()):
            return None
        # One entry for each expert: its tensor, or its gate and its up.
        entries = tuple(zip(*by_pattern.values(), strict=True))
        return entries if len(by_pattern) > 1 else tuple(name for (name,) in entries)


def _kind(operation: Any) -> tuple[str, Any]:
    is_sharded = getattr(operation, "num_shards_attribute", None) is not None
    return type(operation).__name__, None if is_sharded else getattr(operation, "dim", None)


def _matching(patterns: Collection[str], tensors: Collection[str]) -> set[str]:
    return {tensor for tensor in tensors if any(re.search(pattern, tensor) for pattern in patterns)}


TRANSFORMERS = BorrowedFamily()
