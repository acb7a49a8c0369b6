"""Fine-tune a released model on your data: chooses the settings, plans, trains, validates and exports.

    torchround finetune Qwen3-1.7B chats.jsonl --lora 16
    torchround finetune Qwen/Qwen3-1.7B HuggingFaceH4/no_robots --lora 16 --steps 200 --training.seq_len 1024

MODEL is a release's folder, or its name on the Hugging Face hub. DATA is a file, a glob, a folder of such files, or a
dataset's name on the hub. Only what is named is fetched, into the hub's own cache, and not again if it is there.
Any key of a config can follow, as for train.py, and wins over what the command would choose.

The run's folder gets finetune.toml, the config with a reason for each value. The same command again continues a run that
was interrupted. Exit codes are those of train.py.
"""

import argparse
import difflib
import errno
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torchround.accelerators import deterministic_operations, present_kind
from torchround.commands import end_with_message, new_parser, positive_integer
from torchround.commands.configured_model import find_tokenizer, model_config, with_family
from torchround.commands.plan_run import configured_question
from torchround.commands.train_model import FAULTS, MISTAKES, build_parts, export_result, train_parts
from torchround.config import Options, SourceTable, show
from torchround.config.load import RawConfig, config_error, parse_overrides, read_config, with_overrides
from torchround.data import DataError, Tokenizer, TokenizerError
from torchround.data.formats.content import fields_of, likely_content
from torchround.data.formats.files import KINDS, find_files, kind_of
from torchround.data.formats.streams import open_source
from torchround.data.loader import open_sources, packs_whole_documents
from torchround.data.reading_order import DocumentPiece
from torchround.data.tokenising import tokenise
from torchround.planning.memory import size_text
from torchround.planning.plan_report import fits
from torchround.run.hardware import find_hardware
from torchround.run.run_folder import require_room
from torchround.run.several_machines import joined_machines
from torchround.untrusted.regular_file import write_whole
from torchround.untrusted.terminal import say

FILE = "finetune.toml"
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SAMPLED = 1000  # documents whose tokens are counted
MOST_TOKENS, MICRO_BATCH_TOKENS, FEW_STEPS = 4096, 8192, 50
SAVED_DATASET = ("dataset_dict.json", "state.json")
# Makes the error of an argument: its name, and what is wrong with it.
mistake = partial(config_error, "")


def main(arguments: list[str]) -> int:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder of a release, or its name on the hub")
    add("data", metavar="DATA", help="file, glob, folder, or name of a dataset on the hub")
    add("--lora", type=positive_integer, metavar="RANK", help="train adapters (default: all weights)")
    add("--out", type=Path, metavar="FOLDER", help="folder of the run (default: outputs/MODEL-DATA)")
    add("--steps", type=positive_integer, metavar="N", help="steps (default: 1 or 3 passes over the data)")
    add("--split", default="train", help="split of a dataset (default: train)")
    add("--subset", help="named configuration of a dataset that has several")
    given, rest = parser.parse_known_args(arguments)
    given.command = f"torchround finetune {shlex.join(arguments)}"
    return end_with_message(lambda: finetune(given, rest), MISTAKES, FAULTS)


def finetune(given: argparse.Namespace, overrides: Sequence[str]) -> int:
    folder = given.out or Path("outputs") / f"{_name(given.model)}-{_name(given.data.partition('.')[0])}"
    file, text = folder / FILE, None
    if file.is_file():
        first, *_ = file.read_text(encoding="utf-8").split("\n")
        if first != f"# {given.command}":
            text = f"{folder} holds the run of another command: {first.lstrip('# ')}; legal: that command, which continues it"
            more = f"another folder, or torchround train --config {file}, which takes changed keys"
            raise mistake("--out", f"{text}, {more}")
        options = with_overrides(read_config(file), ())
    else:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            legal = "legal: a new folder, or an empty one"
            raise mistake("--out", f"{folder} exists, and no run of this command is in it; {legal}")
        choices = choose(given, folder, dict(parse_overrides(overrides)))
        options, text = options_of(choices), toml_text(given.command, choices)
    with (
        deterministic_operations(options.config.training.deterministic),
        joined_machines(os.environ, options.config) as machines,
    ):
        parts = build_parts(options, machines)
        if text is not None and machines.is_first:
            require_room(parts.folder, parts.question)
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)
            say(f"{file}:\n{text}")
        code = train_parts(parts)
        if code != 0 and machines.is_first:
            say(f"continue  {given.command}")
        elif machines.is_first:  # say where the results are, how to sample from them and how to go on
            config, run = parts.config, parts.folder
            asked = f"--run {shlex.quote(str(run.path))}"
            if config.checkpoint.export == "weights":
                asked = f"--model {shlex.quote(str(export_result(run, config, adapters=False)))}"
                if config.lora.rank:
                    adapters = export_result(run, config, adapters=True, name="adapters")
                    say(f"adapters  {adapters} (peft loads them)")
            chats = " --chat" * packs_whole_documents(config.data)
            say(f'sample    torchround try_model {asked}{chats} --prompt "..."')
            more = "--training.steps N" if config.data.epochs is None else "--data.epochs N"
            say(f"go on     torchround train --config {shlex.quote(str(file))} {more}")
    return code


def _name(path: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name).strip("-._") or "run"


# The settings.


@dataclass(frozen=True)
class Choice:
    """The value of a dotted key, and the reason for it."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Lengths:
    """The documents of the data: their number, the longest of the first ones in tokens, and all tokens, estimated."""

    documents: int
    longest: int
    tokens: float


def choose(given: argparse.Namespace, folder: Path, overrides: dict[str, Any]) -> list[Choice]:
    """Choose the settings that differ from the defaults. Raises `ConfigError`, and the errors of the model's folder."""
    if named := {"run.name", "run.folder"} & overrides.keys():
        raise mistake(f"--{' and --'.join(sorted(named))}", "legal here: --out FOLDER, which is both")
    name = folder.absolute().name
    source = find_source(given)  # first: a name that is wrong is found before a model is fetched
    model = find_model(given.model)
    try:
        source = source or {"path": fetch("dataset", given.data), "format": "dataset"}
        if source.get("format") == "dataset":
            source |= {"split": given.split, **({"subset": given.subset} if given.subset else {})}
        source["content"] = "text" if "data.sources" in overrides else content_of(SourceTable(**source))
        choices = [
            Choice("run.name", name, "its files, and those of a continued run, are in folder/name"),
            Choice("run.folder", str(folder.parent), "of the run's folder"),
            Choice("model.hf_path", model, "the release: weights, tokenizer and chat template"),
            Choice("data.sources", [source], f"its records hold {source['content']!r}"),
        ]
        options = with_family(options_of(_with_overrides(choices, overrides)))
        tokenizer = find_tokenizer(options)
        _, shape = model_config(options, tokenizer.vocab_size)
        lengths = measure(options, tokenizer, shape.vocab_size)
    except TokenizerError:
        raise  # it names its file
    except DataError as error:
        raise mistake("DATA", str(error)) from error
    steps = options.config.training.steps if "training.steps" in overrides else given.steps
    most_tokens = min(MOST_TOKENS, shape.known_positions)
    choices += _choices_of(steps, given.lora, options, lengths, most_tokens)
    choices = _with_overrides(choices, overrides)
    return [*choices, *_micro_batch(options_of(choices))]


def _choices_of(
    given_steps: int | None, rank: int | None, options: Options, lengths: Lengths, most_tokens: int
) -> Iterator[Choice]:
    training, data = options.config.training, options.config.data
    documents = f"{lengths.documents:,} documents of about {lengths.tokens:,.0f} tokens in all"
    if packs_whole_documents(data):
        whole = 1 << (lengths.longest - 1).bit_length()  # the next power of two
        seq_len = min(most_tokens, max(256, whole))
        why = f"the longest of the first {SAMPLED} has {lengths.longest} tokens; more are cut"
    else:
        seq_len, why = min(most_tokens, 2048), "documents are packed end to end"
        while seq_len > 64 and lengths.tokens < FEW_STEPS * seq_len:
            seq_len, why = seq_len // 2, f"short, for {FEW_STEPS} sequences of so little text"
    yield Choice("training.seq_len", seq_len, why)
    sequences = max(1.0, lengths.tokens / seq_len)
    epochs = 3 if sequences < 5000 else 1
    total = 16 * given_steps if given_steps else epochs * sequences
    batch = next((size for size in (16, 8, 4, 2) if total >= FEW_STEPS * size), 1)
    yield Choice("training.global_batch_size", batch, f"so that steps are many enough: {documents}")
    steps = given_steps or max(1, int(total / batch))
    if given_steps:
        yield Choice("training.steps", given_steps, "given on the command line")
    else:
        yield Choice("data.epochs", epochs, f"about {steps:,} steps")
    if warmup := steps // 20:
        yield Choice("lr_schedule.warmup_steps", warmup, "a twentieth of the steps")
    if lengths.documents >= 100:
        share = 0.05 if lengths.documents < 2000 else 0.02
        yield Choice("data.validation_fraction", share, "held out of training, for the validation loss")
        yield Choice("validation.interval_steps", max(1, steps // 5), "about five times in the run")
    if present_kind() is None and training.dtype != "float32":
        why = "this machine has no accelerator, and its processor is faster so"
        yield Choice("training.dtype", "float32", why)
    rate, kind = (2e-4, "adapters") if rank else (1e-5, "all weights")
    yield Choice("optimizer.lr", rate, f"usual for {kind}")
    if rank:
        yield Choice("lora.rank", rank, "adapters on the projections of attention")
        yield Choice("lora.alpha", float(rank), "as the rank: the adapters' output has a scale of 1")
    merged = "; the adapters are merged in, and written apart too" if rank else ""
    yield Choice("checkpoint.export", "weights", f"a Hugging Face folder at the end{merged}")


def _micro_batch(options: Options) -> Iterator[Choice]:
    """Yield the largest micro-batch that fits on accelerators. A virtual device is best with single sequences."""
    config = options.config
    if present_kind() is None or "training.micro_batch_size" in options.raw.sources:
        return
    hardware = find_hardware(config.engine)
    for_each = config.training.global_batch_size // hardware.num_devices
    most = max(1, min(MICRO_BATCH_TOKENS // config.training.seq_len, for_each))
    question = configured_question(options, hardware)
    size = 1 << (most.bit_length() - 1)  # a power of two
    while size > 1 and not fits(replace(question, micro_batch_size=size)):
        size //= 2
    if size > 1:
        yield Choice("training.micro_batch_size", size, "fits the devices, and each has one at least")


def _with_overrides(choices: Sequence[Choice], overrides: dict[str, Any]) -> list[Choice]:
    own = [choice for choice in choices if choice.key not in overrides]
    return [*own, *(Choice(key, value, "given on the command line") for key, value in overrides.items())]


def options_of(choices: Sequence[Choice]) -> Options:
    return with_overrides(RawConfig("torchround finetune"), ((each.key, each.value) for each in choices))


def toml_text(command: str, choices: Sequence[Choice]) -> str:
    """Write the choices as a config whose first line is the command."""
    tables: dict[str, list[str]] = {}
    for choice in choices:
        table, _, key = choice.key.partition(".")
        tables.setdefault(table, []).append(f"{key} = {_toml(choice.value)}  # {choice.why}")
    parts = [f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items()]
    head = f"# {command}\n# Only what differs from the defaults; docs/configuration.md has every key."
    return "\n\n".join([head, *parts]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # TOML's strings and booleans are JSON's, apart from one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# The data.


def find_source(given: argparse.Namespace) -> dict[str, Any] | None:
    """Return the source that DATA names on this machine, None for a name of the hub. Raises `ConfigError`."""
    name, path = given.data, Path(given.data).expanduser()
    if path.is_dir():
        if any((path / each).is_file() for each in SAVED_DATASET):
            return {"path": name, "format": "dataset"}
        files = [file.name.lower() for file in path.rglob("*") if file.is_file()]
        counts = {ending: sum(file.endswith(ending) for file in files) for ending in (*KINDS, ".txt")}
        ending = max(counts, key=lambda each: counts[each])
        if not counts[ending]:
            raise mistake("DATA", f"no file in {name} has one of the endings {', '.join(counts)}")
        return {"path": f"{name.rstrip('/')}/**/*{ending}"}
    if path.exists() or any(letter in name for letter in "*?["):
        return {"path": name}
    if not _is_hub_name(name) or name.lower().endswith((*KINDS, ".txt", ".csv", ".tsv")):
        raise mistake("DATA", f"there is no file or folder {name}{_nearest_entry(path)}")
    return None


def content_of(table: SourceTable) -> str:
    """Find the kind of content from the columns of the first record. Raises `ConfigError`, `DataError`."""
    if table.format != "dataset" and all(kind_of(path, "auto") == "text" for path in find_files(table.path)):
        return "text"
    documents = open_source(table.model_copy(update={"content": "messages"})).first_documents(10)
    names = next(filter(None, map(fields_of, documents)), [])
    if (found := likely_content(names)) is None:
        text = (
            f"the records of {table.path} have the columns {', '.join(names) or 'none'}; legal: messages or conversations, "
            "instruction and output, prompt and completion (or question and answer), text, or tokens; a column of text with "
            'another name takes --data.sources \'[{ path = "..", field = ".." }]\''
        )
        raise mistake("DATA", text)
    return found


def measure(options: Options, tokenizer: Tokenizer, vocab_size: int) -> Lengths:
    """Count the tokens of the first documents. Raises `DataError`, also if there are none."""
    data = options.config.data
    longest = counted = seen = documents = 0
    for source in open_sources(data, tokenizer, vocab_size):
        first = source.first_documents(SAMPLED)
        for document in first:
            tokens, offset = 0, 0
            while True:
                content, after = source.read(document, offset)
                piece = DocumentPiece(content, 0, document, first=offset == 0, last=after is None)
                tokens += len(tokenise(tokenizer, piece).tokens) if len(content) else 0
                if after is None:
                    break
                if document.file_bytes:  # the rest of a long file is taken to be like its beginning
                    tokens = tokens * document.file_bytes // after
                    break
                offset = after
            longest, counted = max(longest, tokens), counted + tokens
        seen += len(first)
        documents += source.count() or len(first)
    if not counted:
        raise DataError(f"{data.sources[0].path}: its first documents are empty")
    return Lengths(documents, longest, counted / seen * documents)


# The model, and the hub.


def find_model(name: str) -> str:
    """Return the folder of the model, fetched if it is a name on the hub. Raises `ConfigError`."""
    path = Path(name).expanduser()
    if path.is_file():
        raise mistake("MODEL", f"{name} is a file; legal: the folder of a release, or its name on the hub")
    if path.is_dir():
        return name
    near = _nearest_entry(path)
    if not _is_hub_name(name) or (near if len(path.parts) == 1 else path.parent.is_dir()):
        raise mistake("MODEL", f"there is no folder {name}{near}")
    return fetch("model", name)


def _is_hub_name(name: str) -> bool:
    return HUB_NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def _nearest_entry(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; nearest: {path.parent / near[0]}" if near else ""


def fetch(kind: str, name: str) -> str:
    """Fetch a repository of the hub into the hub's cache, unless it is there. Returns its folder. Raises `ConfigError`."""
    what = f"{kind.upper() if kind == 'model' else 'DATA'}: {name}"
    try:
        import huggingface_hub as hub
    except ImportError:
        needs = "pip install huggingface_hub datasets"
        raise mistake(what, f"there is no such folder, and fetching it from the hub needs {needs}") from None
    asked: dict[str, Any] = {"repo_type": kind, "allow_patterns": MODEL_FILES if kind == "model" else None}
    try:
        try:
            files: Any = hub.snapshot_download(name, dry_run=True, **asked)
        except hub.errors.DryRunError:
            files = ()  # no network: what the cache holds may do
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        cache = Path(hub.constants.HF_HUB_CACHE)
        there = next(each for each in (cache, *cache.parents) if each.exists())
        if missing > (free := shutil.disk_usage(there).free):
            text = f"{size_text(missing)} to fetch, and {size_text(free)} are free in {cache} (HF_HOME names another place)"
            raise mistake(what, text)
        if missing:
            say(f"fetching  {name}: {size_text(missing)} into {cache}")
        return str(hub.snapshot_download(name, **asked))
    except (hub.errors.HFValidationError, OSError) as error:
        causes, errors, place = (error, error.__cause__), hub.errors, hub.constants
        offline = errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError
        text = f"cannot be fetched: {show(str(error))}"
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            text = f"the disk of {place.HF_HUB_CACHE} is full (HF_HOME names another place)"
        elif any(isinstance(each, errors.GatedRepoError) for each in causes):
            terms = f"accept the terms on {place.ENDPOINT}/{name}, then hf auth login"
            text = f"its owner asks for consent: {terms}"
        elif any(isinstance(each, errors.RepositoryNotFoundError) for each in causes):
            text = "neither a folder here nor a repository on the hub that you may read (hf auth login for a private one)"
        elif isinstance(error, offline):
            text = f"not in the hub's cache ({place.HF_HUB_CACHE}), and {place.ENDPOINT} cannot be reached"
        raise mistake(what, text) from error
