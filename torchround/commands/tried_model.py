"""The model that `try_model` computes with: a checkpoint of a run, or a folder in Hugging Face format.

All its parameters are frozen, so that host memory holds one copy of each in the type that devices compute in. What a
folder's files hold in that type stays in the files.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchround.checkpoint import Checkpointer, CheckpointError, verify_checkpoint
from torchround.commands.checkpoint_weights import checkpoint_weights
from torchround.commands.configured_model import Mapped, build_model, find_weights, model_config
from torchround.commands.released_folder import open_weights
from torchround.config import ConfigError, Options, parse_command_line, show
from torchround.config.load import apply_override, parse_overrides
from torchround.config.validate import RawConfig, validate
from torchround.data import MissingTokenizerError, Tokenizer, build_tokenizer
from torchround.data.text.tokenizer import FILES
from torchround.hf import HFError, PretrainedWeights
from torchround.hf.pretrained import ADAPTER_CONFIG_FILE, read_plain
from torchround.hf.tensor_folder import StoredTensor, TensorFiles, read_object
from torchround.layer import LayeredModel
from torchround.models import FAMILIES, KnownShape, adapter_names
from torchround.planning.memory import size_text
from torchround.run.numbers import DTYPES
from torchround.run.run_folder import CONFIG_FILE
from torchround.untrusted.terminal import Progress

# A config has sources, and a folder that is tried has none.
NO_SOURCES = [{"path": "none"}]


@dataclass
class CheckpointWeights:
    """The weights of one checkpoint. `base` has the frozen ones that the run left in the files of its base model."""

    folder: Path
    stored: dict[str, StoredTensor]
    base: PretrainedWeights | None = None

    def load(self, views: Mapping[str, AbstractContextManager[Tensor]]) -> None:
        """Fill the views that the checkpoint or the base has, each converted to its view's type. Raises `HFError`."""
        total_bytes = sum(tensor.nbytes for name, tensor in self.stored.items() if name in views)
        progress = Progress(f"reading {self.folder}", total_bytes, size_text)
        with TensorFiles() as files:
            for name, tensor in self.stored.items():
                with views[name] as view:
                    if tensor.shape != view.shape:
                        raise HFError(
                            f"{self.folder}: {name} is {list(tensor.shape)}, and this model's is {list(view.shape)}"
                        )
                    read_plain(files, tensor, view)
                progress.advance(tensor.nbytes)
        if self.base is not None:
            self.base.load(views)


@dataclass(frozen=True)
class TriedModel:
    """A frozen model, where its weights are, and its tokenizer. `name` describes it for a user.

    `weights` fills the parameters that are not `mapped`. The vocabulary of `shape` may be larger than the tokenizer's.
    """

    name: str
    options: Options
    model: LayeredModel
    shape: KnownShape
    tokenizer: Tokenizer
    weights: CheckpointWeights | PretrainedWeights
    mapped: Mapped = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Type that devices compute in."""
        return DTYPES[self.options.config.training.dtype]


def model_of_run(folder: Path, step: int | None, overrides: Sequence[str]) -> TriedModel:
    """Open the checkpoint of `step`, otherwise the newest one, of the run in `folder`.

    `overrides` are keys as on the command line of a run. Every byte of the checkpoint is compared with its checksums.
    Raises `ConfigError`, `CheckpointError`, `TokenizerError`, `ModelConfigError` or `HFError`.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError([f"--run: there is no {file}; legal: the folder of a run, such as outputs/NAME"])
    options = parse_command_line(["--config", str(file), *overrides])
    path = _checkpoint(folder, step)
    try:
        number = verify_checkpoint(path, Progress(f"verifying {path}", text=size_text).advance)
    except CheckpointError as error:
        raise CheckpointError(error, "--step N tries another checkpoint of the run") from error
    tokenizer = _tokenizer(options)
    model = build_model(options, tokenizer.vocab_size, warns=False)
    family, shape = model_config(options, tokenizer.vocab_size)
    weights = CheckpointWeights(path, checkpoint_weights(path))
    shapes = model.stored_shapes()
    if unknown := sorted(weights.stored.keys() - shapes.keys()):
        raise HFError(f"{path}: {', '.join(unknown[:5])} is not part of the model that {file} describes")
    mapped: Mapped = {}
    if missing := sorted(shapes.keys() - weights.stored.keys()):
        base = options.config.model.hf_path
        if base is None or not set(missing) <= family.module_names(shape).keys():
            raise HFError(f"{path}: {', '.join(missing[:5])} of the model that {file} describes is not in it")
        weights.base = open_weights(Path(base).expanduser(), family, shape, shapes)
        weights.base.restrict(missing)
        mapped = weights.base.map_tensors(missing, DTYPES[options.config.training.dtype])
    name = f"{options.config.model.family}, {folder} after step {number}"
    _freeze(model)
    return TriedModel(name, options, model, shape, tokenizer, weights, mapped)


def model_of_folder(folder: Path, overrides: Sequence[str]) -> TriedModel:
    """Open a released or exported model, or adapters in PEFT's format with their base model.

    `overrides` are keys as on the command line of a run. Raises as `model_of_run`.
    """
    options = _folder_options(folder, overrides)
    tokenizer = _tokenizer(options)
    model = build_model(options, tokenizer.vocab_size, warns=False)
    family, shape = model_config(options, tokenizer.vocab_size)
    weights, _ = find_weights(options, model)
    assert weights is not None, "a folder has weights"
    in_base = model.stored_shapes().keys() - adapter_names(model, family.module_names(shape)).keys()
    mapped = weights.map_tensors(sorted(in_base), DTYPES[options.config.training.dtype])
    name = f"{options.config.model.family}, {folder}"
    _freeze(model)
    return TriedModel(name, options, model, shape, tokenizer, weights, mapped)


def _checkpoint(folder: Path, step: int | None) -> Path:
    """Return the folder of a run's checkpoint. Raises `ConfigError` if there is none, or none of that step."""
    found = Checkpointer(folder / "checkpoints")
    there = found.checkpoints()
    if not there:
        raise ConfigError([f"--run: there is no checkpoint in {found.folder}; the run has not saved yet"])
    if step is None:
        step = max(there)  # also one that is damaged: an older one in its place would be a surprise
    if step not in there:
        steps = ", ".join(map(str, there))
        raise ConfigError(
            [f"--step: given {step}; legal: a step with a checkpoint in {found.folder}: {steps}"]
        )
    return there[step]


def _tokenizer(options: Options) -> Tokenizer:
    try:
        return build_tokenizer(options.config.tokenizer, options.config.model.hf_path)
    except MissingTokenizerError as error:
        raise options.error(error.key, error.message) from error


def _freeze(model: LayeredModel) -> None:
    for layer in model.layers:
        layer.requires_grad_(False)


# The config of a folder.


def _folder_options(folder: Path, overrides: Sequence[str]) -> Options:
    """Make the config of a run that would begin with the model in `folder`. Raises `ConfigError` or `HFError`."""
    if not folder.is_dir():
        raise ConfigError(
            [
                f"--model: there is no folder {folder}; legal: a local folder (a name on the hub is not downloaded)"
            ]
        )
    tables: dict[str, Any] = {"data": {"sources": NO_SOURCES}, "model": {"hf_path": str(folder)}}
    raw = RawConfig(main_source=str(folder), tables=tables)
    given = dict(parse_overrides(overrides))
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        tables["lora"] = _adapter_table(folder, read_object(folder / ADAPTER_CONFIG_FILE), tables["model"])
        if any((folder / name).is_file() for name in FILES):
            tables["tokenizer"] = {"path": str(folder)}
    base = Path(str(given.get(("model", "hf_path"), tables["model"]["hf_path"]))).expanduser()
    if not base.is_dir():
        raise ConfigError(
            [
                f"{folder}: there is no folder {base} with its base model; --model.hf_path FOLDER says where it is"
            ]
        )
    content = read_object(base / "config.json")
    tables["model"]["family"] = _family_of(content.get("model_type"))
    dtype = content.get("dtype", content.get("torch_dtype"))
    tables["training"] = {"dtype": dtype if dtype in DTYPES else "bfloat16"}
    for key_path, value in given.items():
        apply_override(raw, key_path, value)
    return Options(validate(raw), print_config=False, dry_run=False, raw=raw)


def _family_of(model_type: object) -> str:
    """Return the family that reads a type of model. One that none reads gets a message when the model is built."""
    fitting = [family.name for family in FAMILIES.values() if model_type in family.hf_model_types]
    others = [name for name in FAMILIES if name == "transformers"]  # reads what has no definition of its own
    return (fitting or others or list(FAMILIES))[0]


def _adapter_table(folder: Path, content: Mapping[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Return `[lora]` for adapters in PEFT's format, and put their base model into `model`. Raises `HFError`."""
    modules, parameters = content.get("target_modules"), content.get("target_parameters") or []
    base = content.get("base_model_name_or_path")
    if not isinstance(modules, list) or not isinstance(parameters, list):
        raise HFError(
            f"{folder / ADAPTER_CONFIG_FILE}: target_modules is {show(str(modules))}; legal: a list of names"
        )
    if not isinstance(base, str):
        raise HFError(f"{folder / ADAPTER_CONFIG_FILE} names no base model; --model.hf_path FOLDER does")
    model["hf_path"] = base
    targets = [str(name).rpartition(".")[2] for name in (*modules, *parameters)]
    # Values that are no numbers are refused by the checks of the table.
    return {
        "rank": content.get("r"),
        "alpha": content.get("lora_alpha"),
        "targets": sorted(set(targets)),
        "path": str(folder),
    }
