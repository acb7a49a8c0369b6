"""Export a checkpoint as a Hugging Face folder that `transformers` loads and generates from.

It holds the config, safetensors with an index, the tokenizer's files, the settings of generation and a model card.

    python scripts/export_hf.py outputs/my-run/checkpoints/step-1000 my-model

Adapters (`[lora]`) are merged into the weights; `--adapters` writes them alone, as a folder that PEFT loads.

The export streams from file to file, so it needs a few MiB of memory for a model of any size. Every tensor keeps the type
that it has in `model.hf_path`. Without such a folder, and for MXFP4, it gets the training dtype; `--dtype` sets one type
for all. The folder appears once it is complete. Exit code 2: an argument cannot be used.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchround.checkpoint import CheckpointError, verify_checkpoint
from torchround.checkpoint.fsync import make_folder, sync_entry
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.commands.checkpoint_weights import checkpoint_weights
from torchround.commands.generation_files import write_generation, write_json
from torchround.commands.released_folder import open_weights
from torchround.data import TokenizerError
from torchround.data.text.template_files import export_tokenizer
from torchround.hf import HFError, PretrainedWeights
from torchround.hf.export import SHARD_BYTES, ExportedTensor, merge_adapters, unstack, write_tensors
from torchround.hf.model_card import CARD_FILE, CardFacts, model_card, read_records
from torchround.hf.pretrained import ADAPTER_CONFIG_FILE, ADAPTER_TENSOR_FILE
from torchround.hf.tensor_folder import StoredTensor
from torchround.layer import HFNames
from torchround.models import (
    FAMILIES,
    LoraShape,
    ModelConfigError,
    ModelFamily,
    adapter_names,
    adapter_pairs,
    add_adapters,
    peft_config,
)
from torchround.observe.loss_curve import METRICS_FILE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Export:
    """One export: what to write, and the folder to write.

    `base` and `tokenizer` are folders that have moved since the run. `dtype` is a name in `DTYPES`; None keeps the type
    that each tensor has in the base.
    """

    checkpoint: Path
    output: Path
    base: Path | None = None
    adapters: bool = False
    tokenizer: Path | None = None
    dtype: str | None = None
    max_shard_gb: float = SHARD_BYTES / 1e9


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit code."""
    request = Export(**vars(parser().parse_args(arguments)))
    try:
        print(export(request))
    except (HFError, CheckpointError, ModelConfigError, TokenizerError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser. Its options are the fields of `Export`."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("checkpoint", type=Path, help="folder step-N of a run's checkpoints")
    add("output", type=Path, help="new folder")
    add("--base", type=Path, help="model.hf_path, if it has moved since")
    add("--adapters", action="store_true", help="LoRA adapters alone, in PEFT's format")
    add("--tokenizer", type=Path, help="folder of the tokenizer files (default: the run's)")
    add("--dtype", choices=DTYPES, help="type of every tensor")
    add("--max-shard-gb", type=float, default=SHARD_BYTES / 1e9, help="10^9 bytes per file")
    return result


def export(request: Export) -> str:
    """Write the folder. Returns a line that lists its files.

    Raises `HFError`, `CheckpointError`, `ModelConfigError`, `TokenizerError` or `OSError`; no folder of that name is
    left then.
    """
    if request.output.exists():
        raise HFError(f"{request.output} is there already; legal: a new folder")
    verify_checkpoint(request.checkpoint)
    state = read_state(request.checkpoint, read_manifest(request.checkpoint))
    trained = Trained(request, state)
    if request.adapters:
        if not trained.adapters:
            raise HFError(f"{request.checkpoint} has no adapters: its run had lora.rank = 0")
        return write_adapters(request, trained, state)
    run, content = trained.run, trained.content
    # Releases write `dtype`, older ones `torch_dtype`; one of them in the export leaves no doubt.
    content["dtype"] = request.dtype or content.get(
        "dtype", content.get("torch_dtype", run["training"]["dtype"])
    )
    content.pop("torch_dtype", None)
    with new_folder(request.output) as folder:
        # First, because it fails at once if the run's template is gone.
        copied = export_tokenizer(folder, state, trained.base, request.tokenizer)
        files = write_tensors(folder, trained.tensors(), int(request.max_shard_gb * 1e9))
        written = write_generation(folder, content, run, trained.base, request.tokenizer)
        write_json(folder / "config.json", content)
        (folder / CARD_FILE).write_text(model_card(trained.facts), encoding="utf-8")
    # The tokenizer `bytes` writes its files over copied ones.
    names = dict.fromkeys(["config.json", *files, *copied, *written, CARD_FILE])
    return f"{request.output}: {', '.join(names)}"


class Trained:
    """The weights of a checkpoint as Hugging Face tensors, and the content of their `config.json`.

    Weights that the run left in the files of its base are not in the checkpoint. They are read from the base.
    """

    def __init__(self, request: Export, state: dict[str, Any]) -> None:
        self.run = run = state["config"]
        base = request.base or run["model"]["hf_path"]
        self.base = None if base is None else Path(base).expanduser()
        self.lora = run["lora"]
        self.stored = checkpoint_weights(request.checkpoint)
        family = FAMILIES[run["model"]["family"]]
        self.content = config_content(family, run["model"], self.base, self.stored)
        config = family.config_from_hf(self.content)
        self.names = family.hf_names(config)
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
        self._dtype = request.dtype or run["training"]["dtype"]
        self.facts = card_facts(request, state, self.base, self.content)
        self._released: PretrainedWeights | None = None
        # The base is opened for the types of its tensors, or for weights that the checkpoint lacks.
        asks_base = request.dtype is None or not self.names.keys() <= self.stored.keys()
        if self.base is not None and asks_base and not request.adapters:
            self._released = open_weights(self.base, family, config, shapes)
            self.names = dict(self._released.names)
        self._dtypes = self._released.dtypes() if self._released and request.dtype is None else {}

    def tensors(self) -> Iterator[ExportedTensor]:
        """Return all weights, with adapters merged."""
        tensors = self._unstacked(self.names)
        if not self.adapters:
            return iter(tensors)
        return merge_adapters(tensors, self._pairs(), self.lora["alpha"] / self.lora["rank"])

    def adapter_tensors(self) -> Iterable[ExportedTensor]:
        """Return the adapters alone, in fp32."""
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
    make_folder(unfinished)
    yield unfinished
    # First the files, then their folder: the new name must never point at a folder whose files a crash could lose.
    for written in (*unfinished.rglob("*"), unfinished):
        sync_entry(written)
    unfinished.rename(path)
    sync_entry(path.parent)


def write_adapters(request: Export, trained: Trained, state: dict[str, Any]) -> str:
    """Write a PEFT folder, with the tokenizer. Returns a line that lists its files."""
    output = request.output
    # PEFT looks a relative folder up from wherever it is started.
    base = None if trained.base is None else str(trained.base.absolute())
    with new_folder(output) as folder:
        copied = export_tokenizer(folder, state, trained.base, request.tokenizer)
        # PEFT reads one file, so there are no shards.
        write_tensors(folder, trained.adapter_tensors(), sys.maxsize, ADAPTER_TENSOR_FILE)
        write_json(
            folder / ADAPTER_CONFIG_FILE,
            peft_config(trained.lora, trained.adapters, trained.module_names, base),
        )
        (folder / CARD_FILE).write_text(model_card(trained.facts), encoding="utf-8")
    return f"{output}: {', '.join([ADAPTER_CONFIG_FILE, ADAPTER_TENSOR_FILE, *copied, CARD_FILE])}"


def card_facts(
    request: Export, state: dict[str, Any], base: Path | None, content: dict[str, Any]
) -> CardFacts:
    """Collect what the model card says. The losses are in the run's folder, if the checkpoint still is."""
    step = read_manifest(request.checkpoint).step
    metrics = request.checkpoint.resolve().parent.parent / METRICS_FILE
    name = content.get("_name_or_path")
    return CardFacts(
        run=state["config"],
        step=step,
        tokens=state.get("tokens"),
        base=base,
        base_name=name if isinstance(name, str) else None,
        records=read_records(metrics, step),
        adapters=request.adapters,
    )


def config_content(
    family: ModelFamily, table: dict[str, Any], base: Path | None, stored: dict[str, StoredTensor]
) -> dict[str, Any]:
    """Make the content of `config.json`: the base's without its quantisation, or the trained shape's."""
    if base is None:
        # The embedding's rows, because the tokenizer may have decided their number.
        shape = {key: value for key, value in (table.get("shape") or {}).items() if value is not None}
        shape["vocab_size"] = stored["embedding.weight"].shape[0]
        return family.config_to_hf(family.config_from_shape(shape, table["flavor"]))
    try:
        content: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HFError(
            f"{base / 'config.json'} cannot be read: {error}; --base says where the folder is now"
        ) from error
    content.pop("quantization_config", None)
    return content
