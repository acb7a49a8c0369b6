"""The model that a config asks for, and its weights in a Hugging Face folder or in a checkpoint.

Every command builds them here.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchround.checkpoint.manifest import STATE_FILE, read_manifest
from torchround.config import MODEL_FOLDER, Config, ConfigError, Options, show, users_module
from torchround.data import MissingTokenizerError, Tokenizer, TokenizerError, build_tokenizer
from torchround.engine.errors import EngineUsageError
from torchround.engine.store.bundles import RESIDUAL, WEIGHTS
from torchround.hf import HFError, PretrainedWeights, quantised_advice, quantised_kind, read_adapters
from torchround.hf.tensor_folder import StoredTensor, TensorFiles, read_folder, read_header, read_object
from torchround.layer import FileTensor, LayeredModel
from torchround.models import (
    FAMILIES,
    OWN_FAMILIES,
    LoraShape,
    ModelConfigError,
    ModelFamily,
    adapter_names,
    add_adapters,
)
from torchround.optim.split_weights import join
from torchround.planning.cards import UnknownPeakError
from torchround.planning.partition import PlanError
from torchround.planning.planner import InfeasiblePlanError
from torchround.run.numbers import DTYPES
from torchround.run.run_folder import RunError

logger = logging.getLogger(__name__)

BORROWED = "transformers"
"""The family whose modules `transformers` builds."""

MISTAKES = (
    *(ConfigError, ModelConfigError, TokenizerError, HFError, EngineUsageError),
    *(InfeasiblePlanError, PlanError, RunError, UnknownPeakError),
)
"""Errors of the user in what a config asks for. A command ends with exit code 2 and the message."""

Mapped = Mapping[str, Sequence[FileTensor]]
"""Frozen weights that stay in the files they were released in (`lora.map_base`), by parameter name."""


def find_tokenizer(options: Options) -> Tokenizer:
    """Build the tokenizer that the config names. Raises `TokenizerError`, or `ConfigError` if nothing is at its path."""
    try:
        return build_tokenizer(options.config.tokenizer, options.config.model.hf_path)
    except MissingTokenizerError as error:
        raise options.error(error.key, error.message) from error


def build_model(options: Options, vocab_size: int | None = None, *, warns: bool = True) -> LayeredModel:
    """Build the configured model on `meta`; with `lora.rank`, frozen and with adapters.

    `vocab_size` is the tokenizer's. Without one, the model keeps the vocabulary of its flavor, shape or folder. With
    `warns`, it says if documents may be longer than the model knows. Raises `ConfigError` or `ModelConfigError`.
    """
    family, config = model_config(options, vocab_size)
    if warns:
        warn_of_positions("training.seq_len", options.config.training.seq_len, config)
        if family.name == BORROWED:
            _advise_on_borrowed(options, config.content)
    try:
        model = family.build(config)
    except ModelConfigError as error:
        if family.name != BORROWED:
            raise
        # The modules of transformers cannot be cut into layers.
        raise options.error("model.hf_path", f"{options.config.model.hf_path}: {error}") from error
    lora = options.config.lora
    if lora.rank:
        shape = LoraShape(lora.rank, lora.alpha, lora.dropout, tuple(lora.targets))
        add_adapters(model, family.module_names(config), shape)
    return model


def known_families(module: str | None) -> Mapping[str, ModelFamily]:
    """Return the families by name, those of a user's module among them. Raises `ConfigError`."""
    if module is None:
        return FAMILIES
    try:
        added = {family.name: family for family in users_module(module).FAMILIES}
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            [f"model.module: {module} gives no FAMILIES ({type(error).__name__}: {error})"]
        ) from error
    return {**FAMILIES, **added}


def model_config(options: Options, vocab_size: int | None) -> tuple[ModelFamily, Any]:
    """Return the family and its config: from a flavor, a shape, or the config.json of a Hugging Face folder."""
    table = options.config.model
    families = known_families(table.module)
    if table.family not in families:
        raise options.unknown_name("model.family", table.family, families)
    family = families[table.family]
    if not family.flavors and table.hf_path is None:
        key, given = (
            ("model.shape", "a table") if table.flavor is None else ("model.flavor", show(table.flavor))
        )
        raise options.error(
            key,
            f"given {given}, but model.family = {show(family.name)} has no sizes of its own; "
            "legal: model.hf_path, a folder with config.json and weights",
        )
    flavor_vocab = vocab_size
    if table.flavor is not None:
        if table.flavor not in family.flavors:
            raise options.unknown_name("model.flavor", table.flavor, family.flavors)
        # A smaller vocabulary leaves rows unused; it does not make a model of another size of the one that was asked
        # for. Flavors called `debug` have no vocabulary of their own.
        if vocab_size is not None and not table.flavor.startswith("debug"):
            flavor_vocab = max(vocab_size, family.config_from_flavor(table.flavor).vocab_size)
    if table.shape is not None:
        shape = table.shape.model_dump(exclude_none=True)
        if table.flavor is not None and flavor_vocab is not None:
            shape.setdefault("vocab_size", flavor_vocab)
        try:
            return family, family.config_from_shape(shape, table.flavor, vocab_size)
        except ModelConfigError as error:
            raise options.error("model.shape", str(error)) from error
    if table.flavor is not None:
        return family, family.config_from_flavor(table.flavor, vocab_size=flavor_vocab)
    path, config = _released_config(options, family)
    if vocab_size is not None and config.vocab_size < vocab_size:
        raise options.error(
            "tokenizer",
            f"it has {vocab_size} tokens, and the model of {path} only {config.vocab_size}; "
            "legal: a tokenizer with at most as many",
        )
    return family, config


def find_weights(options: Options, model: LayeredModel) -> tuple[PretrainedWeights | None, Mapped]:
    """Open the weights in the Hugging Face folder, and map the ones that stay in its files. A flavor or shape has none.

    Checks the headers of the files against the model. Raises `HFError`.
    """
    config = options.config
    if config.model.hf_path is None:
        return None, {}
    family, shape = model_config(options, None)  # the tokenizer was compared when the model was built
    shapes = model.stored_shapes()
    weights = open_weights(Path(os.path.expanduser(config.model.hf_path)), family, shape, shapes)
    if config.lora.path is not None:
        names = adapter_names(model, family.module_names(shape))
        weights.adapters = read_adapters(config.lora, names, shapes)
    return weights, _map_base(weights, model, config)


def open_weights(
    folder: Path, family: ModelFamily, config: Any, shapes: Mapping[str, Sequence[int]]
) -> PretrainedWeights:
    """Open the weights in a folder under the names that it gives them. Raises `HFError` or `ModelConfigError`."""
    tensors = read_folder(folder)
    found = family.names_in_folder(config, tensors)
    return PretrainedWeights(folder, found.names, shapes, found.redundant, tensors=tensors)


def _map_base(weights: PretrainedWeights, model: LayeredModel, config: Config) -> Mapped:
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


def warn_of_positions(what: str, tokens: int, config: Any) -> None:
    """Warn if `what` may make a document longer than the model knows. RoPE has no limit of its own, so it is legal."""
    if tokens > (known := config.known_positions):
        logger.warning(
            "%s = %d, but the model knows only %d positions (max_position_embeddings, RoPE's scaling counted): of a longer "
            "document, the tokens after the first %d are at positions that it was not made for",
            *(what, tokens, known, known),
        )


# The folder of a released model.


def _released_config(options: Options, family: ModelFamily) -> tuple[Path, Any]:
    """Read the folder `model.hf_path`: the path of its `config.json`, and the family's config of it.

    Raises `ConfigError` for a file that is missing or damaged, and for a model that the family does not read.
    """
    folder = options.config.model.hf_path
    assert folder is not None, "the config checks want a flavor, a shape or hf_path"
    path = Path(os.path.expanduser(folder)) / "config.json"
    if not path.is_file():
        lacks = f"no {path}" if path.parent.is_dir() else "no such folder"
        raise options.error("model.hf_path", f"given {show(folder)}, but there is {lacks}; {MODEL_FOLDER}")
    try:
        content = read_object(path)
    except HFError as error:
        raise options.error("model.hf_path", str(error)) from error
    _refuse_another_family(options, family, path, content.get("model_type"))
    if (kind := quantised_kind(content)) is not None:
        raise options.error("model.hf_path", f"{path.parent}: {quantised_advice(kind)}")
    try:
        return path, family.config_from_hf(content)
    except ModelConfigError as error:
        if family.name != BORROWED:
            raise
        raise options.error("model.hf_path", f"{path}: {error}") from error


def _refuse_another_family(options: Options, given: ModelFamily, path: Path, model_type: Any) -> None:
    """Raise `ConfigError` if another family reads this type, or none. The message lists what is supported."""
    if given.name == BORROWED or model_type in given.hf_model_types:
        return
    readers = {kind: family.name for family in OWN_FAMILIES.values() for kind in family.hf_model_types}
    if isinstance(model_type, str) and model_type in readers:
        raise options.error(
            "model.family",
            f"given {show(options.config.model.family)}, but {path} has model_type {show(model_type)}; "
            f"legal for it: {show(readers[model_type])}",
        )
    named = f"model_type {show(model_type)}" if isinstance(model_type, str) else "no model_type"
    supported = "; ".join(f"{show(kind)} with model.family = {show(name)}" for kind, name in readers.items())
    raise options.error(
        "model.hf_path",
        f"{path} has {named}, which no family of torchround reads; legal: {supported}; most decoders of other types "
        f"that transformers defines, with model.family = {show(BORROWED)}",
    )


def _advise_on_borrowed(options: Options, content: Mapping[str, Any]) -> None:
    """Warn of what makes a borrowed model slower than it needs to be, or than was asked for."""
    if options.config.engine.compile is True:
        logger.warning(
            "engine.compile = true compiles the update alone: layers of model.family = %s stay as they are",
            show(BORROWED),
        )
    for family in OWN_FAMILIES.values():
        with suppress(ModelConfigError):
            if content.get("model_type") in family.hf_model_types:
                family.config_from_hf(content)
                logger.warning(
                    "model.family = %s runs the modules of transformers; model.family = %s has faster kernels of its own",
                    *(show(BORROWED), show(family.name)),
                )


# The weights in a checkpoint's files, read in pieces, in either form that a run keeps them in.


@dataclass(frozen=True)
class StoredSplitWeight(StoredTensor):
    """An fp32 weight whose upper and lower halves are two tensors of a checkpoint. It reads like a tensor of type F32.

    `begin` counts bytes of the fp32 weight, so a part of it is a copy with another `begin`.
    """

    upper: StoredTensor
    residual: StoredTensor

    def read_by(self, files: TensorFiles, start: int, nbytes: int) -> Tensor:
        """Return uint8 `[nbytes]` of the fp32 weight from byte `start` on. Both are multiples of 4."""
        start, nbytes = (self.begin + start) // 2, nbytes // 2
        # The next read overwrites what this one returned.
        upper = files.read(self.upper, start, nbytes).clone()
        residual = files.read(self.residual, start, nbytes)
        return join(upper.view(torch.bfloat16), residual.view(torch.int16)).view(torch.uint8)


def checkpoint_weights(checkpoint: Path) -> dict[str, StoredTensor]:
    """Find the authoritative weights (fp32 if trained) in the checkpoint's files, by parameter name.

    Raises `HFError` for a weight of a type that is not read or a residual that fits no weight, and `CheckpointError`.
    """
    found: dict[str, StoredTensor] = {}
    residuals: dict[str, StoredTensor] = {}
    # By the manifest: a file that it does not list has not been verified, and may be a link to another model.
    for file in sorted(read_manifest(checkpoint).files.keys() - {STATE_FILE}):
        for name, tensor in read_header(checkpoint / file).items():
            kind, _, parameter = name.partition("/")
            if kind == WEIGHTS and tensor.dtype is None:
                raise HFError(f"{checkpoint}: {parameter} is of a type that is not read: {tensor.dtype_name}")
            if kind in (WEIGHTS, RESIDUAL):
                (found if kind == WEIGHTS else residuals)[parameter] = tensor
    for parameter, residual in residuals.items():
        upper = found.get(parameter)
        halves = (residual.shape, torch.bfloat16, torch.int16)
        if upper is None or (upper.shape, upper.dtype, residual.dtype) != halves:
            raise HFError(f"{checkpoint}: {residual.name} fits no weight")
        whole = replace(upper, dtype_name="F32", begin=0, nbytes=2 * upper.nbytes)
        found[parameter] = StoredSplitWeight(**vars(whole), upper=upper, residual=residual)
    return found
