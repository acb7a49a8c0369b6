"""Short runs of the toy model on the simulated accelerator under an adversarial schedule, and their outcome."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from tests.simulated_accelerator.host_threads import Controls, HostThreads
from tests.support.device_toy import device_engine
from tests.support.toy import PARTITIONS, toy_batches, toy_model, toy_store
from torchround.engine.device import AcceleratorDevice, Stream
from torchround.engine.store.bundles import SYNC, UpdatePolicy
from torchround.engine.store.host_memory import HostPool
from torchround.engine.watch.watchdog import QueueWatch, Watchdog

LR = 1e-2
MakeDevice = Callable[[torch.device, int], AcceleratorDevice]


class Scheduler(Controls, Protocol):
    """The part of the simulator that chooses what runs next."""

    def run_adversarially(self, seed: int) -> None: ...

    def run_freely(self) -> None: ...

    def set_role(self, stream: torch.Stream, role: str) -> None: ...


@dataclass(frozen=True)
class Schedule:
    """The roles of a device's streams: early ones run as soon as they may, late ones only if a waiting thread needs it.

    `allocating` is the role of the stream on which memory is allocated and poisoned once it is freed. Without `roles`,
    the simulator draws roles by `seed` and draws them anew now and then.
    """

    roles: Mapping[Stream, str] | None = None
    allocating: str | None = "early"
    seed: int = 0


def starved(*late: Stream, **options: Any) -> Schedule:
    """Run these streams as late as they may, and all others as early as they may."""
    return Schedule({stream: "late" if stream in late else "early" for stream in Stream}, **options)


def hurried(*early: Stream, **options: Any) -> Schedule:
    """Run these streams as early as they may, and all others as late as they may."""
    return Schedule({stream: "early" if stream in early else "late" for stream in Stream}, **options)


@contextmanager
def scheduled(scheduler: Scheduler, schedule: Schedule) -> Iterator[MakeDevice]:
    """Run what follows under a schedule. Yields the function that makes the devices that it is for."""

    def make(torch_device: torch.device, worker: int) -> AcceleratorDevice:
        device = AcceleratorDevice(torch_device, worker)
        if schedule.allocating is not None:
            scheduler.set_role(torch.accelerator.current_stream(torch_device), schedule.allocating)
        for stream, role in (schedule.roles or {}).items():
            scheduler.set_role(device._streams[stream], role)
        return device

    threads = HostThreads(scheduler)
    with pytest.MonkeyPatch.context() as patched:
        # The watchdog polls events in naps. A question makes nothing run here, and the length of a nap is chance.
        patched.setattr(Watchdog, "synchronize", lambda watchdog, event: event.synchronize())
        patched.setattr(QueueWatch, "_forget_passed", lambda watch, events: None)
        scheduler.run_adversarially(schedule.seed)
        threads.install(patched)
        try:
            yield make
        finally:
            threads.uninstall()
            scheduler.run_freely()


@dataclass(frozen=True)
class ToyRun:
    """A short run of the toy model. `evaluates` adds an evaluation beside each step.

    With `tight_pool` nothing is reserved in the pool of host buffers, so that each buffer is used again as soon as it
    comes back.
    """

    partition: str = "forward coarser"
    workers: int = 1
    devices: int = 1
    policy: UpdatePolicy = SYNC
    tied: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 2
    micro_batches: int = 3
    evaluates: bool = False
    tight_pool: bool = False
    options: tuple[tuple[str, Any], ...] = ()


@dataclass
class Outcome:
    """What a run leaves: its losses, and the state of its store."""

    losses: list[float]
    state: dict[str, Tensor] = field(repr=False)

    def equals(self, other: "Outcome") -> bool:
        """Tell whether both are the same bit for bit. NaN equals nothing."""
        return (
            self.losses == other.losses
            and self.state.keys() == other.state.keys()
            and all(torch.equal(self.state[name], other.state[name]) for name in self.state)
        )


def execute(run: ToyRun, make: MakeDevice = AcceleratorDevice) -> Outcome:
    """Train on the simulated accelerator."""
    model = toy_model(run.tied)
    store = toy_store(model, run.dtype, policy=run.policy, pinned=True)
    [held_out] = toy_batches(1, run.micro_batches, seed=1)
    results = []
    partition, options = PARTITIONS[run.partition], dict(run.options)
    with pytest.MonkeyPatch.context() as patched:
        if run.tight_pool:
            patched.setattr(HostPool, "reserve", lambda pool, counts: None)
        with device_engine(
            "simulated", model, store, partition, run.workers, run.devices, make, **options
        ) as engine:
            for micro_batches in toy_batches(run.steps, run.micro_batches):
                if run.evaluates:
                    results.append(engine.evaluate(held_out))
                results.append(engine.forward_backward(micro_batches))
                engine.step(LR)
            engine.drain()
            losses = [result.loss() for result in results]
    outcome = Outcome(losses, {name: view.clone() for name, view in store.named_views().items()})
    store.close()
    return outcome
