"""Runs of `train.py` small enough to be repeated many times: the real command on a model of a few thousand weights.

Command line, files, checkpoints and signals are real. Only the model and the text are small.
"""

import itertools
import json
import random
import signal
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import train
from tests.support.model_tools import know_borrowed_models
from tests.support.processes import ROOT, start_program
from torchround.checkpoint import Checkpointer, checkpoint_name
from torchround.commands import configured_model
from torchround.data.step_batches import StepBatch
from torchround.engine.engine import Engine
from torchround.models import FAMILIES
from torchround.observe import run_page
from torchround.optim.split_weights import join
from torchround.planning import plan_report
from torchround.trainer import Trainer

LAYERS = 4  # embedding, two blocks, head
STEPS = 5
SEQUENCES, MICRO_BATCHES = 5, 3  # of a step

SMALL = """
model = { family = "small", flavor = "untied" }
tokenizer = { name = "bytes" }
data = { sources = [{ path = "text.jsonl" }], shuffle_sequences = 16 }  # the usual window holds all of this text
# Micro-batches of 2, 2 and 1.
training = { steps = 5, seq_len = 16, global_batch_size = 5, micro_batch_size = 2, dtype = "float32" }
[engine]
devices = "cpu"
num_devices = 2
cpu_threads = 1
plan = { forward = [1, 2], fused = 1, backward = [1, 2], rounds = 1 }
[optimizer]
lr = 1e-2
[checkpoint]
interval_steps = 0
"""
ASYNC = "--engine.update=async"
PREDICT = "--engine.delay_correction=predict"
UNCORRECTED = "--engine.delay_correction=none"
BOUNDED = ("--engine.update=bounded", "--training.clip=layer", "--engine.stale_layers=2")
COMPACT = "--optimizer.state=compact"
TIED = "--model.flavor=tied"
TWO_ROUNDS = "--engine.plan={ forward = [1, 2], fused = 1, backward = [1, 2], rounds = 2 }"


class SmallRuns:
    # Of a line of the metrics, the values that do not depend on the machine.
    compared = ("loss", "grad_norm", "lr", "tokens", "skipped_steps")

    def __init__(self, folder, lines=200):
        self.folder = folder
        write_text(folder / "text.jsonl", lines)
        (folder / "small.toml").write_text(SMALL)

    def __call__(self, name, *overrides, config="small.toml"):
        return train.main(["--config", config, f"--run.name={name}", *overrides])

    def path(self, name):
        return self.folder / "outputs" / name

    def steps(self, name):
        lines = (self.path(name) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name):
        return {int(line["step"]): tuple(map(line.get, self.compared)) for line in self.steps(name)}

    def saved(self, name):
        return list(Checkpointer(self.path(name) / "checkpoints").checkpoints())

    def checkpoint(self, name, step=STEPS):
        return self.path(name) / "checkpoints" / checkpoint_name(step)

    def state(self, name, step=STEPS):
        return tensors_in(self.checkpoint(name, step))

    def saved_state(self, name, step=STEPS):
        return json.loads((self.checkpoint(name, step) / "state.json").read_text())

    def plan(self, name):
        return json.loads((self.path(name) / "plan.json").read_text())

    def assert_same(self, name, reference, step=STEPS):
        assert list(self.losses(reference)) == list(range(1, step + 1))
        assert [line["step"] for line in self.steps(name)] == [line["step"] for line in self.steps(reference)]
        assert self.losses(name) == self.losses(reference)
        ours, theirs = self.state(name, step), self.state(reference, step)
        assert ours.keys() == theirs.keys() and len(ours) > 0
        different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
        assert not different, f"{len(different)} of {len(ours)} tensors differ: {different[:5]}"

    def start(self, name, *overrides, launcher=()):
        """Start a run as a process of its own, with the debug model, which `train.py` knows without this module."""
        arguments = ["--config", "small.toml", f"--run.name={name}", "--model.family=llama3"]
        arguments += ["--model.flavor=debug", "--engine.plan=none", *overrides]
        return start_program(*launcher, ROOT / "train.py", *arguments, folder=self.folder)


def small_family():
    family = FAMILIES["llama3"]
    untied = family.config_from_flavor(
        "debug", num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=32
    )
    return replace(family, flavors={"untied": untied, "tied": replace(untied, tied_embeddings=True)})


@contextmanager
def working_in(folder):
    """Enter a folder that runs work in, with the family `small`. Threads stay as many.

    Runs draw no pictures, and a borrowed model is cut once for all runs of this process. A dry run finds the longest sequence
    of up to 64 tokens: of a borrowed model, each length is traced, once too.
    """
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        use_family(patch, "small", small_family())
        draw_no_pictures(patch)
        know_borrowed_models(patch)
        patch.setattr(plan_report, "LENGTH_STEP", 64)
        patch.setattr(plan_report, "LONGEST_LENGTH", 64)
        patch.chdir(folder)
        yield folder
    torch.set_num_threads(threads)


@pytest.fixture
def working_folder(tmp_path):
    with working_in(tmp_path):
        yield tmp_path


@pytest.fixture
def small_runs(tmp_path):
    with working_in(tmp_path):
        yield SmallRuns(tmp_path)


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory):
    with working_in(tmp_path_factory.mktemp("runs")) as folder:
        yield SmallRuns(folder)


def draw_no_pictures(monkeypatch):
    """Let runs end without the picture of their losses, which takes them longer than five steps."""
    monkeypatch.setattr(run_page, "draw_losses", lambda folders, picture: None)


def use_family(monkeypatch, name, family):
    monkeypatch.setattr(configured_model, "FAMILIES", {**configured_model.FAMILIES, name: family})


def write_text(path, lines, seed=0):
    generator = random.Random(seed)
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(1, 9))) for _ in range(60)]
    texts = (" ".join(generator.choices(words, k=generator.randint(1, 30))) for _ in range(lines))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def before_step(monkeypatch, step, action):
    """Call `action` in the main thread while a run dispatches step `step`, counted from the run's first step."""
    with_seeds, calls = StepBatch.with_seeds, [0]

    def counting(self, seed, index):
        calls[0] += 1
        if calls[0] == step:
            action()
        return with_seeds(self, seed, index)

    monkeypatch.setattr(StepBatch, "with_seeds", counting)


def stop_after(step, runs, name, *overrides):
    before = max(runs.saved(name), default=0)
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, step, interrupt)
        assert runs(name, *overrides) == 128 + signal.SIGTERM
    assert runs.saved(name)[-1] == before + step


def awaiting_saves(monkeypatch):
    """A save ends once its step is reported: when the step after next is dispatched, at the latest."""
    save, saves = Engine.save, []

    def seen(self, write):
        saves.append(save(self, write))
        return saves[-1]

    def wait(number):
        assert len(saves) >= number, f"{len(saves)} saves have begun"
        for pending in saves[:number]:
            pending.wait()

    monkeypatch.setattr(Engine, "save", seen)
    return wait


def interrupt(number=signal.SIGTERM):
    signal.raise_signal(number)


def stop_before_the_first_step(monkeypatch):
    """Let a run save what it has loaded, and nothing else."""
    train = Trainer._measure_and_train

    def stopped(trainer, stop):
        interrupt()
        return train(trainer, stop)

    monkeypatch.setattr(Trainer, "_measure_and_train", stopped)


def fp32_weights(state):
    return {
        name: join(tensor, state[name.replace("weights/", "residual/")]) if tensor.dtype == torch.bfloat16 else tensor
        for name, tensor in state.items()
        if name.startswith("weights/")
    }


def with_model(monkeypatch, action):
    build = configured_model.build_model

    def built(*arguments, **options):
        model = build(*arguments, **options)
        action(model)
        return model

    monkeypatch.setattr(configured_model, "build_model", built)


def around_forward(monkeypatch, layer, around):
    """Call `around(forward)` in place of each forward of a layer, recomputations included, on any device."""

    def change(model):
        kind = type(model.layers[layer])
        forward = kind.forward
        model.layers[layer].is_watched = True  # devices have copies of the layers

        def watched(self, hidden, micro_batch):
            plain = partial(forward, self, hidden, micro_batch)
            return around(plain) if getattr(self, "is_watched", False) else plain()

        monkeypatch.setattr(kind, "forward", watched)

    with_model(monkeypatch, change)


def before_forward(monkeypatch, layer, action):
    calls = itertools.count(1)

    def around(forward):
        action(next(calls))
        return forward()

    around_forward(monkeypatch, layer, around)


def tensors_in(folder):
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def flip_last_bit(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
