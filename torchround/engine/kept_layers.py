"""What the layers of a model keep from their forward stage to their backward stage, and the bytes counted for it."""

import torch

from torchround.layer import LayeredModel, LayerWork
from torchround.pipeline.partition import KeptNames


class KeptLayers:
    """The parts that each layer keeps, with the bytes that they take on their way.

    `names` gives the parts of each layer by name; it is empty if no layer keeps anything. `kind` is the kind of device
    that the layers run on.
    """

    def __init__(self, model: LayeredModel, names: KeptNames, element_bytes: int, kind: str) -> None:
        self._layers = model.layers
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

    def _count(self, layer: int, shape: torch.Size) -> int | None:
        module = self._layers[layer]
        if not hasattr(module, "work"):
            return None
        work: LayerWork = module.work(*shape, self._element_bytes, self._kind)  # type: ignore[operator]
        names = self.names_of(layer)
        return sum(part.nbytes for part in work.keepable if part.name in names)
