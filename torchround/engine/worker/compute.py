"""The computation of a stage for one micro-batch: forward, and recomputation with backward. No device, no threads."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.slots import DeviceSlot, StageLayout, as_hidden, as_tuple
from torchround.layer import Hidden, MicroBatch

# A layer with its parameters bound, compiled or not.
LayerCall = Callable[[Hidden | None, MicroBatch], Hidden]


def bind(
    store: HostStore,
    skeletons: list[nn.Module],
    layout: StageLayout,
    weights: DeviceSlot,
    gradients: DeviceSlot | None,
) -> list[nn.Module]:
    """Return the stage's layers with their parameters as views of the slots.

    With `gradients`, trainable parameters are leaves whose `.grad` is a view of that slot, so that autograd
    accumulates into it in the slot's dtype.
    """
    weight_start = {(used.layer, used.bundle): used.start for used in layout.weights}
    gradient_start = {(used.layer, used.bundle): used.start for used in layout.gradients}
    for layer in layout.layers:
        for location in store.locations[layer]:
            use = (layer, location.bundle)
            parameter = location.parameter
            leaf = nn.Parameter(parameter.view(weights.memory[weight_start[use] :]), requires_grad=False)
            if gradients is not None and use in gradient_start:
                leaf.requires_grad_(True)
                # Before `.grad` is set: PyTorch refuses a gradient of another dtype than the leaf expects.
                leaf.grad_dtype = gradients.memory.dtype
                leaf.grad = parameter.view(gradients.memory[gradient_start[use] :])
            module, name = owner_of(skeletons[layer], location.path)
            setattr(module, name, leaf)
    return [skeletons[layer] for layer in layout.layers]


def unbind(skeletons: Sequence[nn.Module]) -> None:
    """Take the memory of the slots from all parameters that `bind` gave to these layers."""
    for layer in skeletons:
        for parameter in layer.parameters():
            # The parameter's own memory, not its place in the layer: compiled code may hold the parameter too.
            parameter.grad = None
            parameter.data = parameter.new_empty(0)


def with_own_seed(index: int, layer: LayerCall) -> LayerCall:
    """Let layer `index` of the model draw its dropout masks from numbers of its own."""
    return lambda hidden, micro_batch: layer(hidden, micro_batch.for_layer(index))


class StageForward:
    """A stage's forward without gradients. It pauses where the stage has made something to send."""

    def __init__(self, layers: Sequence[LayerCall], hidden: Hidden | None, micro_batch: MicroBatch) -> None:
        self._layers = layers
        self._micro_batch = micro_batch
        self._hidden = hidden  # input of the next layer
        self._next = 0

    def run_to(self, stop: int) -> Hidden:
        """Run the layers up to the stage's layer number `stop`, and return the input of that one."""
        with torch.no_grad():
            for layer in self._layers[self._next : stop]:
                # Nothing but the layer holds its input meanwhile, so the memory of a boundary is free again
                # as soon as the next layer has read it.
                self._hidden = layer(self._hidden, self._micro_batch)
        self._next = stop
        assert self._hidden is not None, "a stage has at least one layer"
        return self._hidden


class ForwardWithGraph:
    """A stage's forward with everything that its backward needs: all activations, or one layer's with `layerwise`.

    Backward stages recompute by it from their boundary activation; the fused stage runs its only forward by
    it.

    Layerwise keeps only layer inputs and recomputes each layer again in the backward, as gradient
    checkpointing does. It costs one more forward and holds the activations of one layer instead of the
    stage's.
    """

    def __init__(
        self, layers: Sequence[LayerCall], hidden: Hidden | None, micro_batch: MicroBatch, layerwise: bool
    ) -> None:
        self._micro_batch = micro_batch
        groups = [[layer] for layer in layers] if layerwise else [list(layers)]
        self._groups = groups
        self._inputs = [hidden]
        # All groups but the last run without gradients: their activations are made anew in the backward.
        for group in groups[:-1]:
            hidden = StageForward(group, hidden, micro_batch).run_to(len(group))
            self._inputs.append(hidden)
        self._leaf, self.output = self._run(groups[-1], self._inputs[-1])

    def backward(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Return the gradients of the stage's inputs, or None if the stage starts the model.

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
                # Rebinding the names drops the deeper group's graph, whose
                # activations autograd has freed already.
                leaf, output = self._run(self._groups[position - 1], self._inputs[position - 1])
        return tuple(gradients)

    def _run(self, group: list[LayerCall], hidden: Hidden | None) -> tuple[Hidden | None, Hidden]:
        """Run a group with gradients from a leaf of its own, so that its backward ends at its input."""
        leaf = None if hidden is None else _as_leaf(hidden)
        output: Hidden | None = leaf
        with torch.enable_grad():
            for layer in group:
                output = layer(output, self._micro_batch)
        assert output is not None, "a stage has at least one layer"
        return leaf, output


def forward_and_backward(
    layers: Sequence[LayerCall],
    hidden: Hidden | None,
    micro_batch: MicroBatch,
    layerwise: bool,
    loss_factor: float,
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """Run the last stage in one go. Returns the loss, and the gradients of the stage's inputs as `backward` does."""
    stage_forward = ForwardWithGraph(layers, hidden, micro_batch, layerwise)
    [loss] = as_tuple(stage_forward.output)
    return loss.detach(), stage_forward.backward([torch.full_like(loss, loss_factor)])


def _as_leaf(hidden: Hidden) -> Hidden:
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in as_tuple(hidden)]
    return as_hidden(leaves, isinstance(hidden, Tensor))


def _backward(output: Hidden, gradients: Sequence[Tensor]) -> None:
    floating = [tensor for tensor in as_tuple(output) if tensor.is_floating_point()]
    pairs = [(tensor, grad) for tensor, grad in zip(floating, gradients, strict=True) if tensor.requires_grad]
    if pairs:  # there are none if every layer of the stage is frozen and its input is the tokens
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])


def _gradient_of(leaf: Tensor) -> Tensor:
    """Return the leaf's gradient; zeros if the output does not depend on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
