"""Device buffers of a worker, and the layout of values between layers, of weights and of gradients in them.

Each device owns space for the weights of two stages and space for the gradients of two stages, allocated once.
While one stage computes, the next one's weights arrive beside its weights, and the previous one's gradients
leave beside its gradients. Activations pass through slots of their own. All slots are in fixed buffers: memory
that was freed and allocated again could be written by one stream while another still uses it.

A value between two layers is a tensor, or containers of `torch.utils._pytree` with tensors and plain values as leaves.
Its tensors travel in a fixed order, and its structure travels without them. A tensor that comes twice travels once and is
one object again on the other side, so that its gradient adds up as if it had never left. Our own models return one
tensor or a flat tuple; these take a short way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchround.engine.device import Device, Event, Stream
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.layer import Hidden, aligned
from torchround.planning.memory import ROUNDING_ELEMENTS, slot_space
from torchround.planning.partition import Partition, Stage, StageKind


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
        self._packings: Sequence[Packing] = ()
        self._views: list[tuple[Tensor, ...]] = []

    def views(self, packings: "Sequence[Packing]") -> list[tuple[Tensor, ...]]:
        """View the tensors of packings that fill this buffer one after the other."""
        # The same objects as last time: views cost host time in every micro-batch, and layouts rarely change.
        if packings != self._packings:
            starts = accumulate((packing.nbytes for packing in packings), initial=0)
            self._views = [
                packing.views(self.memory[start:]) for packing, start in zip(packings, starts, strict=False)
            ]
            self._packings = packings
        return self._views


class SlotRing:
    """Device slots used in turn, so that a transfer fills one while the previous one is in use.

    Sizes are in elements of `dtype`. A slot is replaced when something larger comes.
    """

    def __init__(self, device: Device, dtype: torch.dtype = torch.uint8, depth: int = 2) -> None:
        self._device = device
        self._dtype = dtype
        self._slots: list[DeviceSlot | None] = [None] * depth
        self._newest = 0

    def reserve(self, numel: int) -> None:
        """Allocate now what slots of `numel` elements need."""
        for position in range(len(self._slots)):
            self.at(position, numel)

    def next(self, numel: int) -> DeviceSlot:
        """Take the least recently used slot, of at least `numel` elements. Its writer must wait for `released`."""
        self._newest = (self._newest + 1) % len(self._slots)
        return self.at(self._newest, numel)

    def at(self, position: int, numel: int) -> DeviceSlot:
        """Take the slot at a position of the caller's choice, of at least `numel` elements."""
        self._slots += [None] * (position + 1 - len(self._slots))  # nothing if the position exists
        slot = self._slots[position]
        if slot is None or slot.memory.numel() < numel:
            memory = self._device.allocate(numel * self._dtype.itemsize).view(self._dtype)
            slot = self._slots[position] = DeviceSlot(memory)
        return slot


class TwoSlots:
    """One device buffer with room for two consecutive slots, which are taken from its two ends in turn.

    Slots differ in size. The buffer is as large as the two largest consecutive ones together, which is less
    than two slots of the largest size.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        # The slots that are in use at the low end and at the high end.
        self._ends: list[DeviceSlot | None] = [None, None]
        self._newest = 0

    def next(self, numel: int) -> DeviceSlot:
        """Take a slot of `numel` elements beside the newest one. Its writer must wait for `released`.

        `released` is the event of the slot before the newest one, at the same end. This slot may also cover
        older ones of the other end. Those need no event of their own: slots are released in their order, by one
        stream.
        """
        beside, self._newest = self._ends[self._newest], 1 - self._newest
        itemsize = self._memory.itemsize
        taken = aligned(numel * itemsize) // itemsize
        room = self._memory.numel() - (0 if beside is None else beside.taken)
        assert taken <= room, f"a slot of {taken} elements beside the newest one, which leaves {room}"
        start = 0 if self._newest == 0 else self._memory.numel() - taken
        slot = DeviceSlot(self._memory[start : start + numel], taken)
        before, self._ends[self._newest] = self._ends[self._newest], slot
        if before is not None:
            assert before.released is not None, "a slot is taken before the last one at its end is released"
            slot.released = before.released
            if before.taken == taken:
                slot.frozen_weights = before.frozen_weights
        return slot


class SlotRange(NamedTuple):
    """The elements of a weight or gradient slot that one layer's use of a bundle occupies."""

    layer: int
    bundle: Bundle
    start: int

    @property
    def use(self) -> tuple[int, int]:
        """The layer, and the bundle's index."""
        return self.layer, self.bundle.index


class StageLayout:
    """The ranges of a stage's bundles in a weight slot and, if trainable, in a gradient slot.

    A tied bundle has a range for each layer that uses it, so that each use has its own gradient sum and
    results do not depend on which layers share a stage. Ranges are in forward order, in which the optimizer completes
    weights: an upload stops at the first incomplete bundle.
    """

    def __init__(self, store: HostStore, layers: range) -> None:
        self.layers = layers
        self.weights: list[SlotRange] = []
        self.gradients: list[SlotRange] = []
        self.weight_numel = self.gradient_numel = 0
        for layer in layers:
            for bundle in store.layer_bundles(layer):
                self.weights.append(SlotRange(layer, bundle, self.weight_numel))
                self.weight_numel += bundle.numel
                if bundle.trainable:
                    self.gradients.append(SlotRange(layer, bundle, self.gradient_numel))
                    self.gradient_numel += bundle.numel

    def gradients_of(self, layers: range) -> slice:
        """Find the elements of a gradient slot for consecutive layers of the stage."""
        used = [slot_range for slot_range in self.gradients if slot_range.layer in layers]
        return slice(used[0].start, used[-1].start + used[-1].bundle.numel) if used else slice(0)


class StageSlots:
    """The device memory for weights and gradients of a device's stages: as much as `device_memory` counts.

    Each stage job takes a slot of `weights`, and one of `gradients` if it has a backward. `rounding` is for gradients on
    their way to the host. It is None if slots have the store's gradient dtype.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        accumulate_dtype: torch.dtype,
        partition: Partition,
        num_devices: int,
    ) -> None:
        self._store = store
        self._layouts: dict[tuple[int, int], StageLayout] = {}

        def two_slots(numel: Callable[[Stage], int], dtype: torch.dtype, of_gradients: bool) -> TwoSlots:
            space = slot_space(
                partition, num_devices, lambda stage: aligned(numel(stage) * dtype.itemsize), of_gradients
            )
            return TwoSlots(device.allocate(space).view(dtype))

        def gradient_numel(stage: Stage) -> int:
            return self.layout(stage).gradient_numel

        self.weights = two_slots(lambda stage: self.layout(stage).weight_numel, store.dtype, False)
        self.gradients = two_slots(gradient_numel, accumulate_dtype, True)
        self.rounding: Tensor | None = None
        if accumulate_dtype != store.gradient_dtype:
            stages = [stage for stage in partition.stages() if stage.kind is not StageKind.FORWARD]
            numel = min(max(map(gradient_numel, stages)), ROUNDING_ELEMENTS)
            memory = device.allocate(numel * store.gradient_dtype.itemsize)
            self.rounding = memory.view(store.gradient_dtype)

    def layout(self, stage: Stage) -> StageLayout:
        key = stage.start, stage.stop
        if key not in self._layouts:
            self._layouts[key] = StageLayout(self._store, range(*key))
        return self._layouts[key]


def place_constants(device: Device, layers: Sequence[nn.Module]) -> None:
    """Move the buffers of a worker's own copy of the layers to its device, where they stay.

    Buffers that layers share are one tensor on the device too.
    """
    modules = nn.ModuleList(layers)
    if on_host := tuple(modules.buffers()):  # each once
        packing = Packing.of(on_host)
        memory = device.allocate(packing.nbytes)
        views = packing.views(memory)
        # Before any computation and on its stream, so that no layer has to wait for them.
        device.run(Stream.COMPUTE, partial(fill, views, on_host), writes=[memory])
        copies = {id(old): view for old, view in zip(on_host, views, strict=True)}
        for module in modules.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                module._buffers[name] = copies[id(buffer)]


# Plain values have the same meaning on every device and in every thread.
PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.Size, range, slice, type, type(None))


class TensorNumber(int):
    """The place of a tensor among the different tensors of a value."""


@dataclass(frozen=True)
class Structure:
    """The form of a value without its tensors: the tree of containers, and its leaves with numbers in place of tensors."""

    spec: Any
    leaves: tuple[Any, ...] = ()


SINGLE: Final = Structure("a tensor by itself")
FLAT: Final = Structure("a tuple of different tensors")


def flatten(hidden: Hidden) -> tuple[tuple[Tensor, ...], Structure]:
    """Take a value apart into its different tensors and its structure.

    Raises `TypeError` for a leaf that is neither a tensor nor a plain value: it could not follow to another device.
    """
    if isinstance(hidden, Tensor):
        return (hidden,), SINGLE
    is_flat = type(hidden) is tuple and all(isinstance(part, Tensor) for part in hidden)
    if is_flat and len(set(map(id, hidden))) == len(hidden):
        return hidden, FLAT
    # PyTorch takes a size apart, and makes a tuple of it again.
    leaves, spec = pytree.tree_flatten(hidden, is_leaf=lambda part: isinstance(part, torch.Size))
    tensors: dict[int, tuple[TensorNumber, Tensor]] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[position] = tensors.setdefault(id(leaf), (TensorNumber(len(tensors)), leaf))[0]
        elif not isinstance(leaf, PLAIN):
            raise TypeError(
                f"a {type(leaf).__module__}.{type(leaf).__qualname__} between two layers: only tensors and plain values "
                "(None, numbers, texts) can go there, in tuples, lists, dicts or named tuples"
            )
    return tuple(tensor for _, tensor in tensors.values()), Structure(spec, tuple(leaves))


def unflatten(tensors: Sequence[Tensor], structure: Structure) -> Hidden:
    """Undo `flatten`, with other tensors if wanted."""
    if structure is SINGLE:
        return tensors[0]
    if structure is FLAT:
        return tuple(tensors)
    leaves = [tensors[leaf] if type(leaf) is TensorNumber else leaf for leaf in structure.leaves]
    return pytree.tree_unflatten(leaves, structure.spec)


def has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Choose the strides of a dense copy of a tensor: its own ones if it fills its memory.

    A copy with the same strides lets the next layer run the same kernels as without the copy. Strides of dimensions of
    size 1 count too: they change nothing in memory, but kernels are chosen by them. Raises `TypeError` for tensors
    without strides.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"a tensor of layout {tensor.layout} between two layers: only dense tensors can go there"
        )
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


class PackedTensor(NamedTuple):
    """The place of a tensor in a flat uint8 buffer."""

    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """The layout of a value's tensors in one flat uint8 buffer, and the value's structure."""

    tensors: tuple[PackedTensor, ...]
    nbytes: int
    structure: Structure = field(compare=False)

    @staticmethod
    def of(tensors: Sequence[Tensor], structure: Structure = FLAT) -> "Packing":
        """Lay out the tensors of a value one after the other, each from an aligned byte on."""
        packed, start = [], 0
        for tensor in tensors:
            # First: it refuses tensors that have neither strides nor bytes of their own.
            strides = dense_strides(tensor)
            packed.append(PackedTensor(tensor.shape, tensor.dtype, start, start + tensor.nbytes, strides))
            start += aligned(tensor.nbytes)
        return Packing(tuple(packed), start, structure)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            buffer[place.start : place.stop].view(place.dtype).as_strided(place.shape, place.strides)
            for place in self.tensors
        )


def fill(views: tuple[Tensor, ...], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into the views of a packing."""
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
