"""The cache of a text: what the layers remember of a group of sequences, from one pass to the next."""

from collections.abc import Sequence
from typing import Any

from torch import nn


class DecodingCache:
    """Each layer's memory of a group's tokens so far, on the device that runs the layer.

    A layer makes its own by `new_cache(capacity)`; `capacity` counts the tokens of a sequence. Layers without that
    method, or whose `remembers` is false, see each token alone. A layer's thread uses its part alone, so the parts need no lock.
    """

    def __init__(self, layers: Sequence[nn.Module], capacity: int) -> None:
        self._of_layers: list[Any] = [
            layer.new_cache(capacity) if _remembers(layer) else None  # type: ignore[operator]
            for layer in layers
        ]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._of_layers if part is not None)

    def for_layer(self, index: int) -> Any:
        """Return the part of layer `index`; None if it remembers nothing."""
        return self._of_layers[index]

    def clear(self) -> None:
        """Drop the memory, whatever refers to this object."""
        for part in self._of_layers:
            if part is not None:
                part.clear()


def can_decode(layers: Sequence[nn.Module]) -> bool:
    """Return whether all layers between the first and the last remember earlier tokens.

    A first layer looks tokens up, and a last one makes logits of one position.
    """
    return all(map(_remembers, layers[1:-1]))


def sequence_bytes(layers: Sequence[nn.Module], tokens: int, element_bytes: int) -> list[int]:
    """Return, by layer, the device memory that a sequence of `tokens` tokens takes."""
    return [
        int(layer.cache_bytes(1, tokens, element_bytes)) if _remembers(layer) else 0  # type: ignore[operator]
        for layer in layers
    ]


def _remembers(layer: nn.Module) -> bool:
    return bool(getattr(layer, "remembers", hasattr(layer, "new_cache")))
