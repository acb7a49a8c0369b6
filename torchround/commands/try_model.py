"""Score text with a trained model, and let it continue prompts.

    torchround try_model --run outputs/my-run --perplexity held_out.jsonl --prompt "Once upon a time"
    torchround try_model --model my-model --chat --prompt "What is a pipeline?" --temperature 0.7

`--run` takes the newest checkpoint of a run, or the one of `--step`. `--model` takes a folder in Hugging Face format: a
released model, an export, or adapters in PEFT's format, whose base model is read too. The model passes through the devices
in parts, so it may be larger than a device. Any key of a config can be added, such as `--engine.num_devices 2`.

Exit codes: 0 done; 1 a fault; 2 a mistake in the arguments or in what they name; 130 stopped by Control-C.
"""

import argparse
import json
import logging
import math
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from torchround.checkpoint import Checkpointer, CheckpointError, verify_checkpoint
from torchround.commands import NATURAL, POSITIVE_COUNT, new_parser, number
from torchround.commands.configured_model import (
    BORROWED,
    MISTAKES,
    Mapped,
    build_model,
    checkpoint_weights,
    find_tokenizer,
    find_weights,
    model_config,
    open_weights,
    warn_of_positions,
)
from torchround.commands.generation_files import stop_tokens
from torchround.config import ConfigError, Options, SourceTable, parse_command_line, show
from torchround.config.errors import COMMAND_LINE
from torchround.config.load import apply_override, parse_overrides
from torchround.config.validate import RawConfig, validate
from torchround.data import DataError, Tokenizer
from torchround.data.document_types import Conversation
from torchround.data.scored_windows import ScoredWindow, scored_batch, scored_windows
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.tokenizer import FILES, encode_spans
from torchround.engine.errors import EngineError, EngineUsageError, PipelineError
from torchround.generation import Sampling, Score, TextEngine, inference_store
from torchround.generation.continuations import GROUPS
from torchround.hf import HFError, PretrainedWeights
from torchround.hf.pretrained import ADAPTER_CONFIG_FILE, read_plain
from torchround.hf.tensor_folder import StoredTensor, TensorFiles, read_object
from torchround.layer import LayeredModel, MicroBatch
from torchround.models import FAMILIES, adapter_names
from torchround.observe.record import perplexity
from torchround.planning.memory import size_text
from torchround.run.hardware import Hardware, find_hardware
from torchround.run.numbers import DTYPES, num_parameters
from torchround.run.run_folder import CONFIG_FILE
from torchround.run.validation import Prompt, without_end
from torchround.untrusted.terminal import Progress, escape_unprintable, say

logger = logging.getLogger(__name__)

# Batches to score in one pass. Each pass uploads all weights once.
PASS_BATCHES = 4


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    options, overrides = parse(arguments)
    try:
        try_model(options, overrides)
    except (*MISTAKES, DataError, CheckpointError) as error:
        print(escape_unprintable(str(error)), file=sys.stderr)
        return 2
    except EngineError as error:
        if isinstance(error, PipelineError):
            traceback.print_exception(error.__cause__)  # only this says where in the model's code
        print(f"{type(error).__name__}: {escape_unprintable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command's own flags. Returns them and the rest, which are overrides of the configuration."""
    parser = new_parser(__doc__)
    not_negative = number(float, "a number of at least 0", lambda value: 0 <= value < math.inf)
    share = number(float, "a number above 0, at most 1", lambda value: 0 < value <= 1)
    add = parser.add_argument
    add("--run", type=Path, metavar="FOLDER", help="folder of a run")
    add("--step", type=NATURAL, metavar="N", help="step of the checkpoint (default: the newest)")
    add("--model", type=Path, metavar="FOLDER", help="folder in Hugging Face format")
    add("--dtype", choices=DTYPES, help="type to compute in (default: the run's, or the folder's)")
    add("--perplexity", metavar="FILE", help="text to score: a file or a glob, read as a data source is")
    add("--content", default="text", help="content of its records, as in data.sources (default: text)")
    add("--field", help="field of its records that holds the content")
    add(
        "--seq-len", type=POSITIVE_COUNT, metavar="T", help="tokens of a window (default: the run's, or 2048)"
    )
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="texts to continue")
    add("--chat", action="store_true", help="write each prompt as a user's message, with the chat template")
    add("--max-tokens", type=POSITIVE_COUNT, default=64, help="most tokens of a continuation (default 64)")
    add("--temperature", type=not_negative, default=0.0, help="0 takes the most likely token (default 0)")
    add("--top-p", type=share, default=1.0, help="draw from the likeliest tokens of this share (default 1)")
    add("--top-k", type=int, default=0, help="draw from this many of the likeliest tokens; 0: all (default)")
    add("--seed", type=NATURAL, default=0, help="seed of drawn tokens (default 0)")
    add("--batch-size", type=POSITIVE_COUNT, default=8, help="sequences on a device at once (default 8)")
    add("--json", action="store_true", help="print one JSON object per result, and nothing else")
    options, overrides = parser.parse_known_args(arguments)
    if (options.run is None) == (options.model is None):
        parser.error("give either --run FOLDER or --model FOLDER")
    if options.step is not None and options.run is None:
        parser.error("--step belongs to --run")
    if options.perplexity is None and not options.prompt:
        parser.error("nothing to do: give --perplexity FILE or --prompt TEXT")
    return options, overrides


def try_model(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Do what the command line asks for, and print it. Raises the errors that `main` turns into messages."""
    if options.dtype is not None:
        overrides = [*overrides, f"--training.dtype={options.dtype}"]
    if options.run is not None:
        tried = model_of_run(options.run, options.step, overrides)
    else:
        tried = model_of_folder(options.model, overrides)
    config, tokenizer = tried.options.config, tried.tokenizer
    prompts = prompts_of(options.prompt, tokenizer, options.chat)
    longest = max((len(prompt.tokens) + options.max_tokens for prompt in prompts), default=0)
    text = None
    if options.perplexity is not None:
        seq_len = config.training.seq_len
        seq_len = options.seq_len or (
            seq_len if options.run is not None else min(seq_len, tried.shape.known_positions)
        )
        text = ScoredText(scored_source(options), tried, seq_len, options.batch_size)
        longest = max(longest, seq_len)
    warn_of_positions("the longest sequence", longest, tried.shape)
    if config.engine.cpu_threads is not None:
        torch.set_num_threads(config.engine.cpu_threads)
    hardware = find_hardware(config.engine)
    if not options.json:
        say(f"model    {tried.name}: {num_parameters(tried.model)[0]:,} parameters, {config.training.dtype}")
        say(f"devices  {hardware.num_devices} x {hardware.kind}{hardware.note}")
    with text_engine(tried, hardware, options.batch_size, longest) as engine:
        if text is not None:
            print_score(options, text, engine.score(text))
        if prompts:
            sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
            stops = stop_tokens(config, tokenizer)
            limits = {"max_tokens": options.max_tokens, "stop_tokens": stops, "sampling": sampling}
            try:
                found = engine.generate([prompt.tokens for prompt in prompts], **limits)
            except ValueError as error:  # logits that are not numbers
                raise EngineError(f"{tried.name}: {error}") from error
            for prompt, ids in zip(prompts, found, strict=True):
                kept = without_end(ids, stops)
                text_found = tokenizer.decode(kept)
                if options.json:
                    ended = len(kept) < len(ids)
                    values = {"prompt": prompt.text, "text": text_found, "tokens": len(kept), "ended": ended}
                    print(json.dumps(values), flush=True)
                else:
                    say(f"\n{prompt.text}»{text_found}")


def print_score(options: argparse.Namespace, text: "ScoredText", found: Score) -> None:
    """Print the perplexity of a text, with what it was counted over."""
    whole = perplexity(found.loss)
    if options.json:
        is_number = math.isfinite(found.loss)  # strict readers of JSON know no nan
        values = {
            "file": options.perplexity,
            "perplexity": whole if is_number and math.isfinite(whole) else None,
            "nats_per_token": found.loss if is_number else None,
            "tokens": found.num_labels,
            "documents": text.num_documents,
            "seq_len": text.seq_len,
        }
        print(json.dumps(values), flush=True)
        return
    say(
        f"{options.perplexity}: perplexity {whole:.4f}: {found.loss:.6f} nats per token, "
        f"{found.num_labels:,} tokens of {text.num_documents:,} documents in windows of {text.seq_len:,} tokens"
    )


# The model: a checkpoint of a run, or a folder in Hugging Face format. All its parameters are frozen, so that host memory
# holds one copy of each in the type that devices compute in. What a folder's files hold in that type stays in the files.


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
    shape: Any
    tokenizer: Tokenizer
    weights: CheckpointWeights | PretrainedWeights
    mapped: Mapped = field(default_factory=dict)


def model_of_run(folder: Path, step: int | None, overrides: Sequence[str]) -> TriedModel:
    """Open the checkpoint of `step`, otherwise the newest one, of the run in `folder`.

    `overrides` are keys as on the command line of a run. Every byte of the checkpoint is compared with its checksums.
    Raises `ConfigError`, `CheckpointError`, `TokenizerError`, `ModelConfigError` or `HFError`.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError([f"--run: there is no {file}; legal: the folder of a run, such as outputs/NAME"])
    options = parse_command_line(["--config", str(file), *overrides])
    if (module := options.config.model.module) and options.raw.source_of("model.module") != COMMAND_LINE:
        text = "importing it would run it, and the folder may be another's; if it is yours, give --model.module too"
        raise options.error("model.module", f"given {show(module)}; {text}")
    checkpoints = Checkpointer(folder / "checkpoints")
    there = checkpoints.checkpoints()
    if not there:
        raise ConfigError(
            [f"--run: there is no checkpoint in {checkpoints.folder}; the run has not saved yet"]
        )
    if step is None:
        step = max(there)  # also one that is damaged: an older one in its place would be a surprise
    if step not in there:
        legal = f"a step with a checkpoint in {checkpoints.folder}: {', '.join(map(str, there))}"
        raise ConfigError([f"--step: given {step}; legal: {legal}"])
    path = there[step]
    try:
        verify_checkpoint(path, Progress(f"verifying {path}", text=size_text).advance)
    except CheckpointError as error:
        raise CheckpointError(error, "--step N tries another checkpoint of the run") from error
    return _opened(options, f"{folder} after step {step}", path)


def model_of_folder(folder: Path, overrides: Sequence[str]) -> TriedModel:
    """Open a released or exported model, or adapters in PEFT's format with their base model.

    The config is that of a run that would begin with the model. Arguments and errors as of `model_of_run`.
    """
    if not folder.is_dir():
        legal = "a local folder (a name on the hub is not downloaded)"
        raise ConfigError([f"--model: there is no folder {folder}; legal: {legal}"])
    # A config has sources, and a folder that is tried has none.
    tables: dict[str, Any] = {"data": {"sources": [{"path": "none"}]}, "model": {"hf_path": str(folder)}}
    given = dict(parse_overrides(overrides))
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        tables["model"]["hf_path"], tables["lora"] = _read_adapter_config(folder)
        if any((folder / name).is_file() for name in FILES):
            tables["tokenizer"] = {"path": str(folder)}
    base = Path(str(given.get(("model", "hf_path"), tables["model"]["hf_path"]))).expanduser()
    if not base.is_dir():
        found = f"{folder}: there is no folder {base} with its base model"
        raise ConfigError([f"{found}; --model.hf_path FOLDER says where it is"])
    content = read_object(base / "config.json")
    # The borrowed family reads what has no definition of its own, and refuses what it cannot read.
    kinds = {kind: family.name for family in FAMILIES.values() for kind in family.hf_model_types}
    tables["model"]["family"] = kinds.get(str(content.get("model_type")), BORROWED)
    dtype = content.get("dtype", content.get("torch_dtype"))
    tables["training"] = {"dtype": dtype if dtype in DTYPES else "bfloat16"}
    raw = RawConfig(main_source=str(folder), tables=tables)
    for key_path, value in given.items():
        apply_override(raw, key_path, value)
    return _opened(Options(validate(raw), print_config=False, dry_run=False, raw=raw), str(folder))


def _opened(options: Options, name: str, checkpoint: Path | None = None) -> TriedModel:
    """Open the configured model with the weights of a checkpoint, otherwise with those in its folder."""
    tokenizer = find_tokenizer(options)
    model = build_model(options, tokenizer.vocab_size, warns=False)
    family, shape = model_config(options, tokenizer.vocab_size)
    shapes, dtype = model.stored_shapes(), DTYPES[options.config.training.dtype]
    weights: CheckpointWeights | PretrainedWeights | None
    mapped: Mapped = {}
    if checkpoint is None:
        weights, _ = find_weights(options, model)
        assert weights is not None, "a folder has weights"
        in_base = shapes.keys() - adapter_names(model, family.module_names(shape)).keys()
        mapped = weights.map_tensors(sorted(in_base), dtype)
    else:
        weights = CheckpointWeights(checkpoint, checkpoint_weights(checkpoint))
        source = options.raw.main_source
        if unknown := sorted(weights.stored.keys() - shapes.keys()):
            raise HFError(
                f"{checkpoint}: {', '.join(unknown[:5])} is not part of the model that {source} describes"
            )
        if missing := sorted(shapes.keys() - weights.stored.keys()):
            base = options.config.model.hf_path
            if base is None or not set(missing) <= family.module_names(shape).keys():
                raise HFError(
                    f"{checkpoint}: {', '.join(missing[:5])} of the model that {source} describes is not in it"
                )
            weights.base = open_weights(Path(base).expanduser(), family, shape, shapes)
            weights.base.restrict(missing)
            mapped = weights.base.map_tensors(missing, dtype)
    for layer in model.layers:
        layer.requires_grad_(False)
    name = f"{options.config.model.family}, {name}"
    return TriedModel(name, options, model, shape, tokenizer, weights, mapped)


def text_engine(tried: TriedModel, hardware: Hardware, batch_size: int, tokens: int) -> TextEngine:
    """Read the model's weights, and start an engine for `batch_size` sequences of up to `tokens` tokens."""
    dtype = DTYPES[tried.options.config.training.dtype]
    shapes = tried.model.stored_shapes().items()
    own = sum(shape.numel() * dtype.itemsize for name, shape in shapes if name not in tried.mapped)
    if hardware.host_bytes is not None and own > hardware.host_bytes:
        raise EngineUsageError(
            f"the weights take {size_text(own)} of host memory, and {size_text(hardware.host_bytes)} can be used; weights "
            "that files hold in the type of --dtype stay in the files and take none"
        )
    devices = hardware.make_devices()
    store = inference_store(tried.model, dtype, devices, tried.mapped)
    store.initialize(tried.model, 0, tried.weights.load)
    limit = hardware.device_bytes
    return TextEngine(tried.model, store, devices, batch_size=batch_size, tokens=tokens, device_bytes=limit)


def _read_adapter_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the base model of adapters in PEFT's format, and the `[lora]` that describes them. Raises `HFError`."""
    path = folder / ADAPTER_CONFIG_FILE
    content = read_object(path)
    modules, parameters = content.get("target_modules"), content.get("target_parameters") or []
    base = content.get("base_model_name_or_path")
    if not isinstance(modules, list) or not isinstance(parameters, list):
        raise HFError(f"{path}: target_modules is {show(str(modules))}; legal: a list of names")
    if not isinstance(base, str):
        raise HFError(f"{path} names no base model; --model.hf_path FOLDER does")
    targets = {str(name).rpartition(".")[2] for name in (*modules, *parameters)}
    # Values that are no numbers are refused by the checks of the table.
    numbers = {"rank": content.get("r"), "alpha": content.get("lora_alpha")}
    return base, {**numbers, "targets": sorted(targets), "path": str(folder)}


# The text: files to score as micro-batches, and prompts as token ids.


def scored_source(options: argparse.Namespace) -> SourceTable:
    """Return the source that `--perplexity` names. Raises `ConfigError` for options that a data source would refuse."""
    try:
        return SourceTable(path=options.perplexity, content=options.content, field=options.field)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "path"
        raise ConfigError([f"--{key}: given {show(first['input'])}; {first['msg']}"]) from None


class ScoredText:
    """The micro-batches of a source's text, counted as they are read. Each `iter()` reads the text anew."""

    def __init__(self, source: SourceTable, tried: TriedModel, seq_len: int, batch_size: int) -> None:
        self._source = source
        self._tokenizer = tried.tokenizer
        self._vocab_size = tried.shape.vocab_size
        self._batch_size = batch_size
        self.seq_len = seq_len
        self.num_documents = 0

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each pass. Raises `DataError` if nothing can be scored."""
        windows = scored_windows([self._source], self._tokenizer, self.seq_len, self._vocab_size)
        progress = Progress(f"scoring {self._source.path}", text="{:,} tokens".format)
        self.num_documents = 0
        while some := list(islice(windows, PASS_BATCHES * self._batch_size)):
            self.num_documents += sum(window.ends for window in some)
            if batches := self._batches([window for window in some if len(window.tokens)]):
                yield batches
            progress.advance(sum(batch.num_labels() for batch in batches))
        if not progress.done:
            raise DataError(
                f"{self._source.path}: no token can be scored: a document's first token has nothing before it, and "
                "prompts are not scored; legal: documents of two tokens or more"
            )

    def _batches(self, windows: list[ScoredWindow]) -> list[MicroBatch]:
        """Cut windows into micro-batches. Windows of like lengths are together, which needs little padding."""
        longest_first = sorted(windows, key=lambda window: -len(window.tokens))
        size = -(-self._batch_size // GROUPS)  # as many as a group of prompts, which the engine was made for
        starts = range(0, len(longest_first), size)
        return [scored_batch(longest_first[start : start + size], self._tokenizer.pad_id) for start in starts]


def prompts_of(
    texts: Sequence[str], tokenizer: Tokenizer, with_chat: bool, key: str = "--prompt"
) -> list[Prompt]:
    """Return the prompts of `key`. With `with_chat` the chat template writes each as a user's message.

    Raises `ConfigError` for an empty prompt, `DataError` for a template that fails.
    """
    if not all(texts):
        raise ConfigError([f"{key}: an empty prompt; legal: some text"])
    if not with_chat:
        return [Prompt(text, tokenizer.prompt_ids(text)) for text in texts]
    template, prompts = ChatTemplate(tokenizer) if texts else None, []
    for text in texts:
        assert template is not None, "there are prompts"
        try:
            spans = template.prompt(Conversation(({"role": "user", "content": text},)))
        except DataError as error:
            raise DataError(f"{key}: {error}") from error
        prompts.append(
            Prompt(text, [int(token) for part in encode_spans(tokenizer, spans) for token in part])
        )
    return prompts
