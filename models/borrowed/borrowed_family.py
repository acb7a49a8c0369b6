"""The family of all decoders of `transformers`: a config.json, and the layers that a model of it is cut into."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchround.layer import HFNames, LayeredModel
from torchround.models.borrowed.borrowed_layers import (
    BorrowedBlock,
    BorrowedEmbedding,
    BorrowedHead,
    BorrowedLayer,
)
from torchround.models.borrowed.construction import (
    Anatomy,
    Fit,
    build_on_meta,
    find_parts,
    fit_of,
    longest_sequence,
    read_config,
)
from torchround.models.borrowed.file_names import names_in_folder, saved_names
from torchround.models.borrowed.shell import MetBlock, Shell, StandInBody, beginning, with_modules
from torchround.models.common.config import ModelConfigError
from torchround.models.common.family import FolderNames

NAME = "transformers"


@dataclass(frozen=True)
class BorrowedConfig:
    """The `config.json` of a borrowed model as it is, and the sizes in it that the program asks for."""

    content: Mapping[str, Any] = field(repr=False)
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool

    @property
    def known_positions(self) -> int:
        """Longest document, in tokens, that the model was trained for, or that its scaled RoPE is made for."""
        return self.max_positions


@dataclass(frozen=True)
class CutModel:
    """A borrowed model as layers, and the name that each stored parameter has in the model of `transformers`."""

    whole: nn.Module
    layers: LayeredModel
    module_names: Mapping[str, str]


class BorrowedFamily:
    """Every decoder of the installed `transformers` that fits; has the methods of `Family`."""

    name = NAME
    flavors: Mapping[str, BorrowedConfig] = MappingProxyType({})
    # It reads every type that fits; a type that one of our own families reads runs faster there.
    hf_model_types: tuple[str, ...] = ()

    def config_from_hf(self, content: Mapping[str, Any]) -> BorrowedConfig:
        """Read the content of a `config.json`. Raises `ModelConfigError`."""
        config = read_config(content, warns=True)
        return BorrowedConfig(
            content=MappingProxyType(dict(content)),
            model_type=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_positions=getattr(config, "max_position_embeddings", None) or 2**40,
            tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        )

    def config_to_hf(self, config: BorrowedConfig) -> dict[str, Any]:
        """Return the `config.json` that the model came with."""
        return dict(config.content)

    def config_from_flavor(
        self, name: str, vocab_size: int | None = None, **overrides: Any
    ) -> BorrowedConfig:
        """Refuse: a borrowed model has no flavors."""
        raise ModelConfigError(f"{NAME} has no flavors; give model.hf_path, a folder with a config.json")

    def config_from_shape(
        self, shape: Mapping[str, Any], flavor: str | None = None, vocab_size: int | None = None
    ) -> BorrowedConfig:
        """Refuse: a borrowed model takes its sizes from its config.json alone."""
        raise ModelConfigError(
            f"{NAME} takes no shape of one's own; give model.hf_path, a folder with a config.json of the shape"
        )

    def build(self, config: BorrowedConfig) -> LayeredModel:
        """Build the layers on `meta`; only the constant buffers take memory. Raises `ModelConfigError`."""
        return self.cut(config).layers

    def cut(self, config: BorrowedConfig) -> CutModel:
        """Build the layers, beside the model that they were cut from. Raises `ModelConfigError`."""
        hf_config = read_config(config.content)
        model = build_on_meta(hf_config)
        parts = find_parts(model, hf_config)
        names = {parameter: name for name, parameter in model.named_parameters()}
        layers = _cut(
            parts, fit_of(parts, hf_config), model._init_weights, longest_sequence(hf_config, parts.body)
        )
        own: dict[str, str] = {}
        seen: set[nn.Parameter] = set()
        for layer_name, layer in zip(layers.names, layers.layers, strict=True):
            for path, parameter in layer.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    own[f"{layer_name}.{path}"] = names[parameter]
        lost = sorted(name for parameter, name in names.items() if parameter not in seen)
        if lost:
            raise ModelConfigError(
                f"model_type {config.model_type!r} of transformers has parameters that neither its blocks nor what is "
                f"before and after them use: {', '.join(lost[:5])}"
            )
        layers = replace(layers, own_dtypes=_kept_wide(model, own))
        return CutModel(model, layers, MappingProxyType(own))

    def module_names(self, config: BorrowedConfig) -> HFNames:
        """Map each stored parameter to its name in the model of `transformers`."""
        return dict(self.cut(config).module_names)

    def hf_names(self, config: BorrowedConfig) -> HFNames:
        """Map each stored parameter to the tensors that `save_pretrained` of transformers writes."""
        cut = self.cut(config)
        return saved_names(cut.whole, cut.module_names)

    def names_in_folder(self, config: BorrowedConfig, tensors: Collection[str]) -> FolderNames:
        """Map each stored parameter to those `tensors` of a folder that hold it. Raises `ModelConfigError`."""
        cut = self.cut(config)
        return names_in_folder(cut.whole, cut.module_names, tensors)


def _kept_wide(model: Any, own: Mapping[str, str]) -> dict[str, torch.dtype]:
    """Return the stored names of the parameters with which transformers computes in fp32 in every model."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    pattern = re.compile("|".join(rf"(?:^|\.){re.escape(part)}(?:$|\.)" for part in parts))
    return {stored: torch.float32 for stored, name in own.items() if parts and pattern.search(name)}


def _cut(parts: Anatomy, fit: Fit, initialiser: Any, longest: tuple[int, str] | None) -> LayeredModel:
    shell = Shell(parts.body, parts.blocks, fit.entries)
    shell.longest = longest
    calls: list[MetBlock] = []
    start = beginning(parts.body, parts.blocks, fit.before, calls, fit.entries)
    layers: list[BorrowedLayer] = [BorrowedEmbedding(start, shell, initialiser, calls)]
    for index, block in enumerate(parts.block_list):
        layers.append(BorrowedBlock(block, shell, initialiser, index, fit.entries[index], fit.alone[index]))
    tail = {name: parts.body.get_submodule(name) for name in fit.after}
    assert not tail.keys() & dict(parts.model.named_children()).keys(), (
        "names of the tail are free in the model"
    )
    outer = with_modules(parts.model, {parts.body_name: StandInBody(fit.output_class), **tail})
    layers.append(BorrowedHead(outer, shell, initialiser, fit.after, fit.projection))
    names = ("embedding", *(f"block.{index}" for index in range(len(layers) - 2)), "head")
    return LayeredModel(names, tuple(layers))


TRANSFORMERS = BorrowedFamily()
