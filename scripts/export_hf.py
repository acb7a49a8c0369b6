"""A checkpoint as a Hugging Face folder that `transformers` loads: config, safetensors with index, tokenizer files.

    python scripts/export_hf.py outputs/my-run/checkpoints/step-1000 my-model

Adapters (`[lora]`) are merged into the weights; `--adapters` writes them alone, as a folder that PEFT loads.

Streams from file to file, so it needs a few MiB of memory for a model of any size. Every tensor gets the type that
it has in `model.hf_path`, and without one (or where that is MXFP4) the training dtype; `--dtype` sets one for all.
The folder appears once it is complete. Exit code 2: something given cannot be used.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from models import (
    FAMILIES,
    Family,
    LoraShape,
    ModelConfigError,
    adapter_names,
    adapter_pairs,
    add_adapters,
    peft_config,
)
from models.common.family import HFNames
from torchround.checkpoint import CheckpointError, verify_checkpoint
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.hf import HFError, PretrainedWeights
from torchround.hf.export import SHARD_BYTES, ExportedTensor, merge_adapters, unstack, write_tensors
from torchround.hf.folder import StoredTensor, read_header

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What a tokenizer, or a generation, is made of, where it is there.
COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json"),
)


def main(arguments: list[str]) -> int:
    """Export, and return the exit code."""
    options = parse(arguments)
    try:
        export(options)
    except (HFError, CheckpointError, ModelConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="folder step-N of a run's checkpoints")
    parser.add_argument("output", type=Path, help="new folder")
    parser.add_argument("--base", type=Path, help="model.hf_path, if it has moved since")
    parser.add_argument("--adapters", action="store_true", help="LoRA adapters alone, in PEFT's format")
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer files (default: the run's)")
    parser.add_argument("--dtype", choices=DTYPES, help="type of every tensor")
    parser.add_argument("--max-shard-gb", type=float, default=SHARD_BYTES / 1e9, help="10^9 bytes per file")
    return parser.parse_args(arguments)


def export(options: argparse.Namespace) -> None:
    """Write the folder. Raises `HFError`, `CheckpointError`, `ModelConfigError` or `OSError`."""
    if options.output.exists():
        raise HFError(f"{options.output} is there already; legal: a new folder")
    verify_checkpoint(options.checkpoint)
    run = read_state(options.checkpoint, read_manifest(options.checkpoint))["config"]
    stored = checkpoint_weights(options.checkpoint)
    base = options.base or run["model"]["hf_path"]
    base = None if base is None else Path(base).expanduser()
    family = FAMILIES[run["model"]["family"]]
    content = config_content(family, run["model"], base, stored)
    model = family.config_from_hf(content)
    names = family.hf_names(model)
    lora, adapters = run["lora"], {}
    if lora["rank"]:
        built = family.build(model)
        shape = LoraShape(lora["rank"], lora["alpha"], lora["dropout"], tuple(lora["targets"]))
        add_adapters(built, names, shape)
        adapters = adapter_names(built, names)
    if options.adapters:
        if not adapters:
            raise HFError(f"{options.checkpoint} has no adapters: its run had lora.rank = 0")
        content = peft_config(lora, adapters, names, None if base is None else str(base))
        write_adapters(options.output, unstack(adapters, stored, lambda name: torch.float32), content)
        return
    dtype_of = tensor_dtypes(options.dtype, run["training"]["dtype"], family, model, base)
    content["dtype"] = options.dtype or content.get(
        "dtype", content.get("torch_dtype", run["training"]["dtype"])
    )
    content.pop("torch_dtype", None)

    unfinished = options.output.with_name(options.output.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tensors = unstack(names, stored, dtype_of)
    if adapters:
        pairs = tensor_pairs(names, adapters, stored)
        tensors = merge_adapters(tensors, pairs, lora["alpha"] / lora["rank"])
    files = write_tensors(unfinished, tensors, int(options.max_shard_gb * 1e9))
    (unfinished / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer = options.tokenizer or run["tokenizer"]["path"] or base
    copied = copy_files(Path(tokenizer).expanduser(), unfinished) if tokenizer else []
    unfinished.rename(options.output)
    print(f"{options.output}: {', '.join(['config.json', *files, *copied])}")


def write_adapters(output: Path, tensors: Iterable[ExportedTensor], content: dict[str, Any]) -> None:
    """A PEFT folder."""
    unfinished = output.with_name(output.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_tensors(unfinished, tensors, sys.maxsize, "adapter_model.safetensors")
    (unfinished / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(output)
    print(f"{output}: adapter_config.json, adapter_model.safetensors")


def tensor_pairs(
    names: HFNames, adapters: HFNames, stored: dict[str, StoredTensor]
) -> dict[str, tuple[ExportedTensor, ExportedTensor]]:
    """Hugging Face tensor to the A and B that are added to it."""
    pairs = {}
    for adapted, halves in adapter_pairs(adapters).items():
        theirs, a, b = (
            list(unstack({key: names_of}, stored, lambda name: torch.float32))
            for key, names_of in [(adapted, names[adapted]), *((half, adapters[half]) for half in halves)]
        )
        pairs |= {tensor.name: pair for tensor, pair in zip(theirs, zip(a, b, strict=True), strict=True)}
    return pairs


def checkpoint_weights(checkpoint: Path) -> dict[str, StoredTensor]:
    """The authoritative weights by parameter name."""
    found = {}
    for path in sorted(checkpoint.glob("tensors-*.safetensors")):
        for name, tensor in read_header(path).items():
            if name.startswith("weights/"):
                found[name.removeprefix("weights/")] = tensor
    return found


def config_content(
    family: Family[Any], table: dict[str, Any], base: Path | None, stored: dict[str, StoredTensor]
) -> dict[str, Any]:
    """What `config.json` is to hold: that of the base, without its quantisation, or that of the flavor."""
    if base is None:
        vocab_size = stored["embedding.weight"].shape[0]
        return family.config_to_hf(family.config_from_flavor(table["flavor"], vocab_size=vocab_size))
    try:
        content: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HFError(
            f"{base / 'config.json'} cannot be read: {error}; --base says where the folder is now"
        ) from error
    content.pop("quantization_config", None)
    return content


def tensor_dtypes(
    given: str | None, trained: str, family: Family[Any], model: Any, base: Path | None
) -> Callable[[str], torch.dtype]:
    """The type to write each tensor in."""
    if given is not None or base is None:
        return lambda name: DTYPES[given or trained]
    shapes = family.build(model).stored_shapes()
    pretrained = PretrainedWeights(base, family.hf_names(model), shapes, family.hf_redundant(model))
    return pretrained.dtypes().__getitem__


def copy_files(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer's files. Their names."""
    folder = source if source.is_dir() else source.parent
    names = [name for name in COPIED if (folder / name).is_file()]
    for name in names:
        shutil.copyfile(folder / name, target / name)
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
