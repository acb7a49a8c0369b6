"""What `machines.compress = "changed"` saves: the 16-bit weights that steps of a fine-tuning change, encoded."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import TCPStore

from benchmarks.byte_model import draw_batch, model_config
from benchmarks.frame import Benchmark, Report, in_turns
from benchmarks.installed_text import documentation_of
from benchmarks.staleness_cells import StudySize
from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.exchange.start import share_weights
from torchround.engine.settings import EngineSettings
from torchround.engine.store.host_store import HostStore
from torchround.engine.store.ownership import Ownership
from torchround.machines.changed_weights import decode, encode
from torchround.machines.group import MachineGroup
from torchround.machines.links import Purpose
from torchround.models import FAMILIES
from torchround.pipeline.machine_shares import step_share
from torchround.pipeline.partition import Partition

MOST_RATIO = 0.25
WARM_UP_STEPS = 10
MACHINES = 2
LOOPBACK = "127.0.0.1"
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
    """Pre-train; fine-tune alone and on two machines that send what changed; then measure the codec's speed."""
    torch.set_num_threads(1)
    size = StudySize()
    base = new_store(size)
    base_run = TextRun(options.pretraining_package, options.pretraining_lr, options.pretraining_steps)
    train(base, size, base_run)
    weights = {name: weight.clone() for name, weight in base.weights().items()}
    run = TextRun(options.package, options.lr, options.steps)
    alone = tune(size, run, weights, None)
    machines = tune_on_machines(size, run, weights)
    same = [
        torch.equal(ours, theirs)
        for found in machines
        for ours, theirs in zip(found.bits, alone.bits, strict=True)
    ]
    assert all(same), "machines that send what changed end with other weights than one machine"
    return {
        "parameters": base.num_parameters(),
        "lr": options.lr,
        "losses": alone.losses,
        "changed_shares": alone.changed_shares,
        "mean_sent_share": sum(found.sent_bytes for found in machines)
        / sum(found.raw_bytes for found in machines),
        "same_bits": all(same),
        "gb_per_s": speed(options),
    }


@dataclass(frozen=True)
class TextRun:
    """A training run: the package whose documentation is learnt, the rate after a warm-up, and the steps."""

    package: str
    lr: float
    steps: int


@dataclass(frozen=True)
class TunedRun:
    """What a fine-tuning left on one machine.

    `changed_shares` are the shares of weights that steps changed, `bits` the device weights as integers. `sent_bytes`
    of weights were sent, of `raw_bytes` without compression.
    """

    losses: list[float]
    changed_shares: list[float]
    bits: list[Tensor]
    sent_bytes: int = 0
    raw_bytes: int = 0


def tune_on_machines(size: StudySize, run: TextRun, weights: Mapping[str, Tensor]) -> list[TunedRun]:
    """Fine-tune on machines that are threads of this process, with real gloo between them."""
    master = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def on_machine(rank: int) -> TunedRun:
        store = TCPStore(LOOPBACK, master.port, is_master=False)
        group = MachineGroup(store, rank, MACHINES, host=f"thread {rank}", address=LOOPBACK)
        try:
            return tune(size, run, weights, group)
        finally:
            group.close()

    with ThreadPoolExecutor(MACHINES) as threads:
        return list(threads.map(on_machine, range(MACHINES)))


def tune(
    size: StudySize, run: TextRun, weights: Mapping[str, Tensor], group: MachineGroup | None
) -> TunedRun:
    """Fine-tune these weights with new moments, on one machine of a group or alone."""
    store = new_store(size, group)
    store.write_weights({name: weights[name] for name in store.weights()})
    if group is not None:
        share_weights(store, group)
    before = sent_weight_bytes(group)
    losses, changed_shares = train(store, size, run, group)
    return TunedRun(
        losses,
        changed_shares,
        bits=[bundle.device_weights[0].view(torch.int16).clone() for bundle in store.trained],
        sent_bytes=sent_weight_bytes(group) - before,
        raw_bytes=(MACHINES - 1) * run.steps * sum(bundle.device_weights[0].nbytes for bundle in store.owned),
    )


def new_store(size: StudySize, group: MachineGroup | None = None) -> HostStore:
    """Make a store of the model in bf16 with its initial weights; in a group, with a machine's part of the state."""
    model = FAMILIES["llama3"].build(model_config(size))
    ownership = Ownership(group.rank, group.size) if group is not None else None
    store = HostStore(model, torch.bfloat16, ownership=ownership)
    store.initialize(model, seed=0)
    return store


def train(
    store: HostStore, size: StudySize, run: TextRun, group: MachineGroup | None = None
) -> tuple[list[float], list[float]]:
    """Train on the documentation of a package. Returns each step's loss, and the share of weights that it changed.

    Alone, a step has as many rounds as a group has machines, so that both add gradients in the same order.
    """
    model = FAMILIES["llama3"].build(model_config(size))
    text = documentation_of(run.package).train
    generator = torch.Generator().manual_seed(0)
    partition = Partition((), len(model.layers), ())
    rank, num_machines = (group.rank, group.size) if group is not None else (0, 1)
    settings = EngineSettings(rounds=MACHINES // num_machines, compress_weights=group is not None)
    losses, changed_shares = [], []
    parts = (model, store, [CpuDevice(0)], partition)
    with Engine(*parts, optimizer=AdamWTable(), settings=settings, machines=group) as engine:
        for step in range(run.steps):
            starts = torch.randint(len(text) - size.tokens, (size.sequences,), generator=generator)
            batch = [draw_batch(text, part, size) for part in starts.chunk(MACHINES)]
            share = step_share(len(batch), settings.rounds, rank, num_machines)
            num_labels = sum(micro_batch.num_labels() for micro_batch in batch)
            old = [bundle.device_weights[0].clone() for bundle in store.trained]
            result = engine.forward_backward(
                [batch[index] for index in share.micro_batches], share, num_labels
            )
            engine.step(run.lr * min((step + 1) / WARM_UP_STEPS, 1.0))
            engine.drain()
            losses.append(result.loss())
            changed_shares.append(changed_share(old, [bundle.device_weights[0] for bundle in store.trained]))
    return losses, changed_shares


def changed_share(old: list[Tensor], new: list[Tensor]) -> float:
    """Return the share of 16-bit weights of which any bit differs."""
    pairs = zip(old, new, strict=True)
    changed = sum(int((before.view(torch.int16) != after.view(torch.int16)).sum()) for before, after in pairs)
    return changed / sum(weights.numel() for weights in new)


def sent_weight_bytes(group: MachineGroup | None) -> int:
    """Return the bytes of weights that this machine has sent so far."""
    if group is None:
        return 0
    peers = [machine.rank for machine in group.machines if machine.rank != group.rank]
    return sum(group.links.sender(peer, Purpose.WEIGHTS).bytes_sent for peer in peers)


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

A small model learns the documentation of one installed package, then that of another at the rate of a fine-tuning: on one
machine, and on two that send each other what changed, as threads with real gloo. Both must end with the same bits. The
codec's speed is taken from random weights of which 5 % changed. --check asks that at most a quarter of the bytes is
sent.""",
    add_options,
    measure,
    headline,
    "--pretraining-steps 2 --steps 2 --pretraining-package networkx --numel 65536 --turns 1",
    missed_bounds,
)
