"""Writing a Hugging Face folder's safetensors from tensors that are in other files, piece by piece, and its model card.

Memory holds one piece at a time, so a model of any size is exported with a few MiB.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchround.checkpoint.tensor_file import encode_header, memory_of
from torchround.hf.tensor_folder import INDEX_FILE, SINGLE_FILE, HFError, StoredTensor, TensorFiles
from torchround.layer import HFTensors, names_in, part_shape
from torchround.untrusted.terminal import terminal_safe

SHARD_BYTES = 5 * 10**9  # as transformers writes them


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor to be written under `name` in `dtype`, with the numbers of `source`."""

    name: str
    source: StoredTensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.source.shape) * self.dtype.itemsize

    def pieces(self, files: TensorFiles) -> Iterator[Tensor]:
        """Yield the numbers in order, flat, a few MiB at a time."""
        for _, piece in files.pieces(self.source):
            yield piece.to(self.dtype)


def unstack(
    names: Mapping[str, HFTensors],
    stored: Mapping[str, StoredTensor],
    dtype_of: Callable[[str], torch.dtype],
    base: Mapping[str, StoredTensor] | None = None,
) -> Iterator[ExportedTensor]:
    """Yield every Hugging Face tensor of the parameters in `names`, cutting a stacked parameter into its tensors.

    `stored` has the parameters of a checkpoint by name. A parameter that is missing there was mapped from the
    folder `base`, whose tensors are given under their own names. Raises `HFError` if there is no base either.
    """
    for parameter, tensors in names.items():
        if parameter not in stored:
            if base is None:
                raise HFError(
                    f"{parameter} is not in the checkpoint, and there is no base folder to take it from"
                )
            for name in names_in(tensors):
                yield ExportedTensor(name, base[name], dtype_of(name))
            continue
        source = stored[parameter]
        parts, shape = names_in(tensors), part_shape(tensors, source.shape)
        part_bytes = source.nbytes // len(parts)
        for index, name in enumerate(parts):
            part = replace(source, shape=shape, begin=source.begin + index * part_bytes, nbytes=part_bytes)
            yield ExportedTensor(name, part, dtype_of(name))


def keep_packed(
    tensors: Iterable[ExportedTensor], base: Mapping[str, StoredTensor]
) -> tuple[list[ExportedTensor], list[str] | None]:
    """Put the codes and scales of `base` in the place of numbers that they still stand for.

    What programs run as one stays packed as a whole or not at all: the projections of an attention or of a feed-forward
    network, the experts of a block. Returns the tensors and the modules that only `base` packs; None if nothing is packed.
    """
    tensors = list(tensors)
    packed = {
        one.name: base[one.name] for one in tensors if one.name in base and len(base[one.name].parts) > 1
    }
    with TensorFiles() as files:
        fit = {one.name for one in tensors if one.name in packed and _is_same(files, one, packed[one.name])}
    changed = {_group(name) for name in packed.keys() - fit}
    kept: list[ExportedTensor] = []
    for one in tensors:
        stays = one.name in packed and _group(one.name) not in changed
        parts = packed[one.name].parts if stays else ()
        kept += [ExportedTensor(part.name, part, part.known_dtype) for part in parts] or [one]
    modules = [name for name in packed if _group(name) in changed]
    paths = [_group(name) if ".experts." in name else name.removesuffix(".weight") for name in modules]
    return kept, list(dict.fromkeys(paths)) if len(modules) < len(packed) else None


def _group(name: str) -> str:
    """Name the module above a weight's own; for experts the module of all of them."""
    return re.sub(r"\.experts\b.*", ".experts", name.removesuffix(".weight").rpartition(".")[0])


def _is_same(files: TensorFiles, tensor: ExportedTensor, packed: StoredTensor) -> bool:
    """Check whether a tensor without adapters has the numbers of `packed`, rounded to the type that it is stored in."""
    source = tensor.source
    if type(tensor) is not ExportedTensor or source is packed:
        return type(tensor) is ExportedTensor
    dtype = source.known_dtype
    for start, piece in files.pieces(packed):
        rounded = piece.to(dtype, copy=True)  # the next read overwrites the piece
        found = source.read(files, start * dtype.itemsize, len(piece) * dtype.itemsize)
        if not torch.equal(found.view(dtype), rounded):
            return False
    return True


def write_tensors(folder: Path, tensors: Iterable[ExportedTensor], only_file: str = "") -> list[str]:
    """Write `only_file`, otherwise files of at most `SHARD_BYTES` (a larger tensor gets its own), and an index if several.

    Returns their names.
    """
    shards, whole = [list(tensors)] if only_file else _shards(tensors), only_file or SINGLE_FILE
    where: dict[str, str] = {}
    with TensorFiles() as files:
        for number, shard in enumerate(shards, start=1):
            name = whole if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with open(folder / name, "xb") as out:
                # Wide elements first: each tensor is then aligned to its element, as in files of the safetensors library.
                shard.sort(key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
                out.write(encode_header({one.name: (one.dtype, tuple(one.source.shape)) for one in shard}))
                for tensor in shard:
                    out.writelines(memory_of(piece) for piece in tensor.pieces(files))
            where |= dict.fromkeys((tensor.name for tensor in shard), name)
    if len(shards) > 1:
        total_bytes = sum(tensor.nbytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return sorted(set(where.values()))


def _shards(tensors: Iterable[ExportedTensor]) -> list[list[ExportedTensor]]:
    shards: list[list[ExportedTensor]] = []
    filled_bytes = 0
    for tensor in tensors:
        if not shards or filled_bytes + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(tensor)
        filled_bytes += tensor.nbytes
    return shards


# The model card: `README.md` with a head in YAML, as model hubs read it. It names the base, the data and the settings. It holds
# names of folders but no paths: a card is published.

CARD_FILE = "README.md"
UNPACKED = "bf16"  # of `lora.base`

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")

SHOWN = {
    "training": "seq_len global_batch_size max_norm",
    "optimizer": "lr betas eps weight_decay",
    "lr_schedule": "warmup_steps decay min_lr_factor",
    "engine": "update",
    "lora": "rank alpha base rslora dora rank_pattern alpha_pattern dropout targets",
    "run": "seed",
}
"""The settings in the table. Others say where the run was, not what it learnt."""


def model_card(
    run: Mapping[str, Any],
    step: int,
    tokens: Any,
    base: Path | None,
    base_name: Any,
    adapters: bool,
    original_base: bool = False,
) -> str:
    """Write the card of a run's configuration: after `step`, with `tokens` labels so far, from a base of this name in its config.

    What a checkpoint has for the tokens, and the base's config for the name, may be anything.
    """
    known, sources = hub_name(base, base_name), run.get("data", {}).get("sources", ())
    lines = [
        "---",
        f"library_name: {'peft' if adapters else 'transformers'}",
        "pipeline_tag: text-generation",
    ]
    if known is not None:  # a JSON string is a YAML string
        relation = "adapter" if adapters else "finetune"
        lines += [f"base_model: {json.dumps(known)}", f"base_model_relation: {relation}"]
    if datasets := dict.fromkeys(filter(None, map(_dataset, sources))):
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in datasets)]
    model, title = run["model"], run.get("run", {}).get("name", "model")
    lines += ["tags: [torchround]", "---", "", f"# {title}", ""]
    made_of = model.get("flavor") or "a shape of its own"
    made = f"A {model['family']} model ({made_of}), trained from scratch with torchround."
    if base is not None:
        made = f"A {model['family']} model, trained from {_code(known or base.name)} with torchround."
    lines.append(made)
    if (packed := (run.get("lora") or {}).get("base", UNPACKED)) != UNPACKED and not adapters:
        into = "the released weights" if original_base else "the rounded weights that they were trained on"
        lines.append(f"The adapters were trained on a base in {_code(packed)} and are merged into {into}.")
    lines += ["", "## Data", ""]
    for source in sources:
        shown = _dataset(source) or Path(source["path"]).name or source["path"]
        lines.append(
            f"- {_code(shown)}: {source.get('content', 'text')}, weight {source.get('weight', 1.0):g}"
        )
    lines += ["", "## Training", "", "| | |", "|---|---|", f"| steps | {step:,} |"]
    lines += [f"| labels trained on | {tokens:,} |"] if type(tokens) is int else []
    for table, keys in SHOWN.items():
        values = run.get(table) or {}
        if table != "lora" or values.get("rank"):
            given = [key for key in keys.split() if values.get(key) not in (None, False, {}, UNPACKED)]
            lines += [f"| {table}.{key} | {_code(values[key])} |" for key in given]
    return "\n".join([*lines, f"| training.dtype | {_code(run['training']['dtype'])} |"]) + "\n"


def hub_name(base: Path | None, base_name: Any) -> str | None:
    """Find the base's name on the Hugging Face hub, from its folder in the hub's cache or from its `config.json`."""
    cached = CACHED.search(f"{base}/") if base is not None else None
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    return base_name if isinstance(base_name, str) and HUB_NAME.fullmatch(base_name) else None


def _dataset(source: Mapping[str, Any]) -> str | None:
    path = source["path"]
    is_named = source.get("format") == "dataset" and HUB_NAME.fullmatch(path) is not None
    return path if is_named and not Path(path).exists() else None


def _code(value: Any) -> str:
    """Write a value as code that no value can break out of: on one line, and without backticks or pipes."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{re.sub(r'[`|]', '?', ' '.join(str(terminal_safe(text)).split()))}`"
