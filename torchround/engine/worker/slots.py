"""Device buffers of a worker, and the layout of values between layers, of weights and of gradients in them.

While one stage computes, the next one's weights arrive beside its weights, and the previous one's gradients leave beside
its gradients. Activations pass through slots of their own. All slots are in fixed buffers: memory that was freed and
allocated again could be written by one stream while another still uses it.

A value between two layers is a tensor, or containers of `torch.utils._pytree` with tensors and plain values as leaves.
A tensor that comes twice travels once and is one object again on the other side, so that its gradient adds up.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchround.engine.device import PASSED, Device, Event, Stream
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.layer import Hidden, aligned
from torchround.packed_formats import PackedPlace, Tables, unpack_numbers
from torchround.planning.memory import ROUNDING_ELEMENTS, slot_space
from torchround.planning.partition import Partition, Stage

logger = logging.getLogger(__name__)


class DeviceSlot:
    """A flat device buffer, and the event after which its next writer may overwrite it.

    `taken` are the elements of the larger buffer that it takes. `frozen_weights` is the stage whose weights are in it, if
    the model trains none, and `HostStore.refreshes` at their upload: until these grow, the weights need not come again.
    `experts` are the stacks, by layer and bundle, of which only the experts that were asked for are in it.
    """

    def __init__(self, memory: Tensor, taken: int = 0) -> None:
        self.memory = memory
        self.taken = taken
        self.frozen_weights: tuple[StageLayout, int] | None = None
        self.experts: dict[tuple[int, int], ExpertUploads] = {}
        self.released: Event = PASSED
        self._packings: Sequence[Packing] = ()
        self._views: list[tuple[Tensor, ...]] = []

    def views(self, packings: "Sequence[Packing]") -> list[tuple[Tensor, ...]]:
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
        for position in range(len(self._slots) if numel else 0):
            self.at(position, numel)

    def next(self, numel: int) -> DeviceSlot:
        """Take the least recently used slot, of at least `numel` elements. Its writer must wait for `released`."""
        self._newest = (self._newest + 1) % len(self._slots)
        return self.at(self._newest, numel)

    def at(self, position: int, numel: int) -> DeviceSlot:
        self._slots += [None] * (position + 1 - len(self._slots))  # nothing if the position exists
        slot = self._slots[position]
        if slot is None or slot.memory.numel() < numel:
            memory = self._device.allocate(numel * self._dtype.itemsize).view(self._dtype)
            slot = self._slots[position] = DeviceSlot(memory)
        return slot


class TwoSlots:
    """One device buffer with room for two consecutive slots, which are taken from its two ends in turn.

    It is as large as the two largest consecutive ones together, which is less than two slots of the largest size.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        # The slots that are in use at the low end and at the high end.
        self._ends = [DeviceSlot(memory[:0]), DeviceSlot(memory[:0])]
        self._newest = 0

    def next(self, numel: int) -> DeviceSlot:
        """Take a slot of `numel` elements beside the newest one. Its writer must wait for `released`.

        That is the event of the slot before at the same end. The slot may also cover older ones of the other end, which
        one stream has released before.
        """
        beside, self._newest = self._ends[self._newest], 1 - self._newest
        before, itemsize = self._ends[self._newest], self.memory.itemsize
        taken = aligned(numel * itemsize) // itemsize
        room = self.memory.numel() - beside.taken
        assert taken <= room, f"a slot of {taken} elements beside the newest one, which leaves {room}"
        start = 0 if self._newest == 0 else self.memory.numel() - taken
        slot = self._ends[self._newest] = DeviceSlot(self.memory[start : start + numel], taken)
        slot.released = before.released
        if before.taken == taken:
            slot.frozen_weights, slot.experts = before.frozen_weights, before.experts
        return slot


class ExpertUploads:
    """The uploads of a packed stack's experts into a slot, each before the first product that has rows for it.

    They are in the compute stream, so that they order themselves with all products that read the slot.
    """

    def __init__(self, device: Device, source: PackedPlace, target: PackedPlace, num_experts: int) -> None:
        self._device, self._source, self._target = device, source, target
        self._numel = source.numel // num_experts  # of one expert
        self._missing = set(range(num_experts))

    def __call__(self, bounds: Sequence[int]) -> None:
        """Upload the experts that have rows and are not there. `bounds` are those of `RowGroups`."""
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop and expert in self._missing:
                self._missing.remove(expert)
                # Views of all experts, made at each upload, would cost milliseconds of host time.
                part = expert * self._numel, self._numel
                source, target = self._source.part(*part), self._target.part(*part)
                self._device.copy(Stream.COMPUTE, target.codes, source.codes)
                self._device.copy(Stream.COMPUTE, target.scales, source.scales)


@dataclass
class UnpackedLayer:
    """Device memory for the numbers of one layer's packed weights: those of the layer that runs, in its own dtype.

    Only the compute stream uses it. `content` is the layer that it holds and `HostStore.refreshes` at its upload.
    """

    memory: Tensor
    content: tuple[int, int] | None = None
    compiled: Callable[..., None] | None = None
    tables: Tables = field(default_factory=dict)

    def compile(self, backend: str, bundles: "Sequence[Bundle]", memory: Tensor) -> None:
        """Compile the unpacking of each kind of bundle by running it on any bytes, which `memory` has."""
        compiled = torch.compile(unpack_numbers, backend=backend, fullgraph=True, dynamic=False)
        kinds = {(str(b.packed), b.unpacked_numel): b for b in bundles if b.early_numel}
        try:
            for bundle in kinds.values():
                self._unpack(SlotRange(0, bundle, 0), memory, compiled)
            self.compiled = compiled
        except Exception as error:  # noqa: BLE001  (a compiler may raise anything)
            logger.warning("packed weights are unpacked without a compiler, with the same bits: %s", error)

    def hold(self, content: tuple[int, int], packed: "Sequence[SlotRange]", weights: Tensor) -> None:
        """Unpack a layer's ranges of the weight slot `weights`, unless they are what the memory holds."""
        if packed and content != self.content:
            self.content = None
            for used in packed:
                self._unpack(used, weights, self.compiled)
            self.content = content

    @torch.no_grad()
    def _unpack(self, used: "SlotRange", weights: Tensor, compiled: Callable[..., None] | None) -> None:
        place = used.bundle.place(weights[used.start : used.start + used.bundle.numel])
        numbers = self.memory[used.unpacked_start :][: used.bundle.unpacked_numel]
        place.read(numbers, compiled, self.tables)


class SlotRange(NamedTuple):
    """The elements of a slot that a layer's use of a bundle occupies, and where its numbers begin in `UnpackedLayer`."""

    layer: int
    bundle: Bundle
    start: int
    unpacked_start: int = 0

    @property
    def use(self) -> tuple[int, int]:
        return self.layer, self.bundle.index


class StageLayout:
    """The ranges of a stage's bundles in a weight slot and, if trainable, in a gradient slot, in forward order.

    A tied bundle has a range, and so a gradient sum, for each use: results do not depend on which layers share a stage.
    """

    def __init__(self, store: HostStore, layers: range) -> None:
        self.layers = layers
        self.weights: list[SlotRange] = []
        self.gradients: list[SlotRange] = []
        self.packed: dict[int, list[SlotRange]] = {layer: [] for layer in layers}
        self.weight_numel = self.gradient_numel = 0
        for layer in layers:
            unpacked_numel = 0
            for bundle in store.layer_bundles(layer):
                self.weights.append(SlotRange(layer, bundle, self.weight_numel, unpacked_numel))
                self.weight_numel += bundle.numel
                unpacked_numel += bundle.early_numel
                if bundle.early_numel:
                    self.packed[layer].append(self.weights[-1])
                if bundle.trainable:
                    self.gradients.append(SlotRange(layer, bundle, self.gradient_numel))
                    self.gradient_numel += bundle.numel

    def gradients_of(self, layers: range) -> slice:
        used = [slot_range for slot_range in self.gradients if slot_range.layer in layers]
        return slice(used[0].start, used[-1].start + used[-1].bundle.numel) if used else slice(0)


class StageSlots:
    """The device memory for weights and gradients of a device's stages: as much as `device_memory` counts.

    `rounding` is for gradients on their way to the host. It is None if slots have the store's dtype. `unpacked` is empty if
    no weights are packed.
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

        def gradient_bytes(stage: Stage) -> int:
            return aligned(self.layout(stage).gradient_numel * accumulate_dtype.itemsize)

        weights = slot_space(partition, num_devices, lambda stage: aligned(store.stage_bytes(stage)))
        gradients = slot_space(partition, num_devices, gradient_bytes, of_gradients=True)
        self.weights = TwoSlots(device.allocate(weights).view(store.dtype))
        self.gradients = TwoSlots(device.allocate(gradients).view(accumulate_dtype))
        self.unpacked = UnpackedLayer(device.allocate(store.unpacked_bytes()).view(store.dtype))
        self.rounding: Tensor | None = None
        if accumulate_dtype != store.dtype:
            largest = max(self.layout(s).gradient_numel for s in partition.stages()[len(partition.forward) :])
            numel = min(largest, ROUNDING_ELEMENTS)
            self.rounding = device.allocate(numel * store.dtype.itemsize).view(store.dtype)

    def layout(self, stage: Stage) -> StageLayout:
        key = stage.start, stage.stop
        if key not in self._layouts:
            self._layouts[key] = StageLayout(self._store, range(*key))
        return self._layouts[key]


def place_constants(device: Device, layers: Sequence[nn.Module]) -> None:
    """Move the buffers of a worker's own copy of the layers to its device. Shared buffers are one tensor there too."""
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


class Structure(NamedTuple):
    """The form of a value without its tensors: the tree of containers, and its leaves with numbers in place of tensors."""

    spec: Any
    leaves: tuple[Any, ...] = ()


# Our own models return these, and they take a short way.
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


@dataclass(frozen=True)
class Packing:
    """The layout of a value's tensors in one flat uint8 buffer, and the value's structure.

    `tensors` has, for each tensor, its first byte, the byte behind its last one, its dtype, shape and strides.
    """

    tensors: tuple[tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]], ...]
    nbytes: int
    structure: Structure = field(compare=False)

    @staticmethod
    def of(tensors: Sequence[Tensor], structure: Structure = FLAT) -> "Packing":
        """Lay out the tensors of a value one after the other, each from an aligned byte on.

        A tensor that fills its memory keeps its strides, also those of dimensions of size 1: the next layer then runs the
        same kernels as without the copy. Raises `TypeError` for tensors without strides.
        """
        packed, start = [], 0
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_nested:
                raise TypeError(f"a tensor of layout {tensor.layout} between two layers; they must be dense")
            dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
            packed.append((start, start + tensor.nbytes, tensor.dtype, tensor.shape, dense.stride()))
            start += aligned(tensor.nbytes)
        return Packing(tuple(packed), start, structure)

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            buffer[start:stop].view(dtype).as_strided(shape, strides)
            for start, stop, dtype, shape, strides in self.tensors
        )


def fill(views: tuple[Tensor, ...], tensors: Sequence[Tensor]) -> None:
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
