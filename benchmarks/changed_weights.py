"""What `machines.compress = "changed"` saves: the 16-bit weights that steps of a fine-tuning change, encoded."""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.frame import Benchmark, Report, in_turns
from benchmarks.installed_text import documentation_of
from benchmarks.staleness_cells import StudySize, draw_batch, model_config
from torchround.config import OptimizerTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.store.host_store import HostStore
from torchround.machines.changed_weights import decode, encode
from torchround.models import FAMILIES
from torchround.pipeline.partition import Partition

MOST_RATIO = 0.25
WARM_UP_STEPS = 10
SPEED_SHARE = 0.05  # of the weights that change, for the codec's speed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the run and the codec's measurement."""
    size = StudySize()
    parser.add_argument(
        "--lr", type=float, default=1e-5, help="learning rate of the fine-tuning, after a warm-up of 10"
    )
    parser.add_argument("--steps", type=int, default=60, help="steps of the fine-tuning")
    parser.add_argument("--pretraining-lr", type=float, default=2e-3)
    parser.add_argument("--pretraining-steps", type=int, default=300)
    parser.add_argument("--pretraining-package", default=size.pretraining_package)
    parser.add_argument("--package", default=size.fine_tuning_package, help="whose documentation is learnt")
    parser.add_argument(
        "--numel", type=int, default=1 << 25, help="weights that the codec's speed is measured with"
    )
    parser.add_argument("--turns", type=int, default=3, help="of the measurement of speed")


def measure(options: argparse.Namespace) -> Report:
    """Pre-train, fine-tune, and encode what each step of the fine-tuning changes; then measure the codec's speed."""
    torch.set_num_threads(1)
    size = StudySize()
    base = new_store(size)
    train(base, size, options.pretraining_package, options.pretraining_lr, options.pretraining_steps)
    tuned = new_store(size)  # with moments of its own, as a run that begins with pretrained weights has
    for name, weight in tuned.weights().items():
        weight.copy_(base.weights()[name])
    tuned.refresh_device_weights()
    steps = train(tuned, size, options.package, options.lr, options.steps)
    return {
        "parameters": sum(bundle.numel for bundle in tuned.trained),
        "lr": options.lr,
        "losses": [step.loss for step in steps],
        "changed_shares": [step.changed_share for step in steps],
        "sent_shares": [step.sent_share for step in steps],
        "mean_sent_share": statistics.fmean(step.sent_share for step in steps),
        "gb_per_s": speed(options),
    }


@dataclass(frozen=True)
class StepChanges:
    """A step's loss, and the shares of weights that it changed and of bytes that these take encoded."""

    loss: float
    changed_share: float
    sent_share: float


def new_store(size: StudySize) -> HostStore:
    """Make a store of the model in bf16 with its initial weights."""
    model = FAMILIES["llama3"].build(model_config(size))
    store = HostStore(model, torch.bfloat16)
    store.initialize(model, seed=0)
    return store


def train(store: HostStore, size: StudySize, package: str, lr: float, steps: int) -> list[StepChanges]:
    """Train on the documentation of a package, with a warm-up, and see what each step changes."""
    model = FAMILIES["llama3"].build(model_config(size))
    text = documentation_of(package).train
    generator = torch.Generator().manual_seed(0)
    partition = Partition((), len(model.layers), ())
    changes = []
    with Engine(model, store, [CpuDevice(0)], partition, optimizer=OptimizerTable()) as engine:
        for step in range(steps):
            starts = torch.randint(len(text) - size.tokens, (size.sequences,), generator=generator)
            old = [bundle.device_weights[0].clone() for bundle in store.trained]
            result = engine.forward_backward([draw_batch(text, starts, size)])
            engine.step(lr * min((step + 1) / WARM_UP_STEPS, 1.0))
            engine.drain()
            new = [bundle.device_weights[0] for bundle in store.trained]
            changes.append(StepChanges(result.loss(), *encoded_shares(old, new)))
    return changes


def encoded_shares(old: list[Tensor], new: list[Tensor]) -> tuple[float, float]:
    """Encode new weights and decode them over the old ones. Returns the shares that changed and that are sent."""
    changed = sent_bytes = 0
    for before, after in zip(old, new, strict=True):
        changed += int((before.view(torch.int16) != after.view(torch.int16)).sum())
        encoded = encode(before, after, torch.empty(after.nbytes, dtype=torch.uint8))
        sent_bytes += encoded.lengths.nbytes + encoded.payload.nbytes
        decode(encoded, before)
        assert torch.equal(before.view(torch.int16), after.view(torch.int16)), (
            "weights arrived with other bits"
        )
    return changed / sum(part.numel() for part in new), sent_bytes / sum(part.nbytes for part in new)


def speed(options: argparse.Namespace) -> dict[str, float]:
    """Return GB/s of weights in bf16, by processor time of one thread: encoded, decoded, and copied by PyTorch."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(-(2**15), 2**15, (options.numel,), generator=generator, dtype=torch.int16)
    new = torch.where(torch.rand(options.numel, generator=generator) < SPEED_SHARE, old + 1, old)
    memory = torch.empty(new.nbytes, dtype=torch.uint8)
    encoded = encode(old, new, memory)
    into = torch.empty_like(new)
    works = {
        "encode": lambda: encode(old, new, memory),
        "decode": lambda: decode(encoded, old.clone()),
        "copy": lambda: into.copy_(new),
        "clone": lambda: old.clone(),
    }

    def processor_s(work: Callable[[], object]) -> float:
        start_s = time.thread_time()
        work()
        return time.thread_time() - start_s

    seconds = in_turns(
        {name: lambda work=work: processor_s(work) for name, work in works.items()},  # type: ignore[misc]
        options.turns,
        warm_up_turns=1,
    )
    median_s = {name: statistics.median(of_work) for name, of_work in seconds.items()}
    median_s["decode"] -= median_s.pop(
        "clone"
    )  # decoding works in place, so each turn needs old weights anew
    return {name: new.nbytes / of_work / 1e9 for name, of_work in median_s.items()}


def missed_bounds(figures: Report) -> list[str]:
    """Say if more than a quarter of the bytes is sent."""
    share = figures["mean_sent_share"]
    return [f"{share:.3f} of the bytes are sent"] if share > MOST_RATIO else []


def headline(figures: Report) -> tuple[str, str]:
    """Name the bytes that are sent, and the codec's speed beside a copy."""
    speeds = figures["gb_per_s"]
    shares = f"{figures['mean_sent_share']:.3f} of the bytes at learning rate {figures['lr']:g}"
    return (
        f"{shares}; a thread encodes {speeds['encode']:.2f} and decodes {speeds['decode']:.2f} GB/s of weights",
        f"all weights; bound {MOST_RATIO}; a thread copies {speeds['copy']:.2f} GB/s",
    )


CHANGED_WEIGHTS = Benchmark(
    """What `machines.compress = "changed"` saves: the 16-bit weights that steps of a fine-tuning change, encoded.

A small model learns the documentation of one installed package, then that of another at the rate of a fine-tuning. After
each step its new weights are encoded against the old ones and decoded over them, which must give the same bits. The
codec's speed is taken from random weights of which 5 % changed. --check asks that at most a quarter of the bytes is
sent.""",
    add_options,
    measure,
    headline,
    "--pretraining-steps 2 --steps 2 --pretraining-package networkx --numel 65536 --turns 1",
    missed_bounds,
)
