"""What the layers of a model keep from their forward stage to their backward stage, and the bytes counted for it."""

import logging
from dataclasses import replace

import torch

from torchround.keeping import KeptActivationError
from torchround.layer import LayeredModel, LayerWork, runs_fused
from torchround.planning.partition import KeptNames

logger = logging.getLogger(__name__)


class KeptLayers:
    """The parts that each layer keeps, with the bytes that they take on their way.

    `names` gives the parts of each layer by name; it is empty if no layer keeps anything. `kind` is the kind of device
    that the layers run on, `compiles` says that they run compiled there.
    """

    def __init__(
        self, model: LayeredModel, names: KeptNames, element_bytes: int, kind: str, compiles: bool
    ) -> None:
        self._layers = model.layers
        self._layer_names = model.names
        self._compiles = compiles
        self._has_warned = False
        self._names = names
        self._element_bytes = element_bytes
        self._kind = kind
        self._counted: dict[tuple[int, torch.Size], int | None] = {}
        self.layers = frozenset(layer for layer, of_layer in enumerate(names) if of_layer)

    def names_of(self, layer: int) -> tuple[str, ...]:
        """Return the names of the parts that a layer keeps."""
        return self._names[layer] if self._names else ()

    def nbytes(self, layer: int, shape: torch.Size) -> int | None:
        """Count the bytes that a layer keeps of a micro-batch of `shape` `[B, T]`, packed.

        None if the layer does not declare its work.
        """
        key = layer, shape
        if key not in self._counted:
            self._counted[key] = self._count(layer, shape)
        return self._counted[key]

    def refuse_none(self, layer: int) -> None:
        """Raise `KeptActivationError` for a layer that declares no work and has recorded nothing: no count misleads it.

        Compiled layers record by code that a compiler may refuse, so they are recomputed.
        """
        if not self._compiles:
            raise KeptActivationError(
                f"layer {self._layer_names[layer]} is to keep {', '.join(self.names_of(layer))}, but it names no such part "
                "by torchround.keeping.keep; leave the layer out of the settings' kept"
            )

    def warn(self, layer: int, nbytes: int, counted_bytes: int) -> None:
        """Say once that a layer recorded nothing, or more than was counted for it, so that it is recomputed instead."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "layer %s recorded %s to keep of a micro-batch, but %d were counted. It is recomputed instead, as are "
                "others like it: losses are the same, and steps are as long as if it kept nothing",
                self._layer_names[layer],
                f"{nbytes} bytes" if nbytes else "nothing",
                counted_bytes,
            )

    def _count(self, layer: int, shape: torch.Size) -> int | None:
        module = self._layers[layer]
        if not hasattr(module, "work"):
            return None
        work: LayerWork = module.work(*shape, self._element_bytes, self._kind)  # type: ignore[operator]
        if self._compiles and not runs_fused(module, self._kind, shape.numel()):
            work = kept_whole(work)
        names = self.names_of(layer)
        return sum(part.nbytes for part in work.keepable if part.name in names)


def kept_whole(work: LayerWork) -> LayerWork:
    """Return the work of a layer that keeps all that its compiled code returns, or nothing.

    That is its output and what its backward reads. The layer's last part stands for what its other parts do not count.
    """
    if not work.keepable:
        return work
    *parts, last = work.keepable
    rest = work.activation_bytes + work.boundary_bytes - sum(part.nbytes for part in parts)
    return replace(work, keepable=(*parts, replace(last, nbytes=max(last.nbytes, rest))))
