"""Short runs of the toy model on the simulated accelerator under an adversarial schedule, and their outcome."""

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simulated_accelerator.host_threads import HostThreads
from tests.support.device_toy import device_engine
from tests.support.optimizers import OPTIMIZERS
from tests.support.reference import Reference
from tests.support.small_decoders import packed_decoder, write_base
from tests.support.toy import BLOCKS, PARTITIONS, VOCABULARY, toy_batches, toy_model, toy_store
from torchround.engine.board import Watchdog
from torchround.engine.device import AcceleratorDevice, Device, Stream
from torchround.engine.store.bundles import OLDER_WEIGHTS
from torchround.engine.store.host_memory import HostPool
from torchround.models import FAMILIES
from torchround.models.common.feed_forward import MoEShape
from torchround.optim import make_optimizer
from torchround.planning.update_modes import SYNC, UpdateMode

LR = 1e-2


@dataclass(frozen=True)
class Schedule:
    """The roles of a device's streams: early ones run as soon as they may, late ones only if a waiting thread needs it.

    `allocating` is the role of the stream on which memory is allocated and poisoned once it is freed. Without `roles`,
    the simulator draws roles by `seed` and draws them anew now and then.
    """

    roles: Mapping[Stream, str] | None = None
    allocating: str | None = "early"
    seed: int = 0


def starved(*late, **options):
    return Schedule({stream: "late" if stream in late else "early" for stream in Stream}, **options)


def hurried(*early, **options):
    return Schedule({stream: "early" if stream in early else "late" for stream in Stream}, **options)


@contextmanager
def scheduled(scheduler, schedule):
    def make(torch_device, worker):
        device = AcceleratorDevice(torch_device, worker)
        if schedule.allocating is not None:
            scheduler.set_role(torch.accelerator.current_stream(torch_device), schedule.allocating)
        for kind, stream in device._streams.items():
            scheduler.name_stream(stream, f"worker {worker} {kind.value}")
            if schedule.roles is not None:
                scheduler.set_role(stream, schedule.roles[kind])
        return device

    threads = HostThreads(scheduler)
    with pytest.MonkeyPatch.context() as patched:
        # The watchdog polls events in naps. A question makes nothing run here, and the length of a nap is chance.
        patched.setattr(Watchdog, "synchronize", lambda watchdog, event, words: event.synchronize())
        patched.setattr(Device, "_forget_passed", lambda device, events: None)
        scheduler.run_adversarially(schedule.seed)
        threads.install(patched)
        try:
            yield make
        finally:
            threads.uninstall()
            scheduler.run_freely(schedule.seed)


@dataclass(frozen=True)
class ShortRun:
    """A short run: of the toy model, or of a small model of a family.

    With `evaluates`, an evaluation runs beside each step. With `tight_pool` nothing is reserved in the pool of host
    buffers, so that each buffer is used again as soon as it comes back. With `growing`, later micro-batches have more
    tokens. `optimizer` is one of `OPTIMIZERS`, `settings` are the engine's.
    """

    partition: str = "forward coarser"
    workers: int = 1
    devices: int = 1
    mode: UpdateMode = SYNC
    tied: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 2
    micro_batches: int = 3
    rounds: int = 1
    evaluates: bool = False
    tight_pool: bool = False
    growing: bool = False
    model: str = "toy"
    stale_layers: int = 0
    optimizer: str = "adamw"
    settings: tuple[tuple[str, Any], ...] = ()

    def batches(self):
        batches = toy_batches(self.steps, self.micro_batches)
        if not self.growing:
            return batches
        return [
            [
                micro_batch.rebuild()(tensor.repeat(1 + step + index, 1) for tensor in micro_batch.tensors())
                for index, micro_batch in enumerate(batch)
            ]
            for step, batch in enumerate(batches)
        ]

    def build(self):
        if self.model == "toy":
            return toy_model(self.tied)
        family, flavor = self.model.split("-")
        if flavor == "packed":
            flavor, sizes = ("debug_moe", {"moe": MoEShape(16, 1, 128)}) if family == "qwen3" else ("debug", {})
            return packed_decoder("nf4", (family, flavor), num_layers=BLOCKS, **sizes)
        sizes = {"vocab_size": VOCABULARY, "num_layers": BLOCKS, "tied_embeddings": self.tied}
        model = FAMILIES[family].build(FAMILIES[family].config_from_flavor(flavor, **sizes))
        return model


@dataclass
class Outcome:
    losses: list[float]
    state: dict[str, Tensor] = field(repr=False)

    def equals(self, other):
        """Tell whether both are the same bit for bit. NaN equals nothing."""
        return (
            self.losses == other.losses
            and self.state.keys() == other.state.keys()
            and all(torch.equal(self.state[name], other.state[name]) for name in self.state)
        )


def execute(run, make=AcceleratorDevice):
    """Train on the simulated accelerator. Only weights and moments count as state."""
    model = run.build()
    table = OPTIMIZERS[run.optimizer]
    store = toy_store(model, run.dtype, mode=run.mode, pinned=True, optimizer=make_optimizer(table))
    write_base(store)
    [held_out] = toy_batches(1, run.micro_batches, seed=1)
    partition, results = PARTITIONS[run.partition], []
    with pytest.MonkeyPatch.context() as patched:
        if run.tight_pool:
            patched.setattr(HostPool, "reserve", lambda pool, counts: None)
        with device_engine(
            *("simulated", model, store, partition, run.workers, run.devices, make),
            optimizer=table,
            **{"rounds": run.rounds, "stale_layers": run.stale_layers, **dict(run.settings)},
        ) as engine:
            for micro_batches in run.batches():
                if run.evaluates:
                    results.append(engine.evaluate(held_out))
                results.append(engine.forward_backward(micro_batches))
                engine.step(LR)
            engine.drain()
            losses = [result.loss() for result in results]
    state = {name: view.clone() for name, view in store.named_views().items() if not name.startswith(OLDER_WEIGHTS)}
    store.close()
    return Outcome(losses, state)


def reference(run):
    """Train by the reference loop on the first simulated device: one stream, one thread, no engine."""
    model = run.build()
    store = toy_store(model, run.dtype, mode=run.mode)
    write_base(store)
    options = {"rounds": run.rounds, "stale": run.stale_layers, "device": "simulated"}
    loop = Reference.of(model, store, OPTIMIZERS[run.optimizer], **options)
    [held_out] = toy_batches(1, run.micro_batches, seed=1)
    losses = []
    for micro_batches in run.batches():
        if run.evaluates:
            losses.append(loop.evaluate(held_out))
        losses.append(loop.step(micro_batches, LR))
    not_saved = {f"weights/{name}" for name in model.packed}
    state = {name: view for name, view in loop.state().items() if not name.startswith(OLDER_WEIGHTS)}
    return Outcome(losses, {name: view for name, view in state.items() if name not in not_saved})
