"""The model that a config asks for, and its pretrained weights: every command builds them here."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torchround.commands.released_folder import BORROWED, advise_on_borrowed, open_weights, released_config
from torchround.config import Config, LoraTable, Options, show
from torchround.hf import PretrainedWeights, read_adapters
from torchround.layer import FileTensor, LayeredModel
from torchround.models import (
    FAMILIES,
    KnownShape,
    LoraShape,
    ModelConfigError,
    ModelFamily,
    adapter_names,
    add_adapters,
)
from torchround.planning.memory import size_text
from torchround.run.numbers import DTYPES

logger = logging.getLogger(__name__)

Mapped = Mapping[str, Sequence[FileTensor]]
"""Frozen weights that stay in the files they were released in (`lora.map_base`), by parameter name."""


def build_model(options: Options, vocab_size: int | None = None, *, warns: bool = True) -> LayeredModel:
    """Build the configured model on `meta`; with `lora.rank`, frozen and with adapters.

    `vocab_size` is the tokenizer's. Without one, the model keeps the vocabulary of its flavor, shape or folder. With
    `warns`, it says if documents may be longer than the model knows. Raises `ConfigError` or `ModelConfigError`.
    """
    family, config = model_config(options, vocab_size)
    if warns:
        warn_of_positions(options, config)
        advise_on_borrowed(options)
    model, lora = _built(options, family, config), options.config.lora
    if lora.rank:
        add_adapters(model, family.module_names(config), lora_shape(lora))
    return model


def _built(options: Options, family: ModelFamily, config: KnownShape) -> LayeredModel:
    """Build the layers. Raises `ConfigError` for a borrowed model that cannot be cut into layers."""
    if family.name != BORROWED:
        return family.build(config)
    try:
        return family.build(config)
    except ModelConfigError as error:
        raise options.error("model.hf_path", f"{options.config.model.hf_path}: {error}") from error


def flavors_of(family: str) -> list[str]:
    """Return the names of a family's flavors."""
    return list(FAMILIES[family].flavors)


def lora_shape(table: LoraTable) -> LoraShape:
    """Return the adapters that `[lora]` asks for."""
    return LoraShape(table.rank, table.alpha, table.dropout, tuple(table.targets))


def model_config(options: Options, vocab_size: int | None) -> tuple[ModelFamily, KnownShape]:
    """Return the family and its config: from a flavor, a shape, or the config.json of a Hugging Face folder."""
    table = options.config.model
    if table.family not in FAMILIES:
        raise options.unknown_name("model.family", table.family, FAMILIES)
    family = FAMILIES[table.family]
    _refuse_sizes(options, family)
    if table.flavor is not None and table.flavor not in family.flavors:
        raise options.unknown_name("model.flavor", table.flavor, family.flavors)
    if table.shape is not None:
        shape = table.shape.model_dump(exclude_none=True)
        if table.flavor is not None and (rows := _flavor_vocab(options, vocab_size)) is not None:
            shape.setdefault("vocab_size", rows)
        try:
            return family, family.config_from_shape(shape, table.flavor, vocab_size)
        except ModelConfigError as error:
            raise options.error("model.shape", str(error)) from error
    if table.flavor is not None:
        return family, family.config_from_flavor(table.flavor, vocab_size=_flavor_vocab(options, vocab_size))
    path, config = released_config(options, family)
    if vocab_size is not None and config.vocab_size < vocab_size:
        raise options.error(
            "tokenizer",
            f"it has {vocab_size} tokens, and the model of {path} only {config.vocab_size}; "
            "legal: a tokenizer with at most as many",
        )
    return family, config


def _refuse_sizes(options: Options, family: ModelFamily) -> None:
    """Raise `ConfigError` for a flavor or a shape in a family that takes all sizes from a folder."""
    table = options.config.model
    if family.flavors or table.hf_path is not None:
        return
    key = "model.shape" if table.flavor is None else "model.flavor"
    given = "a table" if table.flavor is None else show(table.flavor)
    raise options.error(
        key,
        f"given {given}, but model.family = {show(family.name)} has no sizes of its own; "
        "legal: model.hf_path, a folder with config.json and weights",
    )


def _flavor_vocab(options: Options, vocab_size: int | None) -> int | None:
    """Return the vocabulary of a flavor's model: its own, unless the tokenizer has more tokens.

    A smaller one leaves rows unused. It does not make a model of another size of the one that was asked for.
    Flavors called `debug` have no vocabulary of their own.
    """
    table = options.config.model
    assert table.flavor is not None, "only a flavor has a vocabulary of its own"
    if vocab_size is None or table.flavor.startswith("debug"):
        return vocab_size
    return max(vocab_size, FAMILIES[table.family].config_from_flavor(table.flavor).vocab_size)


def find_weights(options: Options, model: LayeredModel) -> tuple[PretrainedWeights | None, Mapped]:
    """Open the weights in the Hugging Face folder, and map the ones that stay in its files. A flavor or shape has none.

    Checks the headers of the files against the model. Raises `HFError`.
    """
    config = options.config
    if config.model.hf_path is None:
        return None, {}
    family, shape = model_config(options, None)  # the tokenizer was compared when the model was built
    folder = Path(os.path.expanduser(config.model.hf_path))
    shapes = model.stored_shapes()
    weights = open_weights(folder, family, shape, shapes)
    if config.lora.path is not None:
        names = adapter_names(model, family.module_names(shape))
        weights.adapters = read_adapters(config.lora, names, shapes)
    return weights, map_base(weights, model, config)


def check_weights(options: Options, vocab_size: int | None) -> None:
    """Check the headers of the pretrained files, so that a dry run refuses what the run would refuse.

    `vocab_size` as in `build_model`. Raises `ConfigError`, `ModelConfigError` or `HFError`.
    """
    find_weights(options, build_model(options, vocab_size, warns=False))


def map_base(weights: PretrainedWeights, model: LayeredModel, config: Config) -> Mapped:
    """Map the frozen weights that the files hold in the run's type, without reading them; none without `lora.map_base`."""
    if not config.lora.map_base:
        return {}
    frozen = {
        f"{name}.{path}"
        for name, layer in zip(model.names, model.layers, strict=True)
        for path, parameter in layer.named_parameters()
        if not parameter.requires_grad
    }
    # A tied parameter has a name in each of its layers, and is stored under one of them.
    return weights.map_tensors(sorted(frozen & model.stored_shapes().keys()), DTYPES[config.training.dtype])


def mapped_text(mapped: Mapped, model: LayeredModel, dtype: torch.dtype) -> str:
    """Say on one line how much of the frozen weights stays in files."""
    frozen = {p: p.numel() for layer in model.layers for p in layer.parameters() if not p.requires_grad}
    all_bytes = sum(frozen.values()) * dtype.itemsize
    mapped_bytes = sum(tensor.memory.nbytes for tensors in mapped.values() for tensor in tensors)
    # A parameter object is a key of `frozen`, so a tied one counts once.
    rest = "" if mapped_bytes == all_bytes else "; what files hold in another type is copied"
    return f"{size_text(mapped_bytes)} of {size_text(all_bytes)} of frozen weights stay in their files{rest}"


def warn_of_positions(options: Options, config: KnownShape) -> None:
    """Warn if documents may be longer than the model knows positions. RoPE has no limit of its own, so it is legal."""
    seq_len, known = options.config.training.seq_len, config.known_positions
    if seq_len <= known:
        return
    table = options.config.model
    logger.warning(
        "training.seq_len = %d, but %s knows only %d positions (max_position_embeddings, RoPE's scaling counted): of a "
        "longer document, the tokens after the first %d are at positions that it was not made for; "
        "--training.seq_len %d stays inside",
        *(seq_len, show(table.hf_path or table.flavor or table.family), known, known, known),
    )
