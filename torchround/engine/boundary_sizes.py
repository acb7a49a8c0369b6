"""The bytes of the values between layers: counted by the layers, told by the model, or measured when they come."""

import threading

import torch

from torchround.layer import LayeredModel, aligned


class BoundarySizes:
    """The bytes of the input of each layer, by the shape of the batch; after the last layer those of its output.

    A size that nothing tells is measured in the first pass of a shape. `measured` grows with each size that turned out
    larger than it was known, so that buffers are reserved anew. Any thread may call these methods.
    """

    def __init__(self, model: LayeredModel, element_bytes: int) -> None:
        self.measured = 0
        self._model = model
        self._element_bytes = element_bytes
        self._known: dict[tuple[int, torch.Size], int] = {}
        self._lock = threading.Lock()

    def of(self, cut: int, shape: torch.Size) -> int:
        """Return the bytes of the input of layer `cut`; 0 if they are not known yet."""
        if (cut, shape) not in self._known and (told := self._told(cut, shape)) is not None:
            self._known.setdefault((cut, shape), told)
        return self._known.get((cut, shape), 0)

    def knows(self, cut: int, shape: torch.Size) -> bool:
        """Tell whether `of` has more than a guess."""
        self.of(cut, shape)
        return (cut, shape) in self._known

    def met(self, cut: int, shape: torch.Size, nbytes: int) -> int:
        """Take note of a value of `nbytes`. Returns the bytes of the buffer for it, which values of a shape share."""
        known = self._known.get((cut, shape), -1)
        if nbytes <= known:
            return known
        with self._lock:
            self._known[cut, shape] = max(nbytes, self._known.get((cut, shape), 0))
            self.measured += 1
        return nbytes

    def _told(self, cut: int, shape: torch.Size) -> int | None:
        if self._model.boundary_bytes is not None:
            return self._model.boundary_bytes(cut - 1, shape)
        work = getattr(self._model.layers[cut - 1], "work", None)
        is_output = cut == len(self._model.layers)  # the last layer's work is that of a loss
        if work is None or is_output:
            return None
        return aligned(work(*shape, self._element_bytes).boundary_bytes)
