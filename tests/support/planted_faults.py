"""Faults and delays that go off at a chosen location of an in-process run, drawn with a fixed seed.

A fault in a layer goes off by what is being computed (step, layer, micro-batch, pass through the layer), not by when,
so a case is the same on every machine. It notes only that it went off. The location that the
engine must report follows from the partition and the dispatch rule alone (`expected_location`).
"""

import itertools
import random
import threading
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

from tests.support.toy import PARTITIONS, toy_batches, toy_model
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.errors import DeviceMemoryError, FaultLocation
from torchround.layer import LayeredModel
from torchround.pipeline.partition import Partition

STEPS, MICRO_BATCHES, LAYERS = 3, 4, 7
BATCHES = toy_batches(STEPS, MICRO_BATCHES)
VALIDATION = toy_batches(1, MICRO_BATCHES, seed=1)[0]
VARIANTS = ("plain", "tied", "frozen")

# Sites of faults. The first six are in a layer, the next ones are operations of a device on a stream.
LAYER_SITES = ("forward", "loss", "fused backward", "recompute", "backward", "validation")
STREAM_SITES = {
    "weights up": Stream.WEIGHT_UPLOAD,
    "activations up": Stream.ACTIVATION_UPLOAD,
    "activations down": Stream.ACTIVATION_DOWNLOAD,
    "gradients down": Stream.GRADIENT_DOWNLOAD,
}
HOST_SITES = ("gradient norm", "update", "caller")
SITES = (*LAYER_SITES, *STREAM_SITES, "allocation", *HOST_SITES)


class PlantedError(RuntimeError):
    """A programming error in a layer."""


class PlantedExit(BaseException):
    """An exception that `except Exception` does not catch."""


EXCEPTIONS = (
    *(PlantedError, PlantedExit, KeyboardInterrupt, SystemExit, MemoryError, StopIteration, AssertionError),
    *(torch.OutOfMemoryError, DeviceMemoryError),
)


@dataclass(frozen=True)
class Case:
    """One planted fault. Without an `exception` it is a delay, which must change nothing.

    In a layer it goes off at `step`, `layer`, `micro_batch`; at a device or the host at the `count`-th operation.
    """

    number: int
    site: str
    exception: type[BaseException] | None
    variant: str
    update: str
    rounds: int
    num_devices: int
    partition: str
    layerwise: bool
    step: int
    layer: int
    micro_batch: int
    count: int

    def __str__(self) -> str:
        what = self.exception.__name__ if self.exception else "delay"
        where = f"step{self.step}-layer{self.layer}-micro{self.micro_batch}-count{self.count}"
        model = f"{self.variant}-{self.update}-rounds{self.rounds}-devices{self.num_devices}"
        return f"{self.number}-{self.site}-{what}-{model}-{self.partition}-{where}".replace(" ", "_")


def draw_cases(number: int, seed: int) -> list[Case]:
    """Draw cases: every site in turn, each mode and device count equally often, the rest at random."""
    drawn = random.Random(seed)
    modes = itertools.cycle(itertools.product(("sync", "async"), (1, 2), range(1, 9)))
    cases = []
    for index in range(number):
        update, rounds, num_devices = next(modes)
        site = SITES[(index + index // 32) % len(SITES)]
        partition = drawn.choice([name for name in PARTITIONS if _has(PARTITIONS[name], site)])
        delays = site not in ("allocation", "caller") and drawn.random() < 0.2
        case = Case(
            index,
            site,
            None if delays else drawn.choice(EXCEPTIONS),
            drawn.choice(VARIANTS),
            update,
            rounds,
            num_devices,
            partition,
            layerwise=site not in ("forward", "recompute") and drawn.random() < 0.25,
            step=drawn.randrange(STEPS),
            layer=0,
            micro_batch=drawn.randrange(MICRO_BATCHES),
            count=drawn.randint(1, 3),
        )
        cases.append(replace(case, layer=drawn.choice(_layers(PARTITIONS[partition], site, case.variant))))
    return cases


def _has(partition: Partition, site: str) -> bool:
    return bool(partition.forward) or site not in ("forward", "recompute", "backward")


def _layers(partition: Partition, site: str, variant: str) -> list[int]:
    """Return the layers in which a fault at `site` goes off; a frozen embedding's output has no backward."""
    split = LAYERS - partition.fused
    if site == "loss":
        return [LAYERS - 1]
    if site == "fused backward":
        return list(range(max(split, 1), LAYERS))
    if site in ("forward", "recompute"):
        return list(range(split))
    if site == "backward":
        return list(range(1, split))
    return list(range(LAYERS))


class Fuse:
    """A fuse that goes off once, or each time if it is a delay. All copies of a layer share it."""

    def __init__(self, case: Case | None) -> None:
        self.case = case
        self.raised: BaseException | None = None
        self.device: str | None = None
        self.gone_off = 0
        self._lock = threading.Lock()
        self._left = case.count if case else 0
        batches = {f"step {step}": batch for step, batch in enumerate(BATCHES)} | {"validation": VALIDATION}
        self._names = {
            micro_batch.tokens.numpy().tobytes(): (name, index)
            for name, batch in batches.items()
            for index, micro_batch in enumerate(batch)
        }

    def __deepcopy__(self, memo: object) -> "Fuse":
        return self

    def in_layer(self, sites: tuple[str, ...], layer: int, tokens: torch.Tensor) -> None:
        """Go off if the case is at one of `sites` of this layer with these tokens."""
        if self.case is None or self.case.site not in sites or layer != self.case.layer:
            return
        name, index = self._names[tokens.numpy().tobytes()]
        wanted = "validation" if self.case.site == "validation" else f"step {self.case.step}"
        if (name, index) == (wanted, self.case.micro_batch):
            self._go_off(None)

    def at_operation(self, site: str, device: str | None = None) -> None:
        """Count an operation at `site`, and go off if it is the case's."""
        if self.case is None or self.case.site != site:
            return
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            self._go_off(device)

    def _go_off(self, device: str | None) -> None:
        assert self.case is not None
        self.gone_off += 1
        if self.case.exception is None:
            time.sleep(0.02)
        elif self.gone_off == 1:
            self.device, self.raised = device, self.case.exception(f"planted: {self.case}")
            raise self.raised


class FusedLayer(nn.Module):
    """Layer `index` of a toy model with a fuse before it, and one in the backward of its output."""

    def __init__(self, inner: nn.Module, index: int, fuse: Fuse) -> None:
        super().__init__()
        self.inner, self.index, self.fuse = inner, index, fuse

    def forward(self, hidden, micro_batch):
        tokens = micro_batch.tokens
        if torch.is_grad_enabled():
            self.fuse.in_layer(("loss", "recompute"), self.index, tokens)
            return Tripwire.apply(self.inner(hidden, micro_batch), self.fuse, self.index, tokens)
        self.fuse.in_layer(("forward", "validation"), self.index, tokens)
        return self.inner(hidden, micro_batch)

    def init_weights(self, generator):
        self.inner.init_weights(generator)


class Tripwire(torch.autograd.Function):
    """An identity whose backward passes the fuse."""

    @staticmethod
    def forward(ctx, hidden, fuse, index, tokens):
        ctx.site = fuse, index, tokens
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        fuse, index, tokens = ctx.site
        fuse.in_layer(("fused backward", "backward"), index, tokens)
        return gradient, None, None, None


class FusedDevice(CpuDevice):
    """A virtual device with a fuse in each copy, and in allocations once it has its fixed buffers."""

    def __init__(self, index: int, fuse: Fuse) -> None:
        super().__init__(index)
        self._fuse = fuse
        self._entered = False

    def enter_thread(self) -> None:
        self._entered = True

    def _allocate(self, nbytes):
        if self._entered:
            self._fuse.at_operation("allocation", self.name)
        return super()._allocate(nbytes)

    def _copy(self, stream, destination, source):
        for site, its_stream in STREAM_SITES.items():
            if its_stream is stream:
                self._fuse.at_operation(site, self.name)
        super()._copy(stream, destination, source)


def fused_model(variant: str, fuse: Fuse) -> LayeredModel:
    """Return the toy model with fuses. If `frozen`, as with adapters, some layers train nothing and one trains a part."""
    model = toy_model(tied=variant == "tied")
    if variant == "frozen":
        for index in (1, 4):
            model.layers[index].requires_grad_(False)
        model.layers[3].up.requires_grad_(False)
    layers = tuple(FusedLayer(layer, index, fuse) for index, layer in enumerate(model.layers))
    return LayeredModel(model.names, layers)


def expected_location(case: Case, names: tuple[str, ...]) -> FaultLocation:
    """Return the location of a fault in a layer of a training step, by the partition and the dispatch rule.

    Slot `i` of the run is on device `i mod N`; a step has `rounds` x `stages` slots (RoundPipe section 3.2).
    """
    partition = PARTITIONS[case.partition]
    split = LAYERS - partition.fused
    ends = list(itertools.accumulate(partition.forward))
    starts_back = [split - done for done in itertools.accumulate(partition.backward)]
    if case.site == "forward":
        kind, position = "forward", next(i for i, end in enumerate(ends) if case.layer < end)
        span = range(ends[position] - partition.forward[position], ends[position])
    elif case.layer >= split:
        kind, position, span = "fused", len(ends), range(split, LAYERS)
    else:
        back = next(i for i, start in enumerate(starts_back) if case.layer >= start)
        kind, position = "backward", len(ends) + 1 + back
        span = range(starts_back[back], starts_back[back] + partition.backward[back])
    stages = len(partition.forward) + 1 + len(partition.backward)
    round_index = case.micro_batch * case.rounds // MICRO_BATCHES
    slot = (case.step * case.rounds + round_index) * stages + position
    return FaultLocation(f"device cpu:{slot % case.num_devices}", kind, tuple(names[i] for i in span), case.micro_batch)
