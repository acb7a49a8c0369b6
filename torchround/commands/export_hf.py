"""Export a checkpoint as a Hugging Face folder that `transformers` loads and generates from.

It holds the config, safetensors with an index, the tokenizer's files, the settings of generation and a model card.

    torchround export_hf CHECKPOINT my-model --config outputs/my-run/config.toml

A checkpoint may be another person's, and could name any file of yours. So a run that took files from a folder
(`model.hf_path`, `tokenizer.path`, `tokenizer.chat_template`) or has a `model.module` needs `--config`, its own config, or
these keys on the command line: `--model.hf_path FOLDER`.

Adapters (`[lora]`) are merged into the weights; `--adapters` writes them alone, as a folder that PEFT loads.

The export streams from file to file, so it needs a few MiB of memory for a model of any size. Every tensor keeps the type
that it has in `model.hf_path`; without such a folder it gets the training dtype. `--dtype` sets one type for all. Weights
that the folder packs (FP8, MXFP4) become bf16; with `--frozen original` those that training left as they were keep its codes
and scales. The folder appears once it is complete. Exit code 2: an argument cannot be used.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from torchround.checkpoint import CheckpointError, verify_checkpoint
from torchround.checkpoint.folders import STATE_FILE, new_folder
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.commands import end_with_message, new_parser
from torchround.commands.configured_model import MISTAKES, SavedModel, open_saved_model
from torchround.config import Config, Options, load_config, show
from torchround.config.load import RawConfig, parse_overrides, with_overrides
from torchround.data import DataError, MissingTokenizerError, Tokenizer, TokenizerError, build_tokenizer
from torchround.data.document_types import Conversation
from torchround.data.loader import reads_conversations
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.template_files import TEMPLATE_FILE, TOKENIZER_FILES, export_tokenizer, folder_of
from torchround.hf import HFError
from torchround.hf import adapters as peft
from torchround.hf.export import CARD_FILE, ExportedTensor, keep_packed, model_card, unstack, write_tensors
from torchround.hf.packed import PackedTensor, RoundedTensor
from torchround.hf.tensor_folder import INDEX_FILE, QUANTISATION_KEYS, read_object
from torchround.layer import HFNames, names_in
from torchround.models import MAGNITUDE, Adapter, adapter_names, adapters_of, peft_config
from torchround.run.numbers import DTYPES
from torchround.untrusted.regular_file import refuse_links_out_of, write_whole
from torchround.untrusted.terminal import say

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Endings of the files of a model and its tokenizer that an export copies or reads.
PUBLISHED = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt")
# An export publishes what these keys lead to, and imports the module.
OWN_KEYS = ("model.hf_path", "model.module", "tokenizer.path", "tokenizer.chat_template")


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, help="folder of one checkpoint, in a run's checkpoints")
    add("output", type=Path, help="new folder")
    add("--config", help="the run's config, as it was trained or in its folder")
    add("--adapters", action="store_true", help="LoRA adapters alone, in PEFT's format")
    add(
        "--original-base",
        action="store_true",
        help="merge into released weights, not as lora.base rounds them",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--dtype", choices=DTYPES, help="type of every tensor")
    kinds.add_argument("--frozen", choices=("original",), help="FP8 and MXFP4 where weights did not change")
    given, overrides = parser.parse_known_args(arguments)

    def run() -> None:
        own = None if given.config is None else load_config(given.config)
        asked = {"adapters": given.adapters, "dtype": given.dtype, "packed": given.frozen is not None}
        asked["original_base"] = given.original_base
        say(export(given.checkpoint, given.output, own, overrides, **asked))

    return end_with_message(run, (*MISTAKES, CheckpointError, OSError))


def export(
    checkpoint: Path,
    output: Path,
    own: Config | None = None,
    overrides: Sequence[str] = (),
    *,
    adapters: bool = False,
    dtype: str | None = None,
    packed: bool = False,
    original_base: bool = False,
) -> str:
    """Write the folder. Returns a line that lists its files.

    `own` and `overrides` are the user's own, and give the keys of `OWN_KEYS`. `dtype` is a name in `DTYPES`; None keeps
    the type that each tensor has in the base. `packed` keeps its codes of weights that did not change. Raises `HFError`, `CheckpointError`, `ConfigError`, `ModelConfigError`,
    `TokenizerError` or `OSError`; no folder of that name is left then.
    """
    if output.exists():
        raise HFError(f"{output} is there already; legal: a new folder")
    verify_checkpoint(checkpoint)
    state = read_state(checkpoint, read_manifest(checkpoint))
    options = saved_options(checkpoint, state.get("config"), own, overrides)
    config = options.config
    state["config"] = config.model_dump(mode="json")
    paths = config.model.hf_path, config.tokenizer.path
    base, tokenizer = (None if path is None else Path(path).expanduser() for path in paths)
    for folder in filter(None, (base, tokenizer)):
        refuse_links_out_of(folder_of(folder), PUBLISHED)
    saved = open_saved_model(options, checkpoint, opens_base=True)
    module_names = saved.family.module_names(saved.shape)
    trained = adapters_of(saved.model, module_names)
    if adapters and not trained:
        raise HFError(f"{checkpoint} has no adapters: its run had lora.rank = 0")
    content = {} if base is None else read_object(base / "config.json")
    content = content or saved.family.config_to_hf(saved.shape)
    # Releases write `dtype`, older ones `torch_dtype`; one of them in the export leaves no doubt.
    content["dtype"] = dtype or content.get("dtype", content.get("torch_dtype", config.training.dtype))
    content.pop("torch_dtype", None)
    called, tokens, step = content.get("_name_or_path"), state.get("tokens"), read_manifest(checkpoint).step
    card = model_card(state["config"], step, tokens, base, called, adapters, original_base)
    with new_folder(output) as folder:
        # First, because it fails at once if the run's template is gone.
        copied = export_tokenizer(folder, state, base, tokenizer)
        if adapters:
            # PEFT reads one file, and looks a relative folder up from wherever it is started.
            tensors = adapter_tensors(saved, trained, adapter_names(saved.model, module_names))
            files = write_tensors(folder, tensors, peft.TENSOR_FILE)
            name, written = peft.CONFIG_FILE, []
            place = None if base is None else str(base.absolute())
            names = [module_names[weight] for weight in trained]
            content = peft_config(state["config"]["lora"], names, module_names.values(), place)
            # A tower's modules may have the same last parts.
            if saved.base is not None and saved.base.carried:
                body = re.split(r"\d+\.", str(names[0]), maxsplit=1)[0]
                content["exclude_modules"] = f"(?!{re.escape(body)}).*"
        else:
            merged: Iterable[ExportedTensor] = hf_tensors(saved, config, dtype, trained, original_base)
            unpacked: list[str] | None = None
            if packed and saved.base is not None:
                merged, unpacked = keep_packed(merged, saved.base.tensors)
            set_quantisation(content, unpacked)
            files = write_tensors(folder, merged)
            name, written = "config.json", write_generation(folder, content, config)
            if saved.base is not None and saved.base.carried:
                written += copy_others(folder, saved.base.folder)
        write_json(folder / name, content)
        write_whole(folder / CARD_FILE, card)
    # The tokenizer `bytes` writes its files over copied ones.
    return f"{output}: {', '.join(dict.fromkeys([name, *files, *copied, *written, CARD_FILE]))}"


def saved_options(checkpoint: Path, saved: Any, own: Config | None, overrides: Sequence[str]) -> Options:
    """Return the run's configuration as a checkpoint has saved it, with the user's own keys.

    Raises `ConfigError` if it is none, or for one of `OWN_KEYS` that the checkpoint alone gives.
    """
    raw = RawConfig(str(checkpoint / STATE_FILE), saved)
    if not isinstance(saved, dict):
        raise HFError(f"{raw.main_source} holds no configuration of a run")
    given = {} if own is None else {key: attrgetter(key)(own) for key in OWN_KEYS}
    options = with_overrides(raw, [*given.items(), *parse_overrides(overrides)])
    for key in OWN_KEYS:
        if (value := attrgetter(key)(options.config)) is not None and key not in raw.sources:
            text = "an export publishes no file because a checkpoint names it, nor a module: importing it would run it"
            hint = f"give --{key}, or --config with the run's config"
            raise options.error(key, f"given {show(value)}; {text}; {hint}")
    return options


def adapter_tensors(
    saved: SavedModel, adapters: Mapping[str, Adapter], names: HFNames
) -> Iterator[ExportedTensor]:
    """Yield the tensors of PEFT's file, in fp32. `names` are those of the adapters' parameters there."""
    stored, base = saved.weights.tensors, saved.base
    for weight, adapter in adapters.items():
        for parameter in adapter.parameters:
            for tensor in unstack({parameter: names[parameter]}, stored, lambda name: torch.float32):
                if tensor.name.endswith(MAGNITUDE):
                    frozen = stored.get(weight)
                    if frozen is None and base is not None:
                        frozen = base.tensors[str(base.names[weight])]
                    assert frozen is not None, "a weight is in the checkpoint or in the base"
                    tensor = peft.MagnitudeTensor(tensor.name, tensor.source, tensor.dtype, frozen)
                yield tensor


def hf_tensors(
    saved: SavedModel,
    config: Config,
    dtype: str | None,
    adapters: Mapping[str, Adapter],
    original_base: bool = False,
) -> Iterable[ExportedTensor]:
    """Yield the tensors of the model, with `adapters` merged: in `dtype`, otherwise in the types that the base has.

    Weights that the run left in the files of its base are not in the checkpoint. They are read from the base.
    """
    stored, base = saved.weights.tensors, saved.base
    names = saved.family.hf_names(saved.shape) if base is None else dict(base.names)
    in_base = {} if base is None else dict(base.tensors)
    for weight, packed in () if base is None or original_base else saved.model.packed.items():
        # Merged into the numbers that the adapters were trained with.
        trained_in = DTYPES[config.training.dtype]
        for name in names_in(names[weight]):
            released = in_base[name]
            if not (isinstance(released, PackedTensor) and released.packs_as(packed)):
                in_base[name] = RoundedTensor.of(released, packed, trained_in)
    typed = {} if base is None or dtype else base.tensors
    otherwise = DTYPES[dtype or config.training.dtype]

    def dtype_of(name: str) -> torch.dtype:
        return typed[name].known_dtype if name in typed else otherwise

    def unstacked(names: HFNames) -> Iterator[ExportedTensor]:
        return unstack(names, stored, dtype_of, in_base or None)

    placed: dict[str, peft.StoredAdapter] = {}
    for weight, adapter in adapters.items():
        # One parameter may be several released tensors, such as one per expert. Taken apart alike, they match in order.
        theirs = list(unstacked({weight: names[weight]}))
        parts = names[weight] if adapter.num_experts == 1 else weight
        halves = [[one.source for one in unstacked({half: parts})] for half in adapter.parameters]
        # The tensors of an expert are one below the other. An adapter of one matrix, or a stack in one tensor, has no place.
        is_cut = 1 < adapter.num_experts <= len(theirs)
        for index, tensor in enumerate(theirs):
            a, b, *magnitude = (half[index % len(half)] for half in halves)
            expert, part = divmod(index, len(theirs) // adapter.num_experts) if is_cut else (0, 0)
            placed[tensor.name] = peft.StoredAdapter(
                *(a, b, magnitude[0] if magnitude else None, adapter.shape.scale),
                num_experts=adapter.num_experts,
                inputs_first=adapter.inputs_first,
                expert=expert,
                row=part * tensor.source.shape[0],
            )
    others = {} if base is None else base.carried
    carried = [ExportedTensor(name, tensor, tensor.known_dtype) for name, tensor in others.items()]
    merged = (
        peft.MergedTensor(one.name, one.source, one.dtype, placed[one.name]) if one.name in placed else one
        for one in unstacked(names)
    )
    return chain(merged, carried)


def set_quantisation(content: dict[str, Any], unpacked: Sequence[str] | None) -> None:
    """Name the modules that are `unpacked` in the quantisation of a config.json; None if no weight is packed: take it out."""
    for key in QUANTISATION_KEYS:
        for holder in (content, content.get("text_config")):
            table = holder.pop(key, None) if isinstance(holder, dict) else None
            if unpacked is None or not isinstance(holder, dict) or not isinstance(table, dict):
                continue
            is_compressed = table.get("quant_method") == "compressed-tensors"
            left = "ignore" if is_compressed else "modules_to_not_convert"
            # Without a list transformers leaves the head alone; with one only what it names.
            given = table.get(left) or ([] if is_compressed else ["lm_head"])
            holder[key] = {**table, left: [*given, *unpacked]}


def copy_others(folder: Path, base: Path) -> list[str]:
    """Copy the base's files that neither hold weights nor are the tokenizer's, such as a processor's. Returns their names."""
    own = {*TOKENIZER_FILES, TEMPLATE_FILE, "config.json", GENERATION_FILE, INDEX_FILE}
    names = [path.name for path in sorted(base.iterdir()) if path.suffix in PUBLISHED and path.is_file()]
    names = [name for name in names if name not in own and not name.endswith(".safetensors")]
    for name in names:
        shutil.copyfile(base / name, folder / name)
    return names


# What the folder needs beside the weights so that `transformers` generates text from it. config.json and generation_config.json
# get the ids of special tokens: a model without them would begin and end its text by the defaults of its class, which are
# tokens of another vocabulary. The tokenizer `bytes` has no file, so its export gets one.


def write_generation(folder: Path, content: dict[str, Any], config: Config) -> list[str]:
    """Write `generation_config.json`, and the files of the tokenizer `bytes`; put the special tokens into `content`.

    `content` is that of `config.json`, `config` the run's. Returns the names of the files. A tokenizer that is gone is a
    warning: the weights are exported anyway.
    """
    table, base = config.tokenizer, config.model.hf_path
    is_base = table.path is None or (base is not None and Path(table.path) == Path(base))
    keeps_tokens = base is not None and table.name is None and is_base
    ids: dict[str, Any] = {}
    files: dict[str, dict[str, Any]] = {}
    try:
        tokenizer = build_tokenizer(table, base)
    except (TokenizerError, MissingTokenizerError) as error:
        logger.warning("the export has no %s of its own: %s", GENERATION_FILE, error)
    else:
        # After training on chats text also ends with the token that ends the assistant's turn.
        more = turn_ends(tokenizer) if reads_conversations(config.data) else []
        ends = list(dict.fromkeys([tokenizer.eos_id, *more]))
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0]}
        ids["pad_token_id"] = tokenizer.pad_id
        if not keeps_tokens:
            content.update(ids)  # None too: a class may have another default
        if table.name == "bytes":
            files = byte_tokenizer_files(tokenizer)
    if settings := generation_content(base, ids, keeps_tokens):
        files[GENERATION_FILE] = settings
    for name, written in files.items():
        write_json(folder / name, written)
    return list(files)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")


def turn_ends(tokenizer: Tokenizer) -> list[int]:
    """Find the token that ends the assistant's turn in the chat template. Without a template there is none."""
    chat = Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
    try:
        spans = ChatTemplate(tokenizer)(chat)
    except (TokenizerError, DataError):
        return []  # no template, or one that no chat of the run was written with
    ends = [span.text for span in spans if span.learn and span.special]
    return [tokenizer.special_id(text) for text in ends[-1:]]


def generation_content(base: str | None, ids: Mapping[str, Any], same_tokens: bool) -> dict[str, Any]:
    """Put the ids of special tokens into the base's settings of generation. Raises `HFError`.

    `same_tokens`: the run kept the base's tokenizer. The base's own ids then stay, and the ends that training has added
    join them. Otherwise they are ids of another vocabulary.
    """
    content = {} if base is None else _read(base, GENERATION_FILE)
    found = {key: value for key, value in ids.items() if value is not None}
    if same_tokens and content:
        ends = _as_list(content.get("eos_token_id"))
        ends += [end for end in _as_list(found.pop("eos_token_id", None)) if end not in ends]
        if ends:
            content["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        return {**found, **content}
    return {**{key: value for key, value in content.items() if key not in ID_KEYS}, **found}


def _as_list(ids: Any) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, Sequence) else [ids]


def stop_tokens(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text: of a document, of a turn in a chat, and what the model's folder names."""
    ends = [tokenizer.eos_id, *turn_ends(tokenizer)]
    table, base = config.tokenizer, config.model.hf_path
    # A tokenizer from elsewhere has other ids. The settings of generation come before the model's.
    if base is not None and table.path in (None, base) and table.name is None:
        settings = [_read(base, name).get("eos_token_id") for name in (GENERATION_FILE, "config.json")]
        named = next((found for found in settings if found is not None), None)
        ends += [end for end in _as_list(named) if type(end) is int]
    return tuple(dict.fromkeys(ends))


def _read(folder: str, name: str) -> dict[str, Any]:
    path = Path(folder).expanduser() / name
    return read_object(path) if path.is_file() else {}


def byte_tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    import tokenizers  # here: a run on a bare machine exports nothing
    from tokenizers import decoders, models, pre_tokenizers, processors

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    # The names of bytes in files of the package tokenizers: printable Latin-1 as itself, the others from U+0100 on.
    names = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    written = tokenizers.Tokenizer(models.BPE({names[byte]: byte for byte in range(256)}, []))
    written.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    written.decoder = decoders.ByteLevel()
    # In the order of their ids, which follow those of the bytes.
    written.add_special_tokens(sorted(tokenizer.special, key=tokenizer.special.__getitem__))
    bos = tokenizer.template_tokens["bos_token"]
    written.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.special[bos])]
    )
    return {
        "tokenizer.json": json.loads(written.to_str()),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.template_tokens},
    }
