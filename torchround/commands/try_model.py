"""Score text with a trained model, and let it continue prompts.

    torchround try_model --run outputs/my-run --perplexity held_out.jsonl --prompt "Once upon a time"
    torchround try_model --model my-model --chat --prompt "What is a pipeline?" --temperature 0.7

`--run` takes the newest checkpoint of a run, or the one of `--step`. `--model` takes a folder in Hugging Face format, a
released model or an export. The model passes through the devices in parts, so it may be larger than a device. Any key of
a config can be added, such as `--engine.num_devices 2` or `--lora.path ADAPTERS` with `--lora.rank`; `--training.seq_len`
is the length of the windows of a scored text, `--training.dtype` the type to compute in.
"""

import argparse
import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from torchround.checkpoint import Checkpointer, CheckpointError, verify_checkpoint
from torchround.checkpoint.folders import RUN_SUBFOLDER
from torchround.commands import configured_model, end_with_message, new_parser, positive_integer
from torchround.commands.export_hf import stop_tokens
from torchround.config import ConfigError, Options, show
from torchround.config.load import COMMAND_LINE, RawConfig, parse_overrides, read_config, with_overrides
from torchround.data import DataError, Tokenizer
from torchround.data.scored_windows import scored_batch, scored_windows
from torchround.data.text.chat import prompts_of
from torchround.engine.errors import EngineError, EngineUsageError
from torchround.generation import Sampling, Score, TextEngine, inference_store, score
from torchround.generation.continuations import GROUPS
from torchround.hf import PretrainedWeights
from torchround.hf.tensor_folder import read_object
from torchround.layer import LayeredModel, MicroBatch
from torchround.models import adapter_names
from torchround.observe.record import perplexity
from torchround.planning.memory import size_text
from torchround.run.hardware import Hardware, find_hardware
from torchround.run.numbers import DTYPES, num_parameters
from torchround.run.run_folder import CONFIG_FILE
from torchround.run.validation import without_end
from torchround.untrusted.terminal import Progress, say

logger = logging.getLogger(__name__)

# Batches to score in one pass. Each pass uploads all weights once.
PASS_BATCHES = 4


def main(arguments: list[str]) -> int:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    parser = new_parser(__doc__)
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--run", type=Path, metavar="FOLDER", help="folder of a run")
    model.add_argument("--model", type=Path, metavar="FOLDER", help="folder in Hugging Face format")
    add("--step", type=int, metavar="N", help="step of the run's checkpoint (default: the newest)")
    add("--perplexity", metavar="FILE", help="text to score: a file or a glob, read as a data source is")
    add("--content", default="text", help="content of its records, as in data.sources (default: text)")
    add("--field", help="field of its records that holds the content")
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="texts to continue")
    add("--chat", action="store_true", help="write each prompt as a user's message, with the chat template")
    add("--max-tokens", type=positive_integer, default=64, help="most tokens of a continuation (default 64)")
    add("--temperature", type=float, default=0.0, help="0 takes the most likely token (default 0)")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this share (default 1)")
    add("--top-k", type=int, default=0, help="draw from this many of the likeliest tokens; 0: all (default)")
    add("--seed", type=int, default=0, help="seed of drawn tokens (default 0)")
    add("--batch-size", type=positive_integer, default=8, help="sequences on a device at once (default 8)")
    add("--json", action="store_true", help="print one JSON object per result, and nothing else")
    options, overrides = parser.parse_known_args(arguments)
    if options.perplexity is None and not options.prompt:
        parser.error("nothing to do: give --perplexity FILE or --prompt TEXT")
    try:
        options.sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
    except ValueError as error:
        parser.error(str(error))
    mistakes = (*configured_model.MISTAKES, DataError, CheckpointError)
    return end_with_message(lambda: try_model(options, overrides), mistakes, (EngineError,))


def try_model(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    given = dict(parse_overrides(overrides))
    if options.perplexity is not None:
        source = {"path": options.perplexity, "content": options.content, "field": options.field}
        given["data.sources"] = [source]
    if options.run is not None:
        tried = model_of_run(options.run, options.step, given)
    else:
        tried = model_of_folder(options.model, given)
    config, tokenizer = tried.options.config, tried.tokenizer
    prompts = prompts_of(options.prompt, tokenizer, options.chat)
    longest = max((len(prompt.tokens) + options.max_tokens for prompt in prompts), default=0)
    if options.perplexity is not None:
        longest = max(longest, config.training.seq_len)
    configured_model.warn_of_positions("the longest sequence", longest, tried.shape)
    if config.engine.cpu_threads is not None:
        torch.set_num_threads(config.engine.cpu_threads)
    hardware = find_hardware(config.engine)
    if not options.json:
        size = f"{num_parameters(tried.model)[0]:,} parameters, {config.training.dtype}"
        say(f"model    {config.model.family}, {tried.name}: {size}")
        say(f"devices  {hardware.num_devices} x {hardware.kind}{hardware.note}")
    with text_engine(tried, hardware, options.batch_size, longest) as engine:
        if options.perplexity is not None:
            read = Counter[str]()
            found = score(engine, scored_text(tried, options.batch_size, read))
            print_score(options, found, read["documents"], config.training.seq_len)
        if not prompts:
            return
        stops = stop_tokens(config, tokenizer)
        limits = {"max_tokens": options.max_tokens, "stop_tokens": stops, "sampling": options.sampling}
        try:
            continued = engine.generate([prompt.tokens for prompt in prompts], **limits)
        except ValueError as error:  # logits that are not numbers
            raise EngineError(f"{tried.name}: {error}") from error
        for prompt, ids in zip(prompts, continued, strict=True):
            kept = without_end(ids, stops)
            continuation, ended = tokenizer.decode_after(prompt.tokens, kept), len(kept) < len(ids)
            if options.json:
                values = {"prompt": prompt.text, "text": continuation, "tokens": len(kept), "ended": ended}
                print(json.dumps(values), flush=True)
            else:
                say(f"\n{prompt.text}»{continuation}")


def print_score(options: argparse.Namespace, found: Score, num_documents: int, seq_len: int) -> None:
    rates = {"perplexity": perplexity(found.loss), "nats_per_token": found.loss}
    if options.json:
        # Strict readers of JSON know no nan.
        strict = {key: rate if math.isfinite(rate) else None for key, rate in rates.items()}
        counts = {"tokens": found.num_labels, "documents": num_documents, "seq_len": seq_len}
        print(json.dumps({"file": options.perplexity, **strict, **counts}), flush=True)
        return
    say(
        f"{options.perplexity}: perplexity {rates['perplexity']:.4f}: {found.loss:.6f} nats per token, "
        f"{found.num_labels:,} tokens of {num_documents:,} documents in windows of {seq_len:,} tokens"
    )


# The model: a checkpoint of a run, or a folder in Hugging Face format. All its parameters are frozen, so that host memory
# holds one copy of each in the type that devices compute in. What a folder's files hold in that type stays in the files.


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
    weights: PretrainedWeights
    mapped: configured_model.Mapped = field(default_factory=dict)


def model_of_run(folder: Path, step: int | None, given: Mapping[str, Any]) -> TriedModel:
    """Open the checkpoint of `step`, otherwise the newest one, of the run in `folder`. `given` are values of dotted keys.

    Raises `CheckpointError` for a byte that differs from its checksum, or one of `MISTAKES`.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError([f"--run: there is no {file}; legal: the folder of a run, such as outputs/NAME"])
    options = with_overrides(read_config(file), given.items())
    if (module := options.config.model.module) and options.raw.source_of("model.module") != COMMAND_LINE:
        text = "importing it would run it, and the folder may be another's; if it is yours, give --model.module too"
        raise options.error("model.module", f"given {show(module)}; {text}")
    checkpoints = Checkpointer(folder / RUN_SUBFOLDER)
    there = checkpoints.checkpoints()
    if not there:
        raise ConfigError([f"--run: there is no checkpoint in {checkpoints.folder}"])
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
    saved, dtype = configured_model.open_saved_model(options, path), DTYPES[options.config.training.dtype]
    mapped: configured_model.Mapped = {}
    if saved.base is not None:
        missing = sorted(saved.model.stored_shapes().keys() - saved.weights.names.keys())
        saved.base.restrict(missing)
        mapped = saved.base.map_tensors(sorted(set(missing) - saved.model.packed.keys()), dtype)
        saved.weights.adapters = saved.base  # read after the checkpoint's own
    tokenizer = configured_model.find_tokenizer(options)
    name = f"{folder} after step {step}"
    return TriedModel(name, options, saved.model, saved.shape, tokenizer, saved.weights, mapped)


def model_of_folder(folder: Path, given: Mapping[str, Any]) -> TriedModel:
    """Open a released or exported model with the config of a run that would begin with it. Errors as of `model_of_run`."""
    if not folder.is_dir():
        legal = "a local folder (a name on the hub is not downloaded)"
        raise ConfigError([f"--model: there is no folder {folder}; legal: {legal}"])
    # A config has sources, and a folder that is tried has none.
    tables: dict[str, Any] = {"data": {"sources": [{"path": "none"}]}, "model": {"hf_path": str(folder)}}
    base = Path(str(given.get("model.hf_path", folder))).expanduser()
    content = read_object(base / "config.json")
    tables["model"]["family"] = configured_model.family_of(content)
    dtype = content.get("dtype", content.get("torch_dtype"))
    tables["training"] = {"dtype": dtype if dtype in DTYPES else "bfloat16"}
    options = with_overrides(RawConfig(str(folder), tables), given.items())
    tokenizer = configured_model.find_tokenizer(options)
    model = configured_model.build_model(options, tokenizer.vocab_size, warns=False)
    family, shape = configured_model.model_config(options, tokenizer.vocab_size)
    weights, _ = configured_model.find_weights(options, model)
    assert weights is not None, "a folder has weights"
    in_folder = model.stored_shapes().keys() - adapter_names(model, family.module_names(shape)).keys()
    in_folder -= model.packed.keys()
    mapped = weights.map_tensors(sorted(in_folder), DTYPES[options.config.training.dtype])
    return TriedModel(str(folder), options, model, shape, tokenizer, weights, mapped)


def text_engine(tried: TriedModel, hardware: Hardware, batch_size: int, tokens: int) -> TextEngine:
    """Read the model's weights, and start an engine for `batch_size` sequences of up to `tokens` tokens."""
    dtype = DTYPES[tried.options.config.training.dtype]
    shapes = tried.model.stored_shapes().items()
    packed = tried.model.packed
    own = sum(
        packed[name].nbytes(shape.numel()) if name in packed else shape.numel() * dtype.itemsize
        for name, shape in shapes
        if name not in tried.mapped
    )
    if hardware.host_bytes is not None and own > hardware.host_bytes:
        text = f"the weights take {size_text(own)} of host memory, and {size_text(hardware.host_bytes)} can be used"
        raise EngineUsageError(f"{text}; those that files hold in training.dtype stay there and take none")
    devices = hardware.make_devices()
    store = inference_store(tried.model, dtype, devices, tried.mapped)
    store.initialize(tried.model, 0, tried.weights.load)
    return TextEngine(
        tried.model,
        store,
        devices,
        batch_size=batch_size,
        tokens=tokens,
        device_bytes=hardware.device_bytes,
        experts_by_need=tried.options.config.lora.experts_by_need,
    )


def scored_text(tried: TriedModel, batch_size: int, read: Counter[str]) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of each pass over the text of `data.sources`, and count its `documents` in `read`.

    Windows of like lengths are together, which needs little padding. Raises `DataError` if nothing can be scored.
    """
    config = tried.options.config
    source, seq_len, pad_id = config.data.sources[0], config.training.seq_len, tried.tokenizer.pad_id
    windows = scored_windows([source], tried.tokenizer, seq_len, tried.shape.vocab_size)
    progress = Progress(f"scoring {source.path}", text="{:,} tokens".format)
    size = -(-batch_size // GROUPS)  # as many as a group of prompts, which the engine was made for
    while some := list(islice(windows, PASS_BATCHES * batch_size)):
        read["documents"] += sum(window.ends for window in some)
        some = sorted((each for each in some if len(each.tokens)), key=lambda each: -len(each.tokens))
        batches = [scored_batch(some[start : start + size], pad_id) for start in range(0, len(some), size)]
        if batches:
            yield batches
        progress.advance(sum(batch.num_labels() for batch in batches))
    if not progress.done:
        text = "no token can be scored: a document's first token has nothing before it, and prompts are not scored"
        raise DataError(f"{source.path}: {text}; legal: documents of two tokens or more")
