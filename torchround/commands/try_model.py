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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from torchround.checkpoint import CheckpointError
from torchround.commands.generation_files import stop_tokens
from torchround.commands.tried_model import TriedModel, model_of_folder, model_of_run
from torchround.commands.tried_text import ScoredText, prompts_of
from torchround.config import ConfigError, SourceTable, show
from torchround.data import DataError, Tokenizer
from torchround.engine.errors import EngineError, EngineUsageError, PipelineError
from torchround.generation import Sampling, Score, TextEngine, inference_store
from torchround.hf import HFError
from torchround.models import ModelConfigError
from torchround.observe.record import perplexity
from torchround.planning.memory import size_text
from torchround.planning.partition import PlanError
from torchround.run.hardware import Hardware, find_hardware
from torchround.run.numbers import DTYPES, num_parameters
from torchround.run.run_folder import RunError
from torchround.run.samples import Prompt, without_end
from torchround.untrusted.terminal import escape_unprintable, say

logger = logging.getLogger(__name__)

MISTAKES = (
    *(ConfigError, ModelConfigError, DataError, HFError, CheckpointError, EngineUsageError, PlanError),
    RunError,
)


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit code."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    options, overrides = parse(arguments)
    try:
        try_model(options, overrides)
    except MISTAKES as error:
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="FOLDER", help="folder of a run")
    add("--step", type=_count, metavar="N", help="step of the checkpoint (default: the newest)")
    add("--model", type=Path, metavar="FOLDER", help="folder in Hugging Face format")
    add("--dtype", choices=DTYPES, help="type to compute in (default: the run's, or the folder's)")
    add("--perplexity", metavar="FILE", help="text to score: a file or a glob, read as a data source is")
    add("--content", default="text", help="content of its records, as in data.sources (default: text)")
    add("--field", help="field of its records that holds the content")
    add("--seq-len", type=_at_least_one, metavar="T", help="tokens of a window (default: the run's, or 2048)")
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="texts to continue")
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="file with a prompt in each line; .jsonl: objects with prompt",
    )
    add("--chat", action="store_true", help="write each prompt as a user's message, with the chat template")
    add("--max-tokens", type=_at_least_one, default=64, help="most tokens of a continuation (default 64)")
    add("--temperature", type=_not_negative, default=0.0, help="0 takes the most likely token (default 0)")
    add("--top-p", type=_share, default=1.0, help="draw from the likeliest tokens of this share (default 1)")
    add(
        "--top-k",
        type=int,
        default=0,
        help="draw from so many of the likeliest tokens; 0: from all (default)",
    )
    add("--seed", type=_count, default=0, help="seed of drawn tokens (default 0)")
    add(
        "--batch-size", type=_at_least_one, default=8, help="sequences that a device runs at once (default 8)"
    )
    add("--json", action="store_true", help="print one JSON object per result, and nothing else")
    options, overrides = parser.parse_known_args(arguments)
    if (options.run is None) == (options.model is None):
        parser.error("give either --run FOLDER or --model FOLDER")
    if options.step is not None and options.run is None:
        parser.error("--step belongs to --run")
    if options.perplexity is None and not options.prompt and options.prompts is None:
        parser.error("nothing to do: give --perplexity FILE, --prompt TEXT or --prompts FILE")
    return options, overrides


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text}; legal: an integer of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"given {text}; legal: an integer of at least 0")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"given {text}; legal: a number of at least 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"given {text}; legal: a number above 0, at most 1")
    return value


def try_model(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Do what the command line asks for, and print it. Raises the errors that `main` turns into messages."""
    if options.dtype is not None:
        overrides = [*overrides, f"--training.dtype={options.dtype}"]
    if options.run is not None:
        tried = model_of_run(options.run, options.step, overrides)
    else:
        tried = model_of_folder(options.model, overrides)
    prompts = prompts_of(options.prompt, options.prompts, tried.tokenizer, options.chat)
    text = scored_text(options, tried)
    longest = max((len(prompt.tokens) for prompt in prompts), default=0) + options.max_tokens
    tokens = max(longest if prompts else 0, text.seq_len if text else 0)
    warn_of_positions(tokens, tried)
    table = tried.options.config.engine
    if table.cpu_threads is not None:
        torch.set_num_threads(table.cpu_threads)
    hardware = find_hardware(table)
    if not options.json:
        total, _ = num_parameters(tried.model)
        say(f"model    {tried.name}: {total:,} parameters, {tried.options.config.training.dtype}")
        say(f"devices  {hardware.num_devices} x {hardware.kind}{hardware.note}")
    with text_engine(tried, hardware, options.batch_size, tokens) as engine:
        if text is not None:
            print_score(options, text, engine.score(text))
        if prompts:
            sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
            stops = stop_tokens(tried.options.config, tried.tokenizer)
            limits = {"max_tokens": options.max_tokens, "stop_tokens": stops, "sampling": sampling}
            try:
                found = engine.generate([prompt.tokens for prompt in prompts], **limits)
            except ValueError as error:  # logits that are not numbers
                raise EngineError(f"{tried.name}: {error}") from error
            for prompt, ids in zip(prompts, found, strict=True):
                print_continuation(options, prompt, ids, stops, tried.tokenizer)


def text_engine(tried: TriedModel, hardware: Hardware, batch_size: int, tokens: int) -> TextEngine:
    """Read the model's weights, and start an engine for `batch_size` sequences of up to `tokens` tokens."""
    own = sum(
        shape.numel() * tried.dtype.itemsize
        for name, shape in tried.model.stored_shapes().items()
        if name not in tried.mapped
    )
    if hardware.host_bytes is not None and own > hardware.host_bytes:
        raise EngineUsageError(
            f"the weights take {size_text(own)} of host memory, and {size_text(hardware.host_bytes)} can be used; weights "
            "that files hold in the type of --dtype stay in the files and take none"
        )
    devices = hardware.make_devices()
    store = inference_store(tried.model, tried.dtype, devices, tried.mapped)
    store.initialize(tried.model, 0, tried.weights.load)
    return TextEngine(
        *(tried.model, store, devices),
        batch_size=batch_size,
        tokens=tokens,
        device_bytes=hardware.device_bytes,
    )


def warn_of_positions(tokens: int, tried: TriedModel) -> None:
    """Warn if a sequence may be longer than the model knows. RoPE has no limit of its own, so it is legal."""
    known = tried.shape.known_positions
    if tokens > known:
        logger.warning(
            "sequences of up to %d tokens, but the model knows only %d positions (max_position_embeddings, RoPE's scaling "
            "counted): later tokens are at positions that it was not made for",
            *(tokens, known),
        )


def scored_text(options: argparse.Namespace, tried: TriedModel) -> ScoredText | None:
    """Return the text that `--perplexity` names. Raises `ConfigError` for options that a data source would refuse."""
    if options.perplexity is None:
        return None
    try:
        source = SourceTable(path=options.perplexity, content=options.content, field=options.field)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "path"
        raise ConfigError([f"--{key}: given {show(first['input'])}; {first['msg']}"]) from None
    seq_len = options.seq_len or window_of(options, tried)
    return ScoredText(source, tried.tokenizer, seq_len, options.batch_size, tried.shape.vocab_size)


def window_of(options: argparse.Namespace, tried: TriedModel) -> int:
    """Return the tokens of a window: those of the run's sequences, or the default as far as the model knows positions."""
    seq_len = tried.options.config.training.seq_len
    return seq_len if options.run is not None else min(seq_len, tried.shape.known_positions)


def print_score(options: argparse.Namespace, text: ScoredText, found: Score) -> None:
    """Print the perplexity of a text, with what it was counted over."""
    values = {
        "file": options.perplexity,
        "perplexity": perplexity(found.loss),
        "nats_per_token": found.loss,
        "tokens": found.num_labels,
        "documents": text.num_documents,
        "seq_len": text.seq_len,
    }
    if options.json:
        print_json(values)
        return
    say(
        f"{options.perplexity}: perplexity {values['perplexity']:.4f}: {found.loss:.6f} nats per token, "
        f"{found.num_labels:,} tokens of {text.num_documents:,} documents in windows of {text.seq_len:,} tokens"
    )


def print_json(values: dict[str, Any]) -> None:
    """Print an object on one line. A number that is not finite becomes null, as strict readers want it."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    print(json.dumps(finite), flush=True)


def print_continuation(
    options: argparse.Namespace,
    prompt: Prompt,
    ids: Sequence[int],
    stops: Sequence[int],
    tokenizer: Tokenizer,
) -> None:
    """Print a prompt and its continuation, without the token that ended it."""
    kept = without_end(ids, stops)
    text = tokenizer.decode(kept)
    if options.json:
        print_json({"prompt": prompt.text, "text": text, "tokens": len(kept), "ended": len(kept) < len(ids)})
    else:
        say(f"\n{prompt.text}»{text}")
