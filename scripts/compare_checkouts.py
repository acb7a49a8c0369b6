"""Compare the results of two checkouts of torchround, bit for bit: run it before and after a change that must change none.

    git worktree add ../before main
    python scripts/compare_checkouts.py ../before .

Each checkout trains eight small models by its own `train.py`: all three families, experts, every update, two rounds, LoRA
with dropout, float16, whole-document packing, a given plan. Equal must be, for every run: loss, gradient norm,
learning rate, tokens and skipped steps of each step; validation losses; the plan; every tensor of every checkpoint; and
the state saved beside them. Weights that a checkpoint holds as a 16-bit half and a residual are compared as the fp32 values
that they make. Exit codes: 0 all equal, 1 something differs, with the first differences of each run printed.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

METRICS = ("step", "loss", "grad_norm", "lr", "tokens", "skipped_steps", "validation_loss")
RESIDUAL = "residual/"
MOST_SHOWN = 5  # differences of one run

COMMON = """
[tokenizer]
name = "bytes"
[data]
sources = [{ path = "text.jsonl" }]
[training]
steps = 6
seq_len = 48
global_batch_size = 7  # micro-batches of 2, 2, 2 and 1
micro_batch_size = 2
[engine]
devices = "cpu"
num_devices = 2
cpu_threads = 1
measure_steps = 0  # the plan must not depend on time
[optimizer]
lr = 3e-3
[checkpoint]
interval_steps = 3
keep_latest_k = 0
"""
# The command line of each run, besides the keys that all share.
RUNS: dict[str, tuple[str, ...]] = {
    "llama3-sync": (
        *("--model.family=llama3", "--model.flavor=debug", "--training.dtype=float32"),
        *("--data.validation_fraction=0.1", "--validation.interval_steps=3", "--validation.max_batches=2"),
    ),
    "qwen3-async": ("--model.family=qwen3", "--model.flavor=debug", "--engine.update=async"),
    "experts-two-rounds": ("--model.family=qwen3", "--model.flavor=debug_moe", "--engine.rounds=2"),
    "gpt-oss-float16": (
        *("--model.family=gpt_oss", "--model.flavor=debug", "--training.dtype=float16"),
        "--engine.recompute=layer",
    ),
    "lora-async": (
        *("--model.family=llama3", "--model.flavor=debug", "--engine.update=async", "--engine.rounds=2"),
        *("--lora.rank=4", "--lora.dropout=0.1", "--engine.accumulate_dtype=bfloat16"),
    ),
    "qwen3-async-uncorrected": (
        *("--model.family=qwen3", "--model.flavor=debug", "--engine.update=async"),
        "--engine.delay_correction=none",
    ),
    "llama3-bounded": (
        *("--model.family=llama3", "--model.flavor=debug", "--engine.update=bounded"),
        "--training.clip=layer",
    ),
    "given-plan": (
        *("--model.family=qwen3", "--model.flavor=debug_moe", "--engine.update=async"),
        *("--engine.num_devices=3", "--data.packing=best_fit", "--data.num_workers=2"),
        "--engine.plan={ forward = [3, 3], fused = 2, backward = [2, 4], rounds = 2 }",
    ),
}


def main(arguments: list[str]) -> int:
    """Compare, print the verdict for each run, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="folder of the one checkout")
    parser.add_argument("after", type=Path, help="folder of the other checkout")
    parser.add_argument(
        "--only", choices=RUNS, nargs="+", default=list(RUNS), help="runs to compare (default: all)"
    )
    options = parser.parse_args(arguments)
    same = True
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            before, after = (
                results(checkout.resolve(), name, Path(folder) / side)
                for side, checkout in (("before", options.before), ("after", options.after))
            )
            found = list(differences(before, after))
            same &= not found
            print(
                f"{name}: {len(before)} values, {'equal' if not found else f'{len(found)} differ'}",
                flush=True,
            )
            print("\n".join(f"  {line}" for line in found[:MOST_SHOWN]), end="\n" if found else "")
    return 0 if same else 1


def results(checkout: Path, name: str, folder: Path) -> dict[str, Any]:
    """Train the run `name` by `checkout` in `folder`. Returns by name every value that must be equal."""
    folder.mkdir(exist_ok=True)
    write_text(folder / "text.jsonl")
    (folder / "common.toml").write_text(COMMON)
    command = [sys.executable, str(checkout / "train.py"), "--config", "common.toml", f"--run.name={name}"]
    # The checkout's own package comes first, whichever one is installed.
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [*command, *RUNS[name]], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} by {checkout} ended with exit code {done.returncode}:\n{done.stderr}")
    run = folder / "outputs" / name
    return dict([*logged(run), *saved(run)])


def logged(run: Path) -> Iterator[tuple[str, Any]]:
    """Yield the figures of each step that depend on no clock, and the plan."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        yield from ((f"step {record['step']}: {key}", record.get(key)) for key in METRICS)
    yield from ((f"plan: {key}", value) for key, value in json.loads((run / "plan.json").read_text()).items())


def saved(run: Path) -> Iterator[tuple[str, Any]]:
    """Yield a digest of each tensor of each checkpoint, and the state saved beside them."""
    for step in sorted((run / "checkpoints").iterdir()):
        tensors = {}
        for path in sorted(step.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (no mapping)
        for name, tensor in tensors.items():
            if not name.startswith(RESIDUAL):
                yield f"{step.name}: {name}", digest(joined(name, tensor, tensors))
        state = json.loads((step / "state.json").read_text())
        state.pop("config", None)  # keys may come and go; what they do shows in the rest
        yield from ((f"{step.name}: state {key}", value) for key, value in state.items())


def joined(name: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Take a tensor of a checkpoint, or the fp32 weight whose upper half it is if `tensors` has the residual too."""
    kind, _, parameter = name.partition("/")
    residual = tensors.get(RESIDUAL + parameter)
    if kind != "weights" or residual is None:
        return tensor
    upper = tensor.view(torch.int16).to(torch.int32) << 16
    return (upper + residual.to(torch.int32)).view(torch.float32)


def digest(tensor: torch.Tensor) -> str:
    """Write dtype, shape and a checksum of a tensor's bytes."""
    content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Describe each value that the two sides do not share."""
    for name in sorted(before.keys() | after.keys()):
        ours, theirs = before.get(name, "not there"), after.get(name, "not there")
        if ours != theirs:
            yield f"{name}: {ours} before, {theirs} after"


def write_text(path: Path) -> None:
    """Write 400 records of made-up text, the same on every machine."""
    rng = random.Random(7)
    words = ("alpha", "beta", "stage", "round", "pipe", "weight", "host", "layer", "train", "token")
    records = (" ".join(rng.choice(words) for _ in range(rng.randint(3, 80))) for _ in range(400))
    path.write_text("".join(json.dumps({"text": record}) + "\n" for record in records))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
