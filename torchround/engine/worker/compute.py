"""The computation of a stage for one micro-batch: forward, and recomputation with backward. No device, no threads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.slots import (
    DeviceSlot,
    StageLayout,
    UnpackedLayer,
    flatten,
    has_gradient,
    unflatten,
)
from torchround.keeping import ActivationRecord, without_output
from torchround.layer import Batch, Hidden

# A layer with its parameters bound, compiled or not.
LayerCall = Callable[[Hidden | None, Batch], Hidden]
# A recording of what a layer keeps, or a replay of it.
LayerContext = Callable[[], AbstractContextManager[ActivationRecord | None]]


def bind(
    store: HostStore,
    skeletons: list[nn.Module],
    layout: StageLayout,
    weights: DeviceSlot,
    gradients: DeviceSlot | None,
    own_dtypes: Mapping[str, torch.dtype],
    unpacked: UnpackedLayer,
) -> dict[int, nn.Module]:
    """Give the stage's layers their parameters as views of the slots. Returns the layers by number.

    With `gradients`, trainable parameters are leaves whose `.grad` is a view of that slot, so that autograd
    accumulates into it in the slot's dtype. Parameters of `own_dtypes` are copies, made on the current stream. Packed ones
    are views of `unpacked`, which has to `hold` the layer whenever it runs; stacks packed by matrix are uint8 bytes. If these
    come by need, `fetch` of the parameter has to be called before a product with the `bounds` of its rows.
    """
    ranges = {used.use: used for used in layout.weights}
    gradient_start = {used.use: used.start for used in layout.gradients}
    for layer in layout.layers:
        for location in store.locations[layer]:
            use, parameter = (layer, location.bundle), location.parameter
            bundle, start = ranges[use].bundle, ranges[use].start
            if bundle.packed is None:
                value = parameter.view(weights.memory[start:])
            elif bundle.packed.by_matrix:
                value = bundle.packed_bytes(weights.memory[start : start + bundle.numel])
            else:
                # `.data` has a version counter of its own: autograd need not know that the memory is written in between.
                value = parameter.view(unpacked.memory[ranges[use].unpacked_start :]).data
            dtype = own_dtypes.get(parameter.name, value.dtype)
            leaf = nn.Parameter(value.to(dtype), requires_grad=False)
            if use in weights.experts:
                leaf.fetch = weights.experts[use]  # type: ignore[attr-defined]
            if gradients is not None and use in gradient_start:
                leaf.requires_grad_(True)
                # Before `.grad` is set: PyTorch refuses a gradient of another dtype than the leaf expects.
                leaf.grad_dtype = gradients.memory.dtype
                leaf.grad = parameter.view(gradients.memory[gradient_start[use] :])
            module, name = owner_of(skeletons[layer], location.path)
            setattr(module, name, leaf)
    return {layer: skeletons[layer] for layer in layout.layers}


def unbind(skeletons: Iterable[nn.Module]) -> None:
    """Take the memory of the slots from all parameters that `bind` gave to these layers."""
    for layer in skeletons:
        for parameter in layer.parameters():
            # The parameter's own memory, not its place in the layer: compiled code may hold the parameter too.
            parameter.grad = None
            parameter.data = parameter.new_empty(0)


class StageComputation:
    """A stage's layers, numbered as in the model, for one micro-batch: their forward, and their backward.

    Layers below `graphs_from` run without gradients: all of them in a forward stage, none for a backward of the whole
    stage. With the last layer's graph alone, the others keep their inputs only and run again in the backward, as gradient
    checkpointing does: one more forward, for the activations of one layer instead of the stage's.

    Each layer has a graph of its own, so that its backward is a step of its own: the layer's gradients are final, and its
    activations gone, before the backward of the layer below begins.

    `inputs` gives values from outside: the stage's input, and those that take the place of what the layer below returns.
    That layer still receives the gradient of its output. A layer runs inside of what its entry in `around` makes; what a
    `recording` collects there is in `kept`. If nothing `reads_output`, the last layer may leave its values out.

    `before` is called with the number of each layer before its forward and before its backward.

    With a `loss_factor` the last layer returns a loss, multiplied by it before the backward. The first call of `backward`
    then finishes the forward, and leaves the `loss`.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerCall],
        inputs: Mapping[int, Hidden | None],
        micro_batch: Batch,
        graphs_from: int,
        before: Callable[[int], object] = lambda layer: None,
        around: Mapping[int, LayerContext] | None = None,
        reads_output: bool = True,
        loss_factor: float | None = None,
    ) -> None:
        self._layers = layers
        self._before = before
        self._stop = max(layers) + 1
        self._inputs = inputs
        # If the backward follows the forward, the loss may make its gradients in the forward.
        self._micro_batch = micro_batch if loss_factor is None else micro_batch.for_training(loss_factor)
        self._graphs_from = graphs_from
        self._around = around or {}
        self._reads_output = reads_output
        self._loss_factor = loss_factor
        self._hidden: Hidden | None = None  # what the last layer that ran returned
        # The next layer to run; from then on the layer above the next one to differentiate.
        self._next = min(layers)
        self._repeated: list[Hidden | None] = []  # inputs of layers that run again before their backward
        self._graphs: list[tuple[Hidden | None, Hidden]] = []  # leaf and output of the layers above those
        self.loss: Tensor | None = None
        self.kept: dict[int, list[Tensor]] = {}

    def run_to(self, stop: int) -> Hidden:
        """Run the layers below `stop`, and return what the last one returned. All have to run before `backward`."""
        while self._next < stop:
            below, hidden = self._hidden, self._inputs.get(self._next, self._hidden)
            if self._next < self._graphs_from:
                if self._graphs_from < self._stop:
                    self._repeated.append(hidden)
                with torch.no_grad():
                    self._hidden = self._call(self._next, hidden)
            else:
                # Below the first trained layer of a model no gradient is needed, and the output of a layer that
                # was run with gradients knows that. The stage's input, made without, does not.
                wanted = None
                if self._graphs and below is not None:
                    wanted = [tensor.requires_grad for tensor in flatten(below)[0]]
                is_read = self._reads_output or self._next + 1 < self._stop
                self._graphs.append(self._run(self._next, hidden, wanted, is_read))
                self._hidden = self._graphs[-1][1]
            # Otherwise these names would hold a layer's input while the next ones run: the memory of a boundary is free
            # again as soon as the next layer has read it.
            del below, hidden
            self._next += 1
        output = self._hidden
        if stop == self._stop:
            self._hidden = None  # otherwise the last layer's output would stay through the whole backward
        return output

    def backward(self, gradients: Sequence[Tensor | None], stop: int) -> tuple[Tensor | None, ...] | None:
        """Differentiate the layers from the last call's `stop` down to layer `stop`, adding to the leaves' `.grad`.

        Returns the gradients of that layer's input, for the next call; None if it starts the model. `gradients` belong to
        the tensors of the output that can have one, in order. None among them is for a tensor that the loss does not
        depend on. The first call ignores them if the output is a loss.
        """
        if self._loss_factor is not None and self.loss is None:
            loss = checked_loss(self.run_to(self._stop))
            self.loss, gradients = loss.detach(), [torch.full_like(loss, self._loss_factor)]
            del loss  # its graph
        while self._next > stop:
            self._next -= 1
            if self._graphs:
                leaf, output = self._graphs.pop()
            else:
                leaf, output = self._run(self._next, self._repeated.pop(), wanted=None, is_read=False)
            self._before(self._next)
            _backward(output, gradients)
            if leaf is None:
                return None
            gradients = [tensor.grad for tensor in flatten(leaf)[0] if has_gradient(tensor)]
            # Otherwise these names would hold the layer's input and output while the layer below runs again.
            del leaf, output
        return tuple(gradients)

    def _run(
        self, number: int, hidden: Hidden | None, wanted: Sequence[bool] | None, is_read: bool
    ) -> tuple[Hidden | None, Hidden]:
        """Run a layer with gradients from a leaf of its own, of the same memory, at which its backward ends.

        `wanted` lists which tensors of the input receive gradients, by default all that can. `is_read` is the output's.
        """
        leaf = None
        if hidden is not None:
            tensors, structure = flatten(hidden)
            wants = map(has_gradient, tensors) if wanted is None else wanted
            leaves = [part.detach().requires_grad_(wish) for part, wish in zip(tensors, wants, strict=True)]
            leaf = unflatten(leaves, structure)
        with torch.enable_grad(), nullcontext() if is_read else without_output():
            return leaf, self._call(number, leaf)

    def _call(self, number: int, hidden: Hidden | None) -> Hidden:
        layer, around = self._layers[number], self._around.get(number)
        self._before(number)
        micro_batch = self._micro_batch.for_layer(number)  # dropout masks from numbers of its own
        if around is None:
            output = layer(hidden, micro_batch)
        else:
            with around() as record:
                output = layer(hidden, micro_batch)
            if record is not None:
                self.kept[number] = record.tensors
        if output is None:  # the layer above would take itself for the first one, whose input has no gradient
            raise TypeError("a layer returned None; it must return its output")
        return output


def checked_loss(output: Hidden) -> Tensor:
    """Check that the last layer returned one number. Raises `TypeError`."""
    if isinstance(output, Tensor) and output.numel() == 1 and has_gradient(output):
        return output
    found = f"{output.dtype} {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise TypeError(
        f"the last layer must return its loss, a floating-point tensor of shape []; it returned {found}"
    )


def _backward(output: Hidden, gradients: Sequence[Tensor | None]) -> None:
    floating = [tensor for tensor in flatten(output)[0] if has_gradient(tensor)]
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(floating, gradients, strict=True)
        if tensor.requires_grad and grad is not None
    ]
    if pairs:  # there are none if every layer of the stage is frozen and its input is the tokens
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
