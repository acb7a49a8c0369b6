"""The model that a config asks for, and its weights in a Hugging Face folder or a checkpoint, for every command."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchround.checkpoint.folders import STATE_FILE
from torchround.checkpoint.manifest import read_manifest
from torchround.config import MODEL_FOLDER, ConfigError, LoraTable, Options, show, users_module
from torchround.data import MissingTokenizerError, Tokenizer, TokenizerError, build_tokenizer
from torchround.engine.errors import EngineUsageError
from torchround.engine.store.bundles import RESIDUAL, WEIGHTS
from torchround.hf import HFError, PretrainedWeights, quantisation, quantised_advice, read_adapters
from torchround.hf.packed import format_of, read_numbers
from torchround.hf.tensor_folder import StoredTensor, TensorFiles, read_folder, read_header, read_object
from torchround.layer import FileTensor, HFNames, LayeredModel, names_in
from torchround.models import (
    FAMILIES,
    OWN_FAMILIES,
    LoraShape,
    ModelConfigError,
    ModelFamily,
    adapter_names,
    adapters_of,
    add_adapters,
    pack_base,
)
from torchround.optim.split_weights import join
from torchround.packed_formats import FORMATS
from torchround.planning.cards import UnknownPeakError
from torchround.planning.partition import PlanError
from torchround.planning.planner import InfeasiblePlanError
from torchround.run.numbers import DTYPES
from torchround.run.run_folder import RunError

logger = logging.getLogger(__name__)

AUTO, BORROWED = "auto", "transformers"
"""The value of `model.family` that leaves it to the folder, and the family whose modules `transformers` builds."""

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
    with options.blaming("model", ModelConfigError):
        model = family.build(config)
    if not options.config.lora.rank:
        return model
    excluded = {"path", "map_base", "base", "base_cache", "experts_by_need"}
    shape = LoraShape(**options.config.lora.model_dump(exclude=excluded))
    add_adapters(model, family.module_names(config), shape)
    model = _packed(options, family, config, model)
    if options.config.lora.experts_by_need is True and not any(p.by_matrix for p in model.packed.values()):
        text = 'given true, but lora.base packs no experts of this model one by one; legal: "auto" or false'
        raise options.error("lora.experts_by_need", text)
    return model


def _packed(options: Options, family: ModelFamily, config: Any, model: LayeredModel) -> LayeredModel:
    """Have the frozen matrices packed as `lora.base` says. Raises `HFError` for a folder whose headers cannot be read."""
    base, folder = options.config.lora.base, options.config.model.hf_path
    if base == "bf16":
        return model
    if base != "auto":
        return pack_base(model, FORMATS[base])
    assert folder is not None, "the config checks want a folder"
    tensors = read_numbers(Path(folder).expanduser())
    names = family.names_in_folder(config, tensors).names
    found = {name: format_of([tensors[part] for part in names_in(held)]) for name, held in names.items()}
    return pack_base(model, {name: packed for name, packed in found.items() if packed is not None})


def model_config(options: Options, vocab_size: int | None) -> tuple[ModelFamily, Any]:
    """Find the family, maybe of a user's module, and its config: from a flavor, a shape, or a folder's config.json."""
    table, families = options.config.model, FAMILIES
    if table.module is not None:
        try:
            families = {**FAMILIES, **{family.name: family for family in users_module(table.module).FAMILIES}}
        except (ImportError, AttributeError) as error:
            text = f"{table.module} gives no FAMILIES ({type(error).__name__}: {error})"
            raise ConfigError([f"model.module: {text}"]) from error
    if table.family not in (*families, AUTO):
        raise options.unknown_name("model.family", table.family, {*families, AUTO})
    if table.hf_path is not None:
        family, config = _released_config(options, families, Path(table.hf_path).expanduser() / "config.json")
        if vocab_size is not None and config.vocab_size < vocab_size:
            text = f"it has {vocab_size} tokens; legal: at most the model's {config.vocab_size}"
            raise options.error("tokenizer", text)
        return family, config
    family = families[table.family]
    if not family.flavors:
        key, given = ("shape", "a table") if table.flavor is None else ("flavor", show(table.flavor))
        text = f"given {given}, but {show(family.name)} has no sizes of its own"
        raise options.error(f"model.{key}", f"{text}; legal: model.hf_path")
    if table.flavor is not None and table.flavor not in family.flavors:
        raise options.unknown_name("model.flavor", table.flavor, family.flavors)
    flavor_vocab = vocab_size
    # A smaller vocabulary leaves rows unused; it does not make a model of another size of the one that was asked for.
    # Flavors called `debug` have no vocabulary of their own.
    if table.flavor is not None and vocab_size is not None and not table.flavor.startswith("debug"):
        flavor_vocab = max(vocab_size, family.config_from_flavor(table.flavor).vocab_size)
    if table.shape is None:
        assert table.flavor is not None, "the config checks want a flavor, a shape or hf_path"
        return family, family.config_from_flavor(table.flavor, vocab_size=flavor_vocab)
    shape = table.shape.model_dump(exclude_none=True)
    if table.flavor is not None and flavor_vocab is not None:
        shape.setdefault("vocab_size", flavor_vocab)
    with options.blaming("model.shape", ModelConfigError):
        return family, family.config_from_shape(shape, table.flavor, vocab_size)


def with_family(options: Options) -> Options:
    """Put the family that reads the folder in the place of `auto`, so that a run always has the same name of it."""
    table = options.config.model
    if table.family != AUTO:
        return options
    found = table.model_copy(update={"family": model_config(options, None)[0].name})
    return replace(options, config=options.config.model_copy(update={"model": found}))


def find_weights(options: Options, model: LayeredModel) -> tuple[PretrainedWeights | None, Mapped]:
    """Open the weights in the Hugging Face folder, and map the ones that stay in its files. A flavor or shape has none.

    Checks the headers of the files against the model. Raises `HFError`.
    """
    config = options.config
    if config.model.hf_path is None:
        return None, {}
    family, shape = model_config(options, None)  # the tokenizer was compared when the model was built
    shapes = model.stored_shapes()
    weights = open_weights(Path(config.model.hf_path).expanduser(), family, shape, shapes)
    if config.lora.path is not None:
        own, dtype = family.module_names(shape), DTYPES[config.training.dtype]
        weights.adapters = saved_adapters(config.lora, model, own, weights, dtype)
    if not config.lora.map_base:
        return weights, {}
    # A tied parameter has a name in each of its layers, and is stored under one of them.
    frozen = (shapes.keys() - model.packed.keys()) & {
        f"{name}.{path}"
        for name, layer in zip(model.names, model.layers, strict=True)
        for path, weight in layer.named_parameters()
        if not weight.requires_grad
    }
    return weights, weights.map_tensors(sorted(frozen), DTYPES[config.training.dtype])


def saved_adapters(
    table: LoraTable, model: LayeredModel, own: HFNames, base: PretrainedWeights, dtype: torch.dtype
) -> PretrainedWeights:
    """Open the adapters in `table.path` for `model`, whose modules have their `own` names. Raises `HFError`."""
    names, stored = adapter_names(model, own), base.tensors
    weights = {
        str(names[adapter.parameters[2]]): stored[str(base.names[weight])]
        for weight, adapter in adapters_of(model, own).items()
        if adapter.shape.dora
    }
    return read_adapters(table, names, model.stored_shapes(), weights, dtype)


def open_weights(
    folder: Path, family: ModelFamily, config: Any, shapes: Mapping[str, Sequence[int]]
) -> PretrainedWeights:
    """Open the weights in a folder under the names that it gives them. Raises `HFError` or `ModelConfigError`."""
    tensors = read_numbers(folder)
    found = family.names_in_folder(config, tensors)
    return PretrainedWeights(
        folder, found.names, shapes, found.redundant, tensors=tensors, carried=found.carried
    )


def family_of(content: Mapping[str, Any]) -> str:
    """Name the family that reads a `config.json`. The borrowed one reads, or refuses, all other kinds."""
    kind = str(content.get("model_type"))
    return next((own.name for own in OWN_FAMILIES.values() if kind in own.hf_model_types), BORROWED)


def warn_of_positions(what: str, tokens: int, config: Any) -> None:
    """Warn if `what` may make a document longer than the model knows. RoPE has no limit of its own, so it is legal."""
    if tokens > (known := config.known_positions):
        logger.warning(
            "%s = %d, but the model knows only %d positions (max_position_embeddings, RoPE's scaling counted): of a longer "
            "document, the tokens after the first %d are at positions that it was not made for",
            *(what, tokens, known, known),
        )


def _released_config(
    options: Options, families: Mapping[str, ModelFamily], path: Path
) -> tuple[ModelFamily, Any]:
    """Read a `config.json` as the config of the family that the run names, or of the first that reads it. Raises `ConfigError`."""
    folder, named = options.config.model.hf_path, options.config.model.family
    if not path.is_file():
        lacks = f"no {path}" if path.parent.is_dir() else "no such folder"
        raise options.error("model.hf_path", f"given {show(folder)}, but there is {lacks}; {MODEL_FOLDER}")
    with options.blaming("model.hf_path", HFError, ModelConfigError, what=f"{path}: "):
        content = read_object(path)
        kind = content.get("model_type")
        if named not in (AUTO, BORROWED) and kind not in families[named].hf_model_types:
            text = f"given {show(named)}, but {path} has model_type {show(kind)}"
            raise options.error("model.family", f"{text}; legal: {show(family_of(content))}")
        if (advice := quantised_advice(quantisation(content))) is not None:
            raise HFError(f"{path.parent}: {advice}")
        if "text_config" in content and "tie_word_embeddings" not in content and named in (AUTO, BORROWED):
            # Releases that wrap their text model often leave it out. The default of their class may then be wrong, and
            # `transformers` goes by the files. A folder of a config alone has none.
            with suppress(HFError):
                names = read_folder(path.parent)
                tied = not any(name.endswith("lm_head.weight") for name in names)
                content = {"tie_word_embeddings": tied, **content}
        if named != AUTO:
            return families[named], families[named].config_from_hf(content)
    own = [each for each in families.values() if each.name != BORROWED and kind in each.hf_model_types]
    refusals = []
    for family in (*own, families[BORROWED]):
        try:
            return family, family.config_from_hf(content)
        except ModelConfigError as error:
            refusals.append(f"{family.name}: {error}")
    raise options.error("model.hf_path", f"{path} fits no family; {'; '.join(refusals)}")


# The weights in a checkpoint's files, read in pieces, in either form that a run keeps them in.


@dataclass(frozen=True)
class StoredSplitWeight(StoredTensor):
    """An fp32 weight whose upper and lower halves are two tensors of a checkpoint. It reads like a tensor of type F32.

    `begin` counts bytes of the fp32 weight, so a part of it is a copy with another `begin`.
    """

    upper: StoredTensor
    residual: StoredTensor

    def read(self, files: TensorFiles, start: int, nbytes: int) -> Tensor:
        """Return uint8 `[nbytes]` of the fp32 weight from byte `start` on. Both are multiples of 4."""
        start, nbytes = (self.begin + start) // 2, nbytes // 2
        # The next read overwrites what this one returned.
        upper = self.upper.read(files, start, nbytes).clone()
        residual = self.residual.read(files, start, nbytes)
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


def starting_weights(checkpoint: Path, model: LayeredModel, mapped: Mapped) -> PretrainedWeights:
    """Open all weights of a checkpoint for a new run of `model`, but those that stay `mapped`. Raises `HFError`."""
    stored = checkpoint_weights(checkpoint)
    names = {name: name for name in model.stored_shapes() if name not in mapped and name not in model.packed}
    return PretrainedWeights(checkpoint, names, model.stored_shapes(), stored, tensors=stored)


@dataclass(frozen=True)
class SavedModel:
    """The model of a checkpoint and its weights. `base` has those that the run left in the files of its base model."""

    family: ModelFamily
    shape: Any
    model: LayeredModel
    weights: PretrainedWeights
    base: PretrainedWeights | None


def open_saved_model(options: Options, checkpoint: Path, opens_base: bool = False) -> SavedModel:
    """Build the model of a checkpoint and check all weights by name and shape, without reading them.

    The base is opened if weights are only there, or with `opens_base`. Raises `HFError` if the weights are another model's,
    and `ConfigError` or `ModelConfigError`.
    """
    stored, folder = checkpoint_weights(checkpoint), options.config.model.hf_path
    # The embedding's rows, because the tokenizer may have decided their number.
    embedding = stored.get("embedding.weight")
    rows = embedding.shape[0] if folder is None and embedding is not None and embedding.shape else None
    family, shape = model_config(options, rows)
    names = family.hf_names(shape).keys()
    # Before the model is built: a forged checkpoint may describe any number of layers.
    missing = sorted(names - stored.keys())
    if missing and folder is None:
        raise HFError(f"{checkpoint} lacks {', '.join(missing[:5])} of the model that it describes")
    model = build_model(options, rows, warns=False)
    shapes = model.stored_shapes()
    own = {name: name for name in shapes if name in stored or name not in names}
    weights, base = PretrainedWeights(checkpoint, own, shapes, tensors=stored), None
    if folder is not None and (missing or opens_base):
        base = open_weights(Path(folder).expanduser(), family, shape, shapes)
    return SavedModel(family, shape, model, weights, base)
