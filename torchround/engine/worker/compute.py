"""What a stage computes for one micro-batch: forward, and recompute with backward. No device, no threads."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from torchround.engine.worker.transfers import as_hidden, as_tuple
from torchround.layer import Hidden, MicroBatch

# A layer with its parameters bound, compiled or not.
LayerCall = Callable[[Hidden | None, MicroBatch], Hidden]


def with_own_seed(index: int, layer: LayerCall) -> LayerCall:
    """Layer `index` of the model, which draws its dropout masks from numbers of its own."""
    return lambda hidden, micro_batch: layer(hidden, micro_batch.for_layer(index))


def forward(
    layers: Sequence[LayerCall],
    first: int,
    hidden: Hidden | None,
    micro_batch: MicroBatch,
    keep: Collection[int],
) -> list[tuple[int, Hidden]]:
    """Run layers `first, first + 1, ..` without gradients.

    Returns `(l, input of layer l)` for the layers of `keep` inside the stage, then `(stop, output)`.
    """
    outputs: list[tuple[int, Hidden]] = []
    with torch.no_grad():
        for index, layer in enumerate(layers, start=first):
            if index > first and index in keep:
                assert hidden is not None, f"layer {index} has no input"
                outputs.append((index, hidden))
            hidden = layer(hidden, micro_batch)
    assert hidden is not None, "a stage has at least one layer"
    return [*outputs, (first + len(layers), hidden)]


class Recomputation:
    """A stage's forward with what its backward needs: all activations, or with `layerwise` one layer's at a time.

    Layerwise keeps only layer inputs and recomputes each layer again in the backward, as gradient checkpointing
    does: one more forward, for the activations of one layer instead of the stage's.
    """

    def __init__(
        self, layers: Sequence[LayerCall], hidden: Hidden | None, micro_batch: MicroBatch, layerwise: bool
    ) -> None:
        self._micro_batch = micro_batch
        groups = [[layer] for layer in layers] if layerwise else [list(layers)]
        self._groups = groups
        self._inputs = [hidden]
        for group in groups[:-1]:
            [(_, hidden)] = forward(group, 0, hidden, micro_batch, keep=())
            self._inputs.append(hidden)
        self._leaf, self.output = self._run(groups[-1], self._inputs[-1])

    def backward(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Gradients of the stage's inputs, or None where the stage starts the model.

        `gradients` belong to the floating-point tensors of the output, in order. Parameter gradients are
        accumulated into the leaves' `.grad`.
        """
        leaf, output = self._leaf, self.output
        for position in reversed(range(len(self._groups))):
            _backward(output, gradients)
            if leaf is None:
                return None
            gradients = [_gradient_of(tensor) for tensor in as_tuple(leaf) if tensor.is_floating_point()]
            if position > 0:
                leaf, output = self._run(self._groups[position - 1], self._inputs[position - 1])
        return tuple(gradients)

    def _run(self, group: list[LayerCall], hidden: Hidden | None) -> tuple[Hidden | None, Hidden]:
        leaf = None if hidden is None else _as_leaf(hidden)
        output: Hidden | None = leaf
        with torch.enable_grad():
            for layer in group:
                output = layer(output, self._micro_batch)
        assert output is not None, "a stage has at least one layer"
        return leaf, output


def _as_leaf(hidden: Hidden) -> Hidden:
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in as_tuple(hidden)]
    return as_hidden(leaves, isinstance(hidden, Tensor))


def _backward(output: Hidden, gradients: Sequence[Tensor]) -> None:
    floating = [tensor for tensor in as_tuple(output) if tensor.is_floating_point()]
    pairs = [(tensor, grad) for tensor, grad in zip(floating, gradients, strict=True) if tensor.requires_grad]
    if pairs:  # a stage whose layers are all frozen and whose input is the tokens has nothing to do
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])


def _gradient_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
