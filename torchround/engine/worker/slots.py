"""Device slots for weights and gradients, and the chunked transfers between them and the host store.

Each device owns two weight slots and two gradient slots, allocated once for the plan's largest stage. While one
pair computes, the next stage's weights fill the other slot and the previous stage's gradients leave theirs, one
equal chunk in each transfer window (RoundPipe section 4.2).
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchround.engine.device import Device, Event, Stream
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.pipeline.memory import ROUNDING_ELEMENTS


@dataclass(frozen=True)
class SlotRange:
    """A bundle's place in a slot on behalf of one layer, in elements."""

    layer: int
    bundle: int
    start: int
    numel: int


class StageLayout:
    """Where the bundles of a stage's layers lie in a weight slot and, the trainable ones, in a gradient slot.

    A tied bundle lies there once for each layer that uses it, so that each use has its own gradient sum and
    results do not depend on which layers share a stage.
    """

    def __init__(self, store: HostStore, layers: range) -> None:
        self.layers = layers
        self.weights = self._place(store, trainable_only=False)
        self.gradients = self._place(store, trainable_only=True)
        self.weight_numel = sum(part.numel for part in self.weights)
        self.gradient_numel = sum(part.numel for part in self.gradients)

    def _place(self, store: HostStore, trainable_only: bool) -> list[SlotRange]:
        parts, start = [], 0
        for layer in self.layers:
            for bundle in (store.bundles[index] for index in store.layer_bundles(layer)):
                if bundle.trainable or not trainable_only:
                    parts.append(SlotRange(layer, bundle.index, start, bundle.numel))
                    start += bundle.numel
        return parts


class DeviceSlot:
    """A flat device buffer and the event after which it may be overwritten."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.released: Event | None = None


class SlotPair:
    """Two slots used in turn."""

    def __init__(self, device: Device, numel: int, dtype: torch.dtype) -> None:
        self._slots = [DeviceSlot(device.allocate(numel * dtype.itemsize).view(dtype)) for _ in range(2)]
        self._turn = 0

    def next(self) -> DeviceSlot:
        """The slot used before the last one. The writer must wait for `released`."""
        self._turn = 1 - self._turn
        return self._slots[self._turn]


class WeightUpload:
    """One stage's weights on their way into a slot. `waited_s`: host time spent waiting for their update."""

    def __init__(
        self,
        device: Device,
        store: HostStore,
        ordering: Ordering,
        slot: DeviceSlot,
        layout: StageLayout,
        version: int,
        use: int,
    ) -> None:
        self.slot = slot
        self.layout = layout
        self._device = device
        self._store = store
        self._ordering = ordering
        self._version = version
        self._use = use
        self._part = 0
        self._done_elements = 0
        self.waited_s = 0.0
        if slot.released is not None:
            device.wait(Stream.WEIGHT_UPLOAD, slot.released)

    def advance(self, numel: int) -> None:
        """Enqueue up to `numel` elements, stopping at a bundle whose version is not complete yet."""
        while numel > 0 and self.may_advance:
            numel -= self._enqueue(numel)

    def finish(self) -> Event:
        """Enqueue the rest, waiting for versions where needed. The event after which the slot is filled."""
        while not self.complete:
            self._enqueue(self.layout.weight_numel)
        return self._device.record(Stream.WEIGHT_UPLOAD)

    @property
    def remaining(self) -> int:
        """Elements not enqueued yet."""
        return sum(part.numel for part in self.layout.weights[self._part :]) - self._done_elements

    @property
    def complete(self) -> bool:
        return self._part == len(self.layout.weights)

    @property
    def may_advance(self) -> bool:
        """Whether `advance` would enqueue anything."""
        if self.complete:
            return False
        bundle = self._store.bundles[self.layout.weights[self._part].bundle]
        return not bundle.trainable or self._ordering.may_upload(bundle.index, self._version)

    @property
    def blocked(self) -> bool:
        """Whether `finish` would have to wait for the optimizer."""
        return not self.complete and not all(
            self._ordering.may_upload(part.bundle, self._version)
            for part in self.layout.weights[self._part :]
            if self._store.bundles[part.bundle].trainable
        )

    def _enqueue(self, numel: int) -> int:
        part = self.layout.weights[self._part]
        bundle = self._store.bundles[part.bundle]
        if bundle.trainable and self._done_elements == 0:
            start_s = time.perf_counter()
            self._ordering.before_upload(bundle.index, self._version)
            self.waited_s += time.perf_counter() - start_s
        start, stop = self._done_elements, min(self._done_elements + numel, part.numel)
        for source in bundle.sources(self._version, start, stop):
            target = self.slot.memory[part.start + source.start :][: source.memory.numel()]
            self._device.copy(Stream.WEIGHT_UPLOAD, target, source.memory)
        self._done_elements = stop
        if stop == part.numel:
            self._part, self._done_elements = self._part + 1, 0
            if bundle.trainable:
                event = self._device.record(Stream.WEIGHT_UPLOAD)
                self._ordering.uploaded(bundle.index, self._version, upload_use(self._use, part.layer), event)
        return stop - start


def upload_use(slot: int, layer: int) -> int:
    """A number for the upload of a bundle by stage slot `slot` on behalf of `layer`, unique in a run."""
    return slot * 2**20 + layer


class GradientDownload:
    """One stage's gradients on their way from a slot to the host store, rounded to its gradient dtype.

    `contribution` says, by layer and bundle, which part of the step's gradient they are.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        ordering: Ordering,
        pool: HostPool,
        rounding: Tensor | None,
        slot: DeviceSlot,
        layout: StageLayout,
        step: int,
        contribution: dict[tuple[int, int], int],
    ) -> None:
        self._device = device
        self._store = store
        self._ordering = ordering
        self._pool = pool
        self._rounding = rounding
        self._slot = slot
        self._layout = layout
        self._step = step
        self._contribution = contribution
        self._part = 0
        self._done_elements = 0
        self._landing: tuple[Tensor, object] | None = None
        device.wait(Stream.GRADIENT_DOWNLOAD, device.record(Stream.COMPUTE))

    def advance(self, numel: int) -> None:
        """Enqueue up to `numel` elements, stopping at a gradient that the optimizer still reads."""
        while numel > 0 and not self.complete and self._may_download():
            numel -= self._enqueue(numel)

    def finish(self) -> None:
        """Enqueue the rest and release the slot."""
        while not self.complete:
            self._enqueue(self._layout.gradient_numel)
        self._slot.released = self._device.record(Stream.GRADIENT_DOWNLOAD)

    @property
    def remaining(self) -> int:
        """Elements not enqueued yet."""
        return sum(part.numel for part in self._layout.gradients[self._part :]) - self._done_elements

    @property
    def complete(self) -> bool:
        return self._part == len(self._layout.gradients)

    def _may_download(self) -> bool:
        part = self._layout.gradients[self._part]
        return self._ordering.may_write_gradient(part.bundle, self._step, self._previous_part(part))

    def _enqueue(self, numel: int) -> int:
        part = self._layout.gradients[self._part]
        if self._landing is None:
            self._landing = self._open_landing(part)
        target, landing = self._landing
        start = self._done_elements
        stop = min(start + min(numel, ROUNDING_ELEMENTS), part.numel)
        self._copy(target[start:stop], self._slot.memory[part.start + start : part.start + stop])
        self._done_elements = stop
        if stop == part.numel:
            event = self._device.record(Stream.GRADIENT_DOWNLOAD)
            contribution = self._contribution[part.layer, part.bundle]
            self._ordering.gradient_landed(part.bundle, self._step, contribution, event, landing)
            self._part, self._done_elements, self._landing = self._part + 1, 0, None
        return stop - start

    def _open_landing(self, part: SlotRange) -> tuple[Tensor, object]:
        """Where a part goes: the store's gradient when it is the whole sum, else a buffer of its own.

        Of such buffers there is one for each use of a bundle: rule 4 holds the next round's part back.
        """
        bundle = self._store.bundles[part.bundle]
        assert bundle.gradient is not None, f"bundle {part.bundle} has no gradient buffer"
        self._ordering.before_gradient_write(part.bundle, self._step, self._previous_part(part))
        if not bundle.adds_up:
            return bundle.gradient, None
        buffer = self._pool.take(part.numel * self._store.gradient_dtype.itemsize)
        for event in buffer.busy:
            self._device.wait(Stream.GRADIENT_DOWNLOAD, event)
        return buffer.memory.view(self._store.gradient_dtype), buffer

    def _previous_part(self, part: SlotRange) -> int:
        """What the round before made of the same sum, negative in the first round."""
        return self._contribution[part.layer, part.bundle] - len(self._store.bundles[part.bundle].layers)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._rounding is None:
            self._device.copy(Stream.GRADIENT_DOWNLOAD, target, source)
            return
        rounded = self._rounding[: source.numel()]
        self._device.run(
            Stream.GRADIENT_DOWNLOAD, lambda: rounded.copy_(source), reads=[source], writes=[rounded]
        )
        self._device.copy(Stream.GRADIENT_DOWNLOAD, target, rounded)


def bind(
    store: HostStore,
    skeletons: list[nn.Module],
    layout: StageLayout,
    weights: DeviceSlot,
    gradients: DeviceSlot | None,
) -> list[nn.Module]:
    """The stage's layers with their parameters as views of the slots.

    With `gradients`, trainable parameters are leaves whose `.grad` is a view of that slot, so that autograd
    accumulates into it in the slot's dtype.
    """
    weight_start = {(part.layer, part.bundle): part.start for part in layout.weights}
    gradient_start = {(part.layer, part.bundle): part.start for part in layout.gradients}
    for layer in layout.layers:
        for binding in store.bindings[layer]:
            place = (layer, binding.bundle)
            parameter = binding.parameter
            leaf = nn.Parameter(parameter.view(weights.memory[weight_start[place] :]), requires_grad=False)
            if gradients is not None and place in gradient_start:
                leaf.requires_grad_(True)
                leaf.grad_dtype = gradients.memory.dtype
                leaf.grad = parameter.view(gradients.memory[gradient_start[place] :])
            module, name = owner_of(skeletons[layer], binding.path)
            setattr(module, name, leaf)
    return [skeletons[layer] for layer in layout.layers]
