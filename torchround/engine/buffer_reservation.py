"""The bytes of the values that stages pass on, and the host buffers for them, reserved before they are used.

A pool that grew when it ran dry would page-lock memory in the middle of a step, whenever devices progress in an order
that they had not taken before. `planning/host_buffers.py` counts for the worst order.
"""

import logging
import threading
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

import torch

from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.slots import Packing
from torchround.layer import LayeredModel, LayerWork, aligned, may_compile
from torchround.planning.host_buffers import (
    LOSS_BYTES,
    HeldPass,
    most_buffers,
    whole_pages,
)
from torchround.planning.keep_rule import kept_whole
from torchround.planning.partition import KeptNames

logger = logging.getLogger(__name__)


class ValueSizes:
    """The bytes of the values that layers pass on, by the shape of the micro-batch: boundaries and kept activations.

    A layer counts them by its `work`, or the model gives them; other boundaries are measured in the first pass of a shape.
    `measured` grows with each one that turned out larger than it was known, so that buffers are reserved anew. Any thread
    may call these methods. `kept_names` are the parts that each layer keeps, if any.
    """

    def __init__(
        self, model: LayeredModel, kept: KeptNames, element_bytes: int, kind: str, compiles: bool
    ) -> None:
        self.measured = 0
        self.num_layers = len(model.layers)
        self.kept_names = {layer: names for layer, names in enumerate(kept) if names}
        self._model = model
        self._element_bytes = element_bytes
        self._kind = kind
        self._compiles = compiles
        self._has_warned = False
        self._boundaries: dict[tuple[int, torch.Size], int] = {}
        self._kept: dict[tuple[int, torch.Size], int] = {}
        self._lock = threading.Lock()

    def boundary(self, cut: int, shape: torch.Size) -> int:
        """Count the bytes of the input of layer `cut`, or of the model's output; 0 if they are not known yet."""
        if (cut, shape) not in self._boundaries:
            work = getattr(self._model.layers[cut - 1], "work", None)
            if work is None or cut >= self.num_layers:  # the last layer's work is that of a loss
                return 0
            nbytes = aligned(work(*shape, self._element_bytes, self._kind).boundary_bytes)
            self._boundaries.setdefault((cut, shape), nbytes)
        return self._boundaries[cut, shape]

    def met(self, cut: int, shape: torch.Size, nbytes: int) -> int:
        """Note a boundary of `nbytes`. Returns the bytes of the buffer for it, which those of a shape share."""
        if nbytes > self._boundaries.get((cut, shape), -1):
            with self._lock:
                self._boundaries[cut, shape] = max(nbytes, self._boundaries.get((cut, shape), 0))
                self.measured += 1
        return self._boundaries[cut, shape]

    def kept(self, layer: int, shape: torch.Size) -> int:
        """Count the bytes that a layer keeps of a micro-batch, packed; 0 if it does not declare its work."""
        names, module = self.kept_names.get(layer, ()), self._model.layers[layer]
        if not names or not hasattr(module, "work"):
            return 0
        if (layer, shape) not in self._kept:
            work: LayerWork = module.work(*shape, self._element_bytes, self._kind)  # type: ignore[operator]
            if self._compiles and may_compile(module, shape.numel()):
                work = kept_whole(work)
            self._kept[layer, shape] = sum(part.nbytes for part in work.keepable if part.name in names)
        return self._kept[layer, shape]

    def buffer_for_kept(self, layer: int, shape: torch.Size, recorded: Packing) -> int | None:
        """Choose the bytes of the buffer for what a layer has recorded; None if it is to be recomputed."""
        declares = hasattr(self._model.layers[layer], "work")
        counted_bytes = self.kept(layer, shape) if declares else recorded.nbytes
        if recorded.tensors and recorded.nbytes <= counted_bytes:
            return counted_bytes
        if (counted_bytes or recorded.nbytes or not declares) and not self._has_warned:
            self._has_warned = True
            named = f"it was to keep {', '.join(self.kept_names[layer])}"  # a layer that counts nothing
            logger.warning(
                "layer %s recorded %d bytes to keep of a micro-batch, but %s. It is recomputed instead, as are others like "
                "it: losses are the same, and steps are as long as if it kept nothing",
                *(self._model.names[layer], recorded.nbytes),
                f"{counted_bytes} were counted" if declares else named,
            )
        return None


@dataclass(frozen=True)
class PassShape(HeldPass):
    """Everything about a pass that decides which buffers it needs. `rounds` hold the micro-batches' `[B, T]`.

    `step` counts only in relation to that of the previous pass. `integer_bytes` are those of each micro-batch.
    """

    training: bool = True
    integer_bytes: tuple[int, ...] = ()
    step: int = field(default=0, compare=False)
    gives_outputs: bool = False

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(chain(*self.rounds))


@dataclass(eq=False)
class BufferReservation:
    """The host buffers that a store and each pass need, reserved in the pool before they are used."""

    values: ValueSizes
    store: HostStore
    pool: HostPool
    num_devices: int
    accumulates: bool

    def __post_init__(self) -> None:
        trained = (layer for bundle in self.store.trained for layer in bundle.layers)
        self._frozen_layers = min(trained, default=self.values.num_layers)  # at the start of the model
        self._reserved: set[tuple[PassShape, PassShape, bool, int]] = set()

    def reserve_for(self, this: PassShape, before: PassShape | None) -> bool:
        """Reserve the buffers of a pass and the previous one, which may be under way together. Returns False if that is done.

        Without a previous pass, reserves for this one and another like it. If the devices have to wait for the previous
        pass's update, only stages of frozen layers at the start of this pass overlap with it.
        """
        # The second pass is reserved for here: otherwise it would page-lock memory in the middle of a run.
        if before is None or not before.rounds:
            # Another call of the same step does not even wait for an update, so it runs further ahead.
            before, this = this, replace(this, step=this.step + (not self.accumulates))
        # An evaluation changes no weights. A training pass `before` makes version `before.step + 1`.
        newest = self.store.mode.version_read(this.step) if this.training else this.step
        overlaps = not before.training or newest - (self.store.stale_layers > 0) <= before.step
        # Steps of a run have few shapes, so this is a look-up for most passes.
        key = this, before, overlaps, self.values.measured
        if key in self._reserved:
            return False
        # Stages of frozen layers at the start read no weights that are ever updated.
        may_begin = takewhile(lambda stage: overlaps or stage.stop <= self._frozen_layers, this.stages)
        passes = before, replace(this, ahead=len(list(may_begin)))
        # In whole pages: two boundaries of about a size can use one buffer in turn.
        needed = most_buffers(
            passes,
            self.num_devices,
            lambda cut, shape: whole_pages(self.values.boundary(cut, shape)),
            lambda layer, shape: whole_pages(self.values.kept(layer, shape)),
        )
        # All integers, losses and outputs of a pass are on the host at once.
        for held in passes:
            needed.update(held.integer_bytes)
            needed[LOSS_BYTES] += len(held.shapes)
            if held.gives_outputs:
                outputs = (self.values.boundary(self.values.num_layers, shape) for shape in held.shapes)
                needed.update(map(whole_pages, outputs))
        del needed[0]
        self.pool.reserve(needed)
        self._reserved.add(key)
        return True
