"""Export a checkpoint as a Hugging Face folder that `transformers` loads and generates from.

It holds the config, safetensors with an index, the tokenizer's files, the settings of generation and a model card.

    torchround export_hf outputs/my-run/checkpoints/step-1000 my-model --config outputs/my-run/config.toml

A run that took files from a folder (`model.hf_path`, `tokenizer.path`, `tokenizer.chat_template`) needs `--config`, its own
config, or options that name them: a checkpoint may be another person's, and could name any file of yours. A `model.module`
needs `--config` too, because importing it runs it.

Adapters (`[lora]`) are merged into the weights; `--adapters` writes them alone, as a folder that PEFT loads.

The export streams from file to file, so it needs a few MiB of memory for a model of any size. Every tensor keeps the type
that it has in `model.hf_path`. Without such a folder, and for MXFP4, it gets the training dtype; `--dtype` sets one type
for all. The folder appears once it is complete. Exit code 2: an argument cannot be used.
"""

import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchround.checkpoint import CheckpointError, verify_checkpoint
from torchround.checkpoint.fsync import make_folder, sync_entry
from torchround.checkpoint.manifest import STATE_FILE, read_manifest, read_state
from torchround.commands import new_parser
from torchround.commands.configured_model import checkpoint_weights, known_families, open_weights
from torchround.commands.generation_files import write_generation, write_json
from torchround.config import Config, ConfigError, load_config, show
from torchround.config.validate import RawConfig, validate
from torchround.data import TokenizerError
from torchround.data.text.template_files import export_tokenizer, folder_of
from torchround.hf import HFError, PretrainedWeights
from torchround.hf.export import SHARD_BYTES, ExportedTensor, merge_adapters, unstack, write_tensors
from torchround.hf.model_card import CARD_FILE, LOSSES, CardFacts, model_card
from torchround.hf.pretrained import ADAPTER_CONFIG_FILE, ADAPTER_TENSOR_FILE
from torchround.hf.tensor_folder import StoredTensor, read_object
from torchround.layer import HFNames
from torchround.models import (
    LoraShape,
    ModelConfigError,
    ModelFamily,
    adapter_names,
    adapter_pairs,
    add_adapters,
    peft_config,
)
from torchround.observe.metrics_file import finite_number, read_records
from torchround.run.numbers import DTYPES
from torchround.untrusted.regular_file import refuse_links_out_of, write_whole
from torchround.untrusted.terminal import say, terminal_safe

# Endings of the files of a model and its tokenizer that an export copies or reads.
PUBLISHED = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt")
# The end of a metrics file, where the model card looks for losses: 30,000 steps on eight devices.
LOGGED_BYTES = 2**26


@dataclass(frozen=True)
class Export:
    """One export: what to write, and the folder to write.

    `base` is the folder that the run started from, `tokenizer` that of its tokenizer, and `template` a file. They are the
    user's own: an export publishes what they lead to, so it follows no path that a checkpoint names, and imports no other `module` than theirs. `dtype` is a name in
    `DTYPES`; None keeps the type that each tensor has in the base.
    """

    checkpoint: Path
    output: Path
    base: Path | None = None
    adapters: bool = False
    tokenizer: Path | None = None
    template: Path | None = None
    module: str | None = None
    dtype: str | None = None
    max_shard_gb: float = SHARD_BYTES / 1e9


def main(arguments: list[str]) -> int:
    """Run the command. Its options are fields of `Export`, and `--config`, which gives several. Returns the exit code."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="folder step-N of a run's checkpoints")
    add("output", type=Path, help="new folder")
    add("--config", help="the run's config, as it was trained or in its folder")
    add("--base", type=Path, help="the run's model.hf_path, as it is now")
    add("--adapters", action="store_true", help="LoRA adapters alone, in PEFT's format")
    add("--tokenizer", type=Path, help="folder of the tokenizer (default: of --config, or the base's)")
    add("--dtype", choices=DTYPES, help="type of every tensor")
    add("--max-shard-gb", type=float, default=SHARD_BYTES / 1e9, help="10^9 bytes per file")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        own = own_paths(load_config(given.pop("config"))) if "config" in given else {}
        say(export(Export(**{**own, **given})))
    except (HFError, CheckpointError, ConfigError, ModelConfigError, TokenizerError, OSError) as error:
        print(terminal_safe(error), file=sys.stderr)
        return 2
    return 0


def own_paths(config: Config) -> dict[str, Any]:
    """Return the fields of `Export` that the user's own config gives."""
    keys = {
        "base": config.model.hf_path,
        "tokenizer": config.tokenizer.path,
        "template": config.tokenizer.chat_template,
    }
    paths = {name: None if path is None else Path(path).expanduser() for name, path in keys.items()}
    return {**paths, "module": config.model.module}


def export(request: Export) -> str:
    """Write the folder. Returns a line that lists its files.

    Raises `HFError`, `CheckpointError`, `ModelConfigError`, `TokenizerError` or `OSError`; no folder of that name is
    left then.
    """
    if request.output.exists():
        raise HFError(f"{request.output} is there already; legal: a new folder")
    verify_checkpoint(request.checkpoint)
    state = read_state(request.checkpoint, read_manifest(request.checkpoint))
    state["config"] = run_with_own_paths(request, state.get("config"))
    for folder in filter(None, (request.base, request.tokenizer)):
        refuse_links_out_of(folder_of(folder), PUBLISHED)
    trained = Trained(request, state)
    if request.adapters and not trained.adapters:
        raise HFError(f"{request.checkpoint} has no adapters: its run had lora.rank = 0")
    run, content = trained.run, trained.content
    # Releases write `dtype`, older ones `torch_dtype`; one of them in the export leaves no doubt.
    saved = content.pop("torch_dtype", run["training"]["dtype"])
    content["dtype"] = request.dtype or content.get("dtype", saved)
    with new_folder(request.output) as folder:
        # First, because it fails at once if the run's template is gone.
        copied = export_tokenizer(folder, state, trained.base, request.tokenizer)
        if request.adapters:
            # PEFT reads one file, so there are no shards, and looks a relative folder up from wherever it is started.
            base = None if trained.base is None else str(trained.base.absolute())
            files = write_tensors(folder, trained.adapter_tensors(), sys.maxsize, ADAPTER_TENSOR_FILE)
            name, written = ADAPTER_CONFIG_FILE, []
            content = peft_config(trained.lora, trained.adapters, trained.module_names, base)
        else:
            files = write_tensors(folder, trained.tensors(), int(request.max_shard_gb * 1e9))
            written = write_generation(folder, content, run, trained.base, request.tokenizer)
            name = "config.json"
        write_json(folder / name, content)
        write_whole(folder / CARD_FILE, model_card(trained.facts))
    # The tokenizer `bytes` writes its files over copied ones.
    return f"{request.output}: {', '.join(dict.fromkeys([name, *files, *copied, *written, CARD_FILE]))}"


def run_with_own_paths(request: Export, saved: Any) -> dict[str, Any]:
    """Return the run's configuration as a checkpoint has saved it, with the paths of the request.

    Raises `ConfigError` if it is none, and `HFError` for a path that the checkpoint alone names.
    """
    source = str(request.checkpoint / STATE_FILE)
    if not isinstance(saved, dict):
        raise HFError(f"{source} holds no configuration of a run")
    run = validate(RawConfig(source, saved)).model_dump(mode="json")
    if (module := run["model"]["module"]) not in (None, request.module):
        raise HFError(
            f"{source} names model.module = {show(module)}, and importing it would run it: give --config with the config of the "
            "run, if it is yours"
        )
    folder_has_template = request.template is None and request.tokenizer is not None
    for table, key, given, option in (
        ("model", "hf_path", request.base, "--base"),
        ("tokenizer", "path", request.tokenizer, "--tokenizer"),
        ("tokenizer", "chat_template", request.template, "--tokenizer"),
    ):
        named = run[table][key]
        if named is not None and given is None and not (key == "chat_template" and folder_has_template):
            raise HFError(
                f"{source} names {table}.{key} = {show(named)}, and an export publishes no file because a checkpoint names "
                f"it: give {option} FOLDER, or --config with the config of the run, if it is yours"
            )
        if named is not None or key == "chat_template":
            run[table][key] = None if given is None else str(given)
    return run


class Trained:
    """The weights of a checkpoint as Hugging Face tensors, and the content of their `config.json`.

    Weights that the run left in the files of its base are not in the checkpoint. They are read from the base.
    """

    def __init__(self, request: Export, state: dict[str, Any]) -> None:
        self.run = run = state["config"]
        self.base = request.base
        self.lora = run["lora"]
        self.stored = checkpoint_weights(request.checkpoint)
        family = known_families(run["model"].get("module")).get(run["model"]["family"])
        if family is None:
            raise HFError(f"{request.checkpoint}: there is no family {show(run['model']['family'])}")
        self.content = config_content(family, run["model"], self.base, self.stored)
        config = family.config_from_hf(self.content)
        self.names = family.hf_names(config)
        # Before the model is built: a forged checkpoint may describe any number of layers.
        if self.base is None and (missing := sorted(self.names.keys() - self.stored.keys())):
            raise HFError(
                f"{request.checkpoint} lacks {', '.join(missing[:5])} of the model that it describes"
            )
        self.module_names = family.module_names(config)
        model = family.build(config)
        shapes = model.stored_shapes()
        self.adapters: HFNames = {}
        if self.lora["rank"]:
            rank, alpha, dropout = (self.lora[key] for key in ("rank", "alpha", "dropout"))
            add_adapters(
                model, self.module_names, LoraShape(rank, alpha, dropout, tuple(self.lora["targets"]))
            )
            self.adapters = adapter_names(model, self.module_names)
        expected = model.stored_shapes()
        for name, tensor in self.stored.items():
            if expected.get(name) != tensor.shape:
                raise HFError(
                    f"{request.checkpoint}: {name} of shape {list(tensor.shape)} is not this model's"
                )
        self._dtype = request.dtype or run["training"]["dtype"]
        self.facts = card_facts(request, state, self.base, self.content)
        self._released: PretrainedWeights | None = None
        # The base is opened for the types of its tensors, for weights that the checkpoint lacks, and for the names of a
        # borrowed model's tensors.
        asks_base = request.dtype is None or not self.names.keys() <= self.stored.keys() or not family.flavors
        if self.base is not None and asks_base and not request.adapters:
            self._released = open_weights(self.base, family, config, shapes)
            self.names = dict(self._released.names)
        self._dtypes = self._released.dtypes() if self._released and request.dtype is None else {}

    def tensors(self) -> Iterator[ExportedTensor]:
        tensors = self._unstacked(self.names)
        if not self.adapters:
            return iter(tensors)
        return merge_adapters(tensors, self._pairs(), self.lora["alpha"] / self.lora["rank"])

    def adapter_tensors(self) -> Iterable[ExportedTensor]:
        return unstack(self.adapters, self.stored, lambda name: torch.float32)

    def _unstacked(self, names: HFNames) -> Iterable[ExportedTensor]:
        in_base = self._released.stored_tensors() if self._released else None
        return unstack(names, self.stored, lambda name: self._dtypes.get(name, DTYPES[self._dtype]), in_base)

    def _pairs(self) -> dict[str, tuple[ExportedTensor, ExportedTensor]]:
        """Map each Hugging Face tensor's name to the pair A, B whose product is added to it."""
        pairs: dict[str, tuple[ExportedTensor, ExportedTensor]] = {}
        # One parameter may be several released tensors, such as one per expert. Taken apart alike, they match in order.
        for adapted, halves in adapter_pairs(self.adapters).items():
            theirs = self._unstacked({adapted: self.names[adapted]})
            a, b = (self._unstacked({half: self.adapters[half]}) for half in halves)
            pairs |= {tensor.name: pair for tensor, pair in zip(theirs, zip(a, b, strict=True), strict=True)}
        return pairs


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill. It gets its name after the block, once everything in it is on the disk."""
    unfinished = path.with_name(path.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    make_folder(path.absolute().parent)
    unfinished.mkdir()  # not through a link in its place
    yield unfinished
    # First the files, then their folder: the new name must never point at a folder whose files a crash could lose.
    for written in (*unfinished.rglob("*"), unfinished):
        sync_entry(written)
    unfinished.rename(path)
    sync_entry(path.parent)


def card_facts(
    request: Export, state: dict[str, Any], base: Path | None, content: dict[str, Any]
) -> CardFacts:
    """Collect what the model card says. The losses are in the run's folder, if the checkpoint still is."""
    step, tokens = read_manifest(request.checkpoint).step, state.get("tokens")
    losses = {}
    with suppress(OSError):  # the folder has no metrics
        for logged, record in read_records(request.checkpoint.resolve().parent.parent, LOGGED_BYTES):
            for key in LOSSES:
                if logged <= step and (loss := finite_number(record.get(key))) is not None:
                    losses[key] = logged, loss
    name = content.get("_name_or_path")
    return CardFacts(
        run=state["config"],
        step=step,
        tokens=tokens if type(tokens) is int else None,
        base=base,
        base_name=name if isinstance(name, str) else None,
        losses=losses,
        adapters=request.adapters,
    )


def config_content(
    family: ModelFamily, table: dict[str, Any], base: Path | None, stored: dict[str, StoredTensor]
) -> dict[str, Any]:
    """Make the content of `config.json`: the base's without its quantisation, or the trained shape's."""
    if base is None:
        # The embedding's rows, because the tokenizer may have decided their number.
        shape = {key: value for key, value in (table.get("shape") or {}).items() if value is not None}
        embedding = stored.get("embedding.weight")
        if embedding is None or len(embedding.shape) != 2 or table["flavor"] not in (None, *family.flavors):
            raise HFError(f"the checkpoint has no embedding, or no flavor of {family.name}")
        shape["vocab_size"] = embedding.shape[0]
        return family.config_to_hf(family.config_from_shape(shape, table["flavor"]))
    try:
        content = read_object(base / "config.json")
    except HFError as error:
        raise HFError(f"{error}; --base says where the folder is now") from error
    content.pop("quantization_config", None)
    return content
