"""The computation of a stage for one micro-batch: forward, and recomputation with backward. No device, no threads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.slots import DeviceSlot, StageLayout, as_tuple, flatten, has_gradient, unflatten
from torchround.keeping import without_output
from torchround.layer import Batch, Hidden

# A layer with its parameters bound, compiled or not.
LayerCall = Callable[[Hidden | None, Batch], Hidden]


def bind(
    store: HostStore,
    skeletons: list[nn.Module],
    layout: StageLayout,
    weights: DeviceSlot,
    gradients: DeviceSlot | None,
    own_dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[nn.Module]:
    """Return the stage's layers with their parameters as views of the slots.

    With `gradients`, trainable parameters are leaves whose `.grad` is a view of that slot, so that autograd
    accumulates into it in the slot's dtype. Parameters of `own_dtypes` are copies, made on the current stream.
    """
    own_dtypes = own_dtypes or {}
    weight_start = {(used.layer, used.bundle): used.start for used in layout.weights}
    gradient_start = {(used.layer, used.bundle): used.start for used in layout.gradients}
    for layer in layout.layers:
        for location in store.locations[layer]:
            use = (layer, location.bundle)
            parameter = location.parameter
            value = parameter.view(weights.memory[weight_start[use] :])
            dtype = own_dtypes.get(parameter.name, value.dtype)
            leaf = nn.Parameter(value.to(dtype), requires_grad=False)
            if gradients is not None and use in gradient_start:
                leaf.requires_grad_(True)
                # Before `.grad` is set: PyTorch refuses a gradient of another dtype than the leaf expects.
                leaf.grad_dtype = gradients.memory.dtype
                leaf.grad = parameter.view(gradients.memory[gradient_start[use] :])
            module, name = owner_of(skeletons[layer], location.path)
            setattr(module, name, leaf)
    return [skeletons[layer] for layer in layout.layers]


def unbind(skeletons: Iterable[nn.Module]) -> None:
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

    def __init__(self, layers: Sequence[LayerCall], hidden: Hidden | None, micro_batch: Batch) -> None:
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
                self._hidden = _some(layer(self._hidden, self._micro_batch))
        self._next = stop
        return self._hidden


class ForwardWithGraph:
    """A stage's forward with everything that its backward needs: all activations, or one layer's with `layerwise`.

    Backward stages recompute by it from their boundary activation; the fused stage runs its only forward by
    it. `run_to` makes the forward, at once or layer by layer. Each layer has a graph of its own, so that its
    backward is a step of its own: the layer's gradients are final, and its activations gone, before the backward of
    the layer below begins.

    Layerwise keeps only layer inputs and recomputes each layer again in the backward, as gradient
    checkpointing does. It costs one more forward and holds the activations of one layer instead of the
    stage's.

    `restarts` gives, by the stage's layer number, inputs that take the place of what the layer below returns. Only
    values are replaced: the layer below still receives the gradient of its output.

    `receives` says, by the stage's layer number, which tensors of a layer's input receive gradients
    (`LayeredModel.receives_gradients`).

    If nothing `reads_output`, the last layer may leave its values out: only its graph is needed.
    """

    def __init__(
        self,
        layers: Sequence[LayerCall],
        hidden: Hidden | None,
        micro_batch: Batch,
        layerwise: bool,
        restarts: Mapping[int, Hidden] | None = None,
        receives: Mapping[int, Sequence[bool]] | None = None,
        reads_output: bool = True,
    ) -> None:
        self._layers = layers
        self._restarts = restarts or {}
        self._receives = receives or {}
        self._reads_output = reads_output
        self._micro_batch = micro_batch
        self._hidden = hidden  # input of the next layer to run
        # All layers but the last run without gradients if layerwise: their activations are made anew in the backward.
        self._num_run_again = len(layers) - 1 if layerwise else 0
        self._next = 0  # the next layer to run; from then on the layer above the next one to differentiate
        self._inputs: list[Hidden | None] = []  # of layers that run again before their backward
        self._graphs: list[tuple[Hidden | None, Hidden]] = []  # leaf and output of the layers above those

    def run_to(self, stop: int) -> "ForwardWithGraph":
        """Run the layers up to the stage's layer number `stop`. All have to run before `backward`."""
        while self._next < stop:
            layer = self._layers[self._next]
            below, hidden = self._hidden, self._restarts.get(self._next, self._hidden)
            if self._next < self._num_run_again:
                self._inputs.append(hidden)
                with torch.no_grad():
                    self._hidden = _some(layer(hidden, self._micro_batch))
            else:
                # Below the first trained layer of a model no gradient is needed, and the output of a layer that
                # was run with gradients knows that. The stage's input, made without, does not.
                wanted = (
                    [tensor.requires_grad for tensor in as_tuple(below)]
                    if self._graphs and below is not None
                    else self._receives.get(self._next)
                )
                is_read = self._reads_output or self._next + 1 < len(self._layers)
                self._graphs.append(self._run(layer, hidden, wanted, is_read))
                self._hidden = self._graphs[-1][1]
            del below, hidden  # otherwise these names would hold a layer's input while the next ones run
            self._next += 1
        if stop == len(self._layers):
            self._hidden = None  # otherwise the last layer's output would stay through the whole backward
        return self

    @property
    def output(self) -> Hidden:
        """The output of the stage, until `backward` takes its graph."""
        # Not kept beside the graphs: it would hold the last layer's input through the whole backward.
        return self._graphs[-1][1]

    def backward(self, gradients: Sequence[Tensor | None], stop: int = 0) -> tuple[Tensor | None, ...] | None:
        """Differentiate the layers from the last call's `stop` down to the stage's layer number `stop`.

        Returns the gradients of that layer's input, or None if it has none because it starts the model. The
        next call takes them. `gradients` belong to the tensors of the output that can have one, in order. None
        among them stands for a tensor that the loss does not depend on. Parameter gradients are accumulated into the
        leaves' `.grad`.
        """
        while self._next > stop:
            self._next -= 1
            if self._graphs:
                leaf, output = self._graphs.pop()
            else:
                layer = self._layers[self._next]
                leaf, output = self._run(
                    layer, self._inputs.pop(), self._receives.get(self._next), is_read=False
                )
            _backward(output, gradients)
            if leaf is None:
                return None
            gradients = [tensor.grad for tensor in as_tuple(leaf) if has_gradient(tensor)]
            # Otherwise these names would hold the layer's input and output while the layer below runs again.
            del leaf, output
        return tuple(gradients)

    def _run(
        self, layer: LayerCall, hidden: Hidden | None, wanted: Sequence[bool] | None, is_read: bool
    ) -> tuple[Hidden | None, Hidden]:
        """Run a layer with gradients from a leaf of its own, so that its backward ends at its input.

        `wanted` says which tensors of the input receive gradients; all floating-point ones do if it is None. Unless the
        output `is_read`, it may have no values.
        """
        leaf = None if hidden is None else _as_leaf(hidden, wanted)
        with torch.enable_grad(), nullcontext() if is_read else without_output():
            return leaf, _some(layer(leaf, self._micro_batch))


class FusedStage(ForwardWithGraph):
    """The last stage's forward and backward of one micro-batch. `loss` is there after the first call of `backward`.

    `loss_factor` multiplies the loss before the backward.
    """

    loss: Tensor

    def __init__(
        self,
        layers: Sequence[LayerCall],
        hidden: Hidden | None,
        micro_batch: Batch,
        layerwise: bool,
        loss_factor: float,
        receives: Mapping[int, Sequence[bool]] | None = None,
    ) -> None:
        # The backward follows the forward, so the loss may make its gradients in the forward.
        super().__init__(layers, hidden, micro_batch.for_training(loss_factor), layerwise, receives=receives)
        self._loss_factor = loss_factor
        self._is_forward = True

    def backward(self, gradients: Sequence[Tensor | None], stop: int = 0) -> tuple[Tensor | None, ...] | None:
        """Finish the forward if this is the first call, then differentiate. The first call ignores `gradients`."""
        if self._is_forward:
            self._is_forward = False
            loss = checked_loss(self.run_to(len(self._layers)).output)
            self.loss = loss.detach()
            gradients = [torch.full_like(loss, self._loss_factor)]
        return super().backward(gradients, stop)


def _some(output: Hidden | None) -> Hidden:
    if output is None:  # the layer above would take itself for the first one, whose input has no gradient
        raise TypeError("a layer returned None; it must return its output")
    return output


def checked_loss(output: Hidden) -> Tensor:
    """Return what the last layer returned, which must be one number. Raises `TypeError` otherwise."""
    if isinstance(output, Tensor) and output.numel() == 1 and has_gradient(output):
        return output
    found = f"{output.dtype} {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise TypeError(
        f"the last layer must return its loss, a floating-point tensor of shape []; it returned {found}"
    )


def _as_leaf(hidden: Hidden, wanted: Sequence[bool] | None) -> Hidden:
    """Return the same memory as tensors that begin a graph. `wanted` is as in `ForwardWithGraph._run`."""
    tensors, structure = flatten(hidden)
    wants = list(map(has_gradient, tensors)) if wanted is None else wanted
    leaves = [tensor.detach().requires_grad_(wish) for tensor, wish in zip(tensors, wants, strict=True)]
    return unflatten(leaves, structure)


def _backward(output: Hidden, gradients: Sequence[Tensor | None]) -> None:
    floating = [tensor for tensor in as_tuple(output) if has_gradient(tensor)]
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(floating, gradients, strict=True)
        if tensor.requires_grad and grad is not None
    ]
    if pairs:  # there are none if every layer of the stage is frozen and its input is the tokens
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
