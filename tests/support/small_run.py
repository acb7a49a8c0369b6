"""Runs of `train.py` small enough to be repeated many times: the real command on a model of a few thousand weights.

Command line, files, checkpoints and signals are real. Only the model and the text are small.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import train
from torchround.commands import configured_model, train_model
from torchround.data.step_batches import StepBatch
from torchround.engine.engine import Engine
from torchround.engine.saver import PendingSave
from torchround.layer import LayeredModel
from torchround.models import FAMILIES, Family
from torchround.optim.split_weights import join
from torchround.run.several_machines import AgreedStop
from torchround.trainer import Trainer

ROOT = Path(__file__).parents[2]
LAYERS = 5  # embedding, three blocks, head
STEPS = 5

SMALL = """
[model]
family = "small"
flavor = "untied"

[tokenizer]
name = "bytes"

[data]
sources = [{ path = "text.jsonl" }]

[training]
steps = 5
seq_len = 16
global_batch_size = 7  # micro-batches of 2, 2, 2 and 1
micro_batch_size = 2
dtype = "float32"

[engine]
devices = "cpu"
num_devices = 2
cpu_threads = 1
plan = { forward = [2, 2], fused = 1, backward = [1, 3], rounds = 1 }

[optimizer]
lr = 1e-2

[checkpoint]
interval_steps = 0
"""
ASYNC = "--engine.update=async"
PREDICT = "--engine.delay_correction=predict"
UNCORRECTED = "--engine.delay_correction=none"
BOUNDED = ("--engine.update=bounded", "--training.clip=layer", "--engine.stale_layers=3")
COMPACT = "--optimizer.state=compact"
TIED = "--model.flavor=tied"
TWO_ROUNDS = "--engine.plan={ forward = [2, 2], fused = 1, backward = [1, 3], rounds = 2 }"


class SmallRuns:
    """A folder with `small.toml` and its text, in which runs are made by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_text(folder / "text.jsonl", lines=200)
        (folder / "small.toml").write_text(SMALL)

    def __call__(self, name: str, *overrides: str, config: str = "small.toml") -> int:
        """Run in this process; returns the exit code."""
        return train.main(["--config", config, f"--run.name={name}", *overrides])

    def path(self, name: str) -> Path:
        return self.folder / "outputs" / name

    def steps(self, name: str) -> list[dict[str, float]]:
        """Read the objects of `metrics.jsonl`."""
        lines = (self.path(name) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name: str) -> dict[int, tuple[float, ...]]:
        """Return the loss of each step, with the other values that do not depend on the machine."""
        keys = ("loss", "grad_norm", "lr", "tokens", "skipped_steps")
        return {int(line["step"]): tuple(line[key] for key in keys) for line in self.steps(name)}

    def saved(self, name: str) -> list[int]:
        """Return the steps of the checkpoints, rising; none if the run has not saved."""
        return sorted(int(path.name[5:]) for path in (self.path(name) / "checkpoints").glob("*"))

    def state(self, name: str, step: int = STEPS) -> dict[str, torch.Tensor]:
        """Read every tensor of a checkpoint: weights, moments and, in async, the older weights."""
        tensors = {}
        for path in sorted((self.path(name) / "checkpoints" / f"step-{step}").glob("*.safetensors")):
            tensors.update(load_file(path))
        return tensors

    def saved_state(self, name: str, step: int = STEPS) -> dict[str, Any]:
        """Read the part of a checkpoint that is not tensors."""
        state: dict[str, Any] = json.loads(
            (self.path(name) / "checkpoints" / f"step-{step}" / "state.json").read_text()
        )
        return state

    def assert_same(self, name: str, reference: str, step: int = STEPS) -> None:
        """Require bitwise equal runs: the losses of every step, each logged once, and the state saved after `step`."""
        assert list(self.losses(reference)) == list(range(1, step + 1))
        assert [line["step"] for line in self.steps(name)] == [line["step"] for line in self.steps(reference)]
        assert self.losses(name) == self.losses(reference)
        ours, theirs = self.state(name, step), self.state(reference, step)
        assert ours.keys() == theirs.keys() and len(ours) > 0
        different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
        assert not different, f"{len(different)} of {len(ours)} tensors differ: {different[:5]}"

    def start(self, name: str, *overrides: str, launcher: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        """Start a run as a process of its own, with the debug model, which `train.py` knows without this module."""
        arguments = ["--config", "small.toml", f"--run.name={name}", "--model.family=llama3"]
        arguments += ["--model.flavor=debug", "--engine.plan=none", *overrides]
        return subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / "train.py"), *arguments],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def small_family() -> Family[Any]:
    """Make a Llama 3 family with three blocks, 16 wide."""
    family = FAMILIES["llama3"]
    untied = family.config_from_flavor(
        "debug", num_layers=3, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=32
    )
    return replace(family, flavors={"untied": untied, "tied": replace(untied, tied_embeddings=True)})


@pytest.fixture
def small_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Yield runs in `tmp_path`, with the model family `small`."""
    use_family(monkeypatch, "small", small_family())
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield SmallRuns(tmp_path)
    torch.set_num_threads(threads)


def use_family(monkeypatch: pytest.MonkeyPatch, name: str, family: Family[Any]) -> None:
    """Make `model.family = name` build `family` in this process."""
    monkeypatch.setattr(configured_model, "FAMILIES", {**configured_model.FAMILIES, name: family})


def write_text(path: Path, lines: int, seed: int = 0) -> None:
    """Write JSON lines of random words."""
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(1, 9))) for _ in range(60)]
    texts = (" ".join(generator.choices(words, k=generator.randint(1, 30))) for _ in range(lines))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Call `action` in the main thread while a run dispatches step `step`, counted from the run's first step."""
    with_seeds, calls = StepBatch.with_seeds, [0]

    def counting(self, seed, index):
        calls[0] += 1
        if calls[0] == step:
            action()
        return with_seeds(self, seed, index)

    monkeypatch.setattr(StepBatch, "with_seeds", counting)


def awaiting_saves(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that waits until the given number of saves, counted from now on, have ended or failed.

    A save ends once its step is reported. That happens when the step after next is dispatched, at the latest.
    """
    save, saves = Engine.save, list[PendingSave[Any]]()

    def seen(self, write):
        saves.append(save(self, write))
        return saves[-1]

    def wait(number: int) -> None:
        assert len(saves) >= number, f"{len(saves)} saves have begun"
        for pending in saves[:number]:
            pending.wait()

    monkeypatch.setattr(Engine, "save", seen)
    return wait


def interrupt(number: int = signal.SIGTERM) -> None:
    signal.raise_signal(number)


def stop_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run save what it has loaded, and nothing else."""
    train = Trainer._measure_and_train

    def stopped(trainer: Trainer, stop: AgreedStop) -> tuple[str, int]:
        interrupt()
        return train(trainer, stop)

    monkeypatch.setattr(Trainer, "_measure_and_train", stopped)


def fp32_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint in fp32."""
    return {
        name: join(tensor, state[name.replace("weights/", "residual/")]) if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in state.items()
        if name.startswith("weights/")
    }


def with_model(monkeypatch: pytest.MonkeyPatch, action: Callable[[LayeredModel], None]) -> None:
    """Call `action` with the model that `train.py` builds."""
    build = train_model.build_model

    def built(*arguments):
        model = build(*arguments)
        action(model)
        return model

    monkeypatch.setattr(train_model, "build_model", built)


def before_forward(monkeypatch: pytest.MonkeyPatch, layer: int, action: Callable[[int], None]) -> None:
    """Call `action` before each forward of a layer, recomputations included, on any device.

    The action receives the number of forwards so far, including this one.
    """
    lock, calls = threading.Lock(), [0]

    def change(model: LayeredModel) -> None:
        kind = type(model.layers[layer])
        forward = kind.forward
        model.layers[layer].is_watched = True  # devices have copies of the layers

        def watched(self, hidden, micro_batch):
            if getattr(self, "is_watched", False):
                with lock:
                    calls[0] += 1
                    call = calls[0]
                action(call)
            return forward(self, hidden, micro_batch)

        monkeypatch.setattr(kind, "forward", watched)

    with_model(monkeypatch, change)


def files_of(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
