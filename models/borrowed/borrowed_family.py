"""The family of all decoders of `transformers`: a config.json, and the layers that a model of it is cut into."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchround.layer import HFNames, LayeredModel
from torchround.models.borrowed.borrowed_experts import let_adapt
from torchround.models.borrowed.borrowed_layers import (
    BorrowedBlock,
    BorrowedEmbedding,
    BorrowedHead,
    BorrowedLayer,
)
from torchround.models.borrowed.construction import (
    build_whole,
    is_tied,
    longest_sequence,
    names_in_whole,
    read_config,
    refuse,
    take_apart,
)
from torchround.models.borrowed.file_names import names_in_folder
from torchround.models.borrowed.shell import Shell
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
    """A borrowed model as layers, and the whole model of `transformers` with the name of each stored parameter there.

    `others` are the names there that no layer has: a tower of pictures or sound.
    """

    whole: nn.Module
    layers: LayeredModel
    module_names: Mapping[str, str]
    others: frozenset[str]


class BorrowedFamily:
    """Every decoder of the installed `transformers` that fits; has the methods of `Family`."""

    name = NAME
    flavors: Mapping[str, BorrowedConfig] = MappingProxyType({})
    # It reads every type that fits; a type that one of our own families reads runs faster there.
    hf_model_types: tuple[str, ...] = ()

    def config_from_hf(self, content: Mapping[str, Any]) -> BorrowedConfig:
        """Read the content of a `config.json`. Raises `ModelConfigError`."""
        config = read_config(content).text
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
        read = read_config(config.content)
        hf_config, whole = read.text, None
        if read.whole is not hf_config:
            whole = build_whole(read.whole)
            hf_config.tie_word_embeddings = is_tied(whole)
        anatomy = take_apart(hf_config)
        model: Any = anatomy.model
        let_adapt(model)
        names = {parameter: name for name, parameter in model.named_parameters()}
        shell = Shell(anatomy.body, anatomy.blocks, anatomy.entries, anatomy.places)
        shell.longest = longest_sequence(hf_config, anatomy.body)
        common = anatomy, shell, model._init_weights
        layers: dict[str, BorrowedLayer] = {"embedding": BorrowedEmbedding(*common)}
        for index in range(shell.num_blocks):
            layers[f"block.{index}"] = BorrowedBlock(*common, index)
        layers["head"] = BorrowedHead(*common)
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
            return CutModel(model, cut, MappingProxyType(own), frozenset())
        places = names_in_whole(whole, anatomy)
        own = {stored: places[name] for stored, name in own.items()}
        others = frozenset(whole.state_dict().keys() - places.values())
        return CutModel(whole, cut, MappingProxyType(own), others)

    def module_names(self, config: BorrowedConfig) -> HFNames:
        """Map each stored parameter to its name in the model of `transformers`."""
        return dict(self.cut(config).module_names)

    def hf_names(self, config: BorrowedConfig) -> HFNames:
        """Map each stored parameter to a tensor of its own name. Files may hold it in parts (`names_in_folder`)."""
        return self.module_names(config)

    def names_in_folder(self, config: BorrowedConfig, tensors: Collection[str]) -> FolderNames:
        """Map each stored parameter to those `tensors` of a folder that hold it. Raises `ModelConfigError`."""
        cut = self.cut(config)
        return names_in_folder(cut.whole, cut.module_names, tensors, cut.others)


def _kept_wide(model: Any, own: Mapping[str, str]) -> dict[str, torch.dtype]:
    """Name the stored parameters with which transformers computes in fp32 in every model."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    pattern = re.compile("|".join(rf"(?:^|\.){re.escape(part)}(?:$|\.)" for part in parts))
    return {stored: torch.float32 for stored, name in own.items() if parts and pattern.search(name)}


TRANSFORMERS = BorrowedFamily()
