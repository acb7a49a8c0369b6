"""Device buffers of a worker, and what is where in them.

Each device owns space for the weights of two stages and space for the gradients of two stages, allocated once.
While one stage computes, the next one's weights arrive beside its weights, and the previous one's gradients
leave beside its gradients. Activations pass through slots of their own. All slots are in fixed buffers: memory
that was freed and allocated again could be written by one stream while another still uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchround.engine.device import Device, Event
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.structure import FLAT, Structure, flatten, kept_strides
from torchround.layer import Hidden, aligned
from torchround.planning.memory import ROUNDING_ELEMENTS, slot_space
from torchround.planning.partition import Partition, Stage, StageKind


class SlotRing:
    """Device slots used in turn, so that a transfer fills one while the previous one is in use.

    Sizes are in elements of `dtype`. A slot grows when something larger comes. The smaller buffer is kept
    until the ring goes, because another stream may still use it.
    """

    def __init__(self, device: Device, dtype: torch.dtype = torch.uint8, depth: int = 2) -> None:
        self._device = device
        self._dtype = dtype
        self._slots: list[DeviceSlot | None] = [None] * depth
        self._outgrown: list[DeviceSlot] = []
        self._newest = 0

    def reserve(self, numel: int) -> None:
        """Allocate now what slots of `numel` elements need."""
        for position in range(len(self._slots)):
            self._slot(position, numel)

    def next(self, numel: int) -> "DeviceSlot":
        """Return the least recently used slot, of at least `numel` elements. Its writer must wait for `released`."""
        self._newest = (self._newest + 1) % len(self._slots)
        return self._slot(self._newest, numel)

    def at(self, position: int, numel: int) -> "DeviceSlot":
        """Return the slot at a position of the caller's choice, of at least `numel` elements."""
        self._slots += [None] * (position + 1 - len(self._slots))  # nothing if the position exists
        return self._slot(position, numel)

    def clear(self) -> None:
        """Drop the memory of all slots, whatever refers to the slots themselves."""
        for slot in (*self._slots, *self._outgrown):
            if slot is not None:
                slot.clear()
        self._slots = [None] * len(self._slots)
        self._outgrown = []

    def _slot(self, position: int, numel: int) -> "DeviceSlot":
        slot = self._slots[position]
        if slot is None or slot.memory.numel() < numel:
            if slot is not None:
                # Kept: PyTorch could give freed memory to another stream while this one still uses it.
                self._outgrown.append(slot)
            memory = self._device.allocate(numel * self._dtype.itemsize).view(self._dtype)
            slot = self._slots[position] = DeviceSlot(memory)
        return slot


class TwoSlots:
    """One device buffer with room for two consecutive slots, which are taken from its two ends in turn.

    Slots differ in size. The buffer is as large as the two largest consecutive ones together, which is less
    than two slots of the largest size.
    """

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._memory: Tensor | None = None
        # The slots that are in use at the low end and at the high end.
        self._ends: list[DeviceSlot | None] = [None, None]
        self._newest = 0

    def allocate(self, nbytes: int) -> None:
        """Allocate the buffer."""
        self._memory = self._device.allocate(nbytes).view(self._dtype)

    def next(self, numel: int) -> "DeviceSlot":
        """Return a slot of `numel` elements beside the newest one. Its writer must wait for `released`.

        `released` is the event of the slot before the newest one, at the same end. This slot may also lie over
        older ones of the other end. Those need no event of their own: slots are released in their order, by one
        stream.
        """
        assert self._memory is not None, "slots are taken before their buffer is allocated"
        beside, self._newest = self._ends[self._newest], 1 - self._newest
        taken = aligned(numel * self._dtype.itemsize) // self._dtype.itemsize
        room = self._memory.numel() - (0 if beside is None else beside.taken)
        assert taken <= room, f"a slot of {taken} elements beside the newest one, which leaves {room}"
        start = 0 if self._newest == 0 else self._memory.numel() - taken
        slot = DeviceSlot(self._memory[start : start + numel], taken)
        before = self._ends[self._newest]
        if before is not None:
            assert before.released is not None, "a slot is taken before the last one at its end is released"
            slot.released = before.released
            if before.taken == taken:
                slot.frozen_weights = before.frozen_weights
        self._ends[self._newest] = slot
        return slot

    def clear(self) -> None:
        """Drop the memory, whatever refers to the slots themselves."""
        self._memory = None
        for slot in self._ends:
            if slot is not None:
                slot.clear()
        self._ends = [None, None]


class DeviceSlot:
    """A flat device buffer, and the event after which its next writer may overwrite it.

    `taken` are the elements of the larger buffer that it takes, if it is a part of one. `frozen_weights` is the stage
    whose weights are in it, if the model trains none, and `HostStore.refreshes` at their upload. Until these grow, the
    weights need not come again.
    """

    def __init__(self, memory: Tensor, taken: int = 0) -> None:
        self.memory = memory
        self.taken = taken
        self.frozen_weights: tuple[StageLayout, int] | None = None
        self.released: Event | None = None
        self._packing: Packing | None = None
        self._views: tuple[Tensor, ...] = ()

    def clear(self) -> None:
        """Drop the memory."""
        self.memory, self._packing, self._views = self.memory.new_empty(0), None, ()

    def views(self, packing: "Packing") -> tuple[Tensor, ...]:
        """Return the tensors of `packing` in this buffer: the same objects as last time while the packing stays."""
        # Kept, because views cost host time in every micro-batch, and layouts rarely change.
        if packing != self._packing:
            self._packing, self._views = packing, packing.views(self.memory)
        return self._views

    def holds_any(self, tensors: tuple[Tensor, ...]) -> bool:
        """Tell whether one of these tensors is in this buffer."""
        address = self.memory.untyped_storage().data_ptr()
        return any(tensor.untyped_storage().data_ptr() == address for tensor in tensors)


@dataclass(frozen=True)
class Packing:
    """The layout of a value's tensors in one flat uint8 buffer, and the value's structure.

    `strides` are None for tensors in the order of their shape.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    ranges: tuple[tuple[int, int], ...]
    strides: tuple[tuple[int, ...] | None, ...]
    nbytes: int
    structure: Structure = field(compare=False)

    @staticmethod
    def of(hidden: Hidden) -> "Packing":
        """Lay out the tensors one after the other, each from an aligned byte on."""
        return Packing.laid_out(*flatten(hidden))

    @staticmethod
    def laid_out(tensors: Sequence[Tensor], structure: Structure) -> "Packing":
        """Lay out what `flatten` has returned."""
        # First: it refuses tensors that have neither strides nor bytes of their own.
        strides = tuple(map(kept_strides, tensors))
        ranges, start = [], 0
        for tensor in tensors:
            ranges.append((start, start + tensor.nbytes))
            start += aligned(tensor.nbytes)
        return Packing(
            tuple(tensor.shape for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tuple(ranges),
            strides,
            start,
            structure,
        )

    @staticmethod
    def joined(packings: "Sequence[Packing]") -> "Packing":
        """Lay out the tensors of several packings, one packing after the other."""
        ranges, offset = [], 0
        for packing in packings:
            ranges += [(offset + start, offset + stop) for start, stop in packing.ranges]
            offset += packing.nbytes
        return Packing(
            tuple(shape for packing in packings for shape in packing.shapes),
            tuple(dtype for packing in packings for dtype in packing.dtypes),
            tuple(ranges),
            tuple(strides for packing in packings for strides in packing.strides),
            offset,
            FLAT,
        )

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors as views of `buffer`."""
        parts = zip(self.ranges, self.dtypes, self.shapes, self.strides, strict=True)
        return tuple(
            buffer[start:stop].view(dtype).view(shape)
            if strides is None
            else buffer[start:stop].view(dtype).as_strided(shape, strides)
            for (start, stop), dtype, shape, strides in parts
        )


@dataclass(frozen=True)
class SlotRange:
    """The elements of a weight or gradient slot that one layer's use of a bundle occupies."""

    layer: int
    bundle: int
    start: int
    numel: int


class StageLayout:
    """The ranges of a stage's bundles in a weight slot and, if trainable, in a gradient slot.

    A tied bundle has a range for each layer that uses it, so that each use has its own gradient sum and
    results do not depend on which layers share a stage.
    """

    def __init__(self, store: HostStore, layers: range) -> None:
        self.layers = layers
        self.weights = self._ranges(store, trainable_only=False)
        self.gradients = self._ranges(store, trainable_only=True)
        self.weight_numel = sum(used.numel for used in self.weights)
        self.gradient_numel = sum(used.numel for used in self.gradients)

    def gradients_of(self, layers: range) -> slice:
        """Return the elements of a gradient slot that hold the gradients of consecutive layers of the stage."""
        used = [slot_range for slot_range in self.gradients if slot_range.layer in layers]
        return slice(used[0].start, used[-1].start + used[-1].numel) if used else slice(0)

    def _ranges(self, store: HostStore, trainable_only: bool) -> list[SlotRange]:
        ranges, start = [], 0
        # In forward order, in which the optimizer completes weights: an upload stops at
        # the first incomplete bundle.
        for layer in self.layers:
            for bundle in (store.bundles[index] for index in store.layer_bundles(layer)):
                if bundle.trainable or not trainable_only:
                    ranges.append(SlotRange(layer, bundle.index, start, bundle.numel))
                    start += bundle.numel
        return ranges


class StageSlots:
    """The device memory for the weights and gradients of a device's stages, and for rounding gradients."""

    def __init__(self, device: Device, store: HostStore, accumulate_dtype: torch.dtype) -> None:
        self.rounding: Tensor | None = None
        self._device = device
        self._store = store
        self._accumulate_dtype = accumulate_dtype
        self._weights = TwoSlots(device, store.dtype)
        self._gradients = TwoSlots(device, accumulate_dtype)
        self._layouts: dict[tuple[int, int], StageLayout] = {}

    def allocate(self, partition: Partition, num_devices: int) -> None:
        """Allocate what training and evaluating with `partition` needs: the same as `device_memory` counts."""
        weight_bytes = self._store.dtype.itemsize
        gradient_bytes = self._accumulate_dtype.itemsize
        self._weights.allocate(
            slot_space(
                partition, num_devices, lambda stage: aligned(self._layout(stage).weight_numel * weight_bytes)
            )
        )
        self._gradients.allocate(
            slot_space(
                partition,
                num_devices,
                lambda stage: aligned(self._layout(stage).gradient_numel * gradient_bytes),
                of_gradients=True,
            )
        )
        if self._accumulate_dtype != self._store.gradient_dtype:
            stages = [stage for stage in partition.stages() if stage.kind is not StageKind.FORWARD]
            numel = min(max(self._layout(stage).gradient_numel for stage in stages), ROUNDING_ELEMENTS)
            dtype = self._store.gradient_dtype
            self.rounding = self._device.allocate(numel * dtype.itemsize).view(dtype)

    def for_weights(self, stage: Stage) -> tuple["StageLayout", DeviceSlot]:
        """Return the layout of a stage, and the slot for its weights. Called once for each stage job, in order."""
        layout = self._layout(stage)
        return layout, self._weights.next(layout.weight_numel)

    def for_gradients(self, layout: "StageLayout") -> DeviceSlot:
        """Return the slot for a stage's gradients. Called once for each job with gradients, in order."""
        return self._gradients.next(layout.gradient_numel)

    def clear(self) -> None:
        """Drop the memory, whatever refers to the slots themselves."""
        self._weights.clear()
        self._gradients.clear()
        self.rounding = None

    def _layout(self, stage: Stage) -> "StageLayout":
        key = stage.start, stage.stop
        if key not in self._layouts:
            self._layouts[key] = StageLayout(self._store, range(stage.start, stage.stop))
        return self._layouts[key]


def fill(views: tuple[Tensor, ...], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into the views of a packing."""
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
