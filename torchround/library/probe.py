"""The probe: each layer runs alone on the host with the first micro-batch, is checked, and is timed for the planner.

Stateless devices run a layer on any of several copies of it, a second time in its backward stage, and beside other layers
of other micro-batches. A layer that remembers something, changes its input, or gives other values when it runs again
would train wrongly without any error, so the probe refuses it by name. One layer's activations exist at a time.
"""

import copy
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchround.engine.errors import EngineUsageError
from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.compute import checked_loss
from torchround.engine.worker.slots import PLAIN, flatten, unflatten
from torchround.layer import aligned
from torchround.library.module_layer import ModuleLayer, WrappedNet, layer_text
from torchround.library.sample_batch import SampleBatch, tensors_of
from torchround.library.seeds import is_random
from torchround.planning.costs import LayerCost
from torchround.run.numbers import layer_numels

# Gradients add up on devices in float32.
ACCUMULATE_BYTES = 4


def probe(wrapped: WrappedNet, store: HostStore, batch: SampleBatch) -> list[LayerCost]:
    """Run every layer on the host with one micro-batch, and return its costs.

    Raises `EngineUsageError` for the first layer that fails or cannot work. The layers of `wrapped` learn what they draw
    and receive.
    """
    hidden: Any = None
    costs = []
    layers = zip(
        wrapped.model.names, wrapped.layers, layer_numels(store.bundles, len(wrapped.layers)), strict=True
    )
    for index, (name, layer, (trained, frozen)) in enumerate(layers):
        try:
            probed = _with_weights(layer, index, store)
            with torch.set_grad_enabled(batch.is_training):
                hidden, cost = _probe_layer(layer, probed, batch.for_layer(index), hidden)
        except Exception as error:
            kind = "" if isinstance(error, EngineUsageError) else f"{type(error).__name__}: "
            raise EngineUsageError(f"{layer_text(name, layer.module)}: {kind}{error}") from error
        weight_bytes, gradient_bytes = (trained + frozen) * store.dtype.itemsize, trained * ACCUMULATE_BYTES
        costs.append(replace(cost, name=name, weight_bytes=weight_bytes, gradient_bytes=gradient_bytes))
    return costs


def _with_weights(layer: ModuleLayer, index: int, store: HostStore) -> ModuleLayer:
    """Copy a layer with its weights from the store, and without what an earlier probe has found."""
    found = copy.deepcopy(layer)
    found.draws, found.receives = True, ()
    weights = store.weights()
    own = {location.path: location.parameter.name for location in store.locations[index]}
    leaves: dict[str, nn.Parameter] = {}
    for path, parameter in layer.named_parameters(remove_duplicate=False):
        if (stored := own[path]) not in leaves:
            value = weights[stored].detach().to(parameter.dtype)
            leaves[stored] = nn.Parameter(value, parameter.requires_grad)
        owner, key = owner_of(found, path)
        setattr(owner, key, leaves[stored])
    return found


def _probe_layer(
    shell: ModuleLayer, layer: ModuleLayer, batch: SampleBatch, hidden: Any
) -> tuple[Any, LayerCost]:
    """Check and measure `layer`, and note findings in `shell`. `hidden` requires gradients as in a plain loop."""
    layer.use_modes(batch.is_training)
    trained = [part for part in (*layer.parameters(), *tensors_of(hidden)) if part.requires_grad]
    before, watch = _state(layer.module, hidden, batch), _Watch()
    with watch:
        first = layer(hidden, batch)
    after = _state(layer.module, hidden, batch)
    if changed := [name for name in {**before, **after} if not alike(before.get(name), after.get(name))]:
        raise EngineUsageError(
            f"it changes {', '.join(changed)} in its forward, which devices run on copies and twice; make a new tensor "
            "(inplace=False), compute it anew, or pass it on. For running statistics: nn.GroupNorm, or .eval()"
        )
    if outside := [part for part in watch.leaves.values() if all(part is not own for own in trained)]:
        raise EngineUsageError(
            f"it uses a trained tensor of shape {tuple(outside[0].shape)} that is not among its parameters; make it one"
        )
    start = time.perf_counter()
    output, activation_bytes = _run_again(layer, batch, hidden)
    forward_s = time.perf_counter() - start
    if not alike(first, output):
        raise EngineUsageError(
            "it gives other values when it runs again with the same input; draw by torch's default generator"
        )
    # A pass without gradients has no backward. The planner still cuts backward stages, by the usual proportion.
    backward_s = 2 * forward_s
    if batch.is_training:
        if layer.is_last and not checked_loss(output).requires_grad:
            raise EngineUsageError("the loss does not depend on anything that is trained (requires_grad)")
        ends = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        start = time.perf_counter()
        with _Watch() as backward:
            if ends:
                torch.autograd.grad(ends, trained, [torch.ones_like(end) for end in ends], allow_unused=True)
        backward_s = time.perf_counter() - start
        if backward.draws:  # from no seed of the layer
            raise EngineUsageError(
                "it draws random numbers in its backward, as torch.utils.checkpoint does; leave the checkpointing out"
            )
    tensors, structure = flatten(output)
    shell.draws, shell.receives = watch.draws, tuple(part.requires_grad for part in flatten(hidden)[0])
    cost = LayerCost(
        *("", forward_s, backward_s),
        activation_bytes=activation_bytes,
        boundary_bytes=sum(aligned(part.nbytes) for part in tensors_of(output)),
        workspace_bytes=watch.largest_bytes,
    )
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    return unflatten(leaves, structure), cost


def _run_again(layer: ModuleLayer, batch: SampleBatch, hidden: Any) -> tuple[Any, int]:
    """Run the layer. Returns its output, and the bytes that it keeps for its backward."""
    held = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *tensors_of(hidden))}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a saved output that held its own node would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(hidden, batch)
    return output, sum(kept.values())


def _state(module: nn.Module, hidden: Any, batch: SampleBatch) -> dict[str, Any]:
    """Note what a forward must leave as it is, so that `alike` finds a change: attributes, weights, buffers and the input."""
    state: dict[str, Any] = {"its input": [part._version for part in (*tensors_of(hidden), *batch.parts)]}
    for path, part in module.named_modules():
        for name, value in {**vars(part), **part._parameters, **part._buffers}.items():
            key = f"{path}.{name}".removeprefix(".")
            if isinstance(value, Tensor):
                content = None if isinstance(value, nn.Parameter) else value.detach().clone()
                state[key] = id(value), value._version, content
            # A recurrent module lists its weights anew in its forward if they were exchanged.
            elif not name.startswith("_flat_weight"):
                state[key] = value if isinstance(value, PLAIN) else id(value)
    return state


class _Watch(TorchDispatchMode):
    """A mode that sees whether operations draw random numbers, their largest result, and the trained leaves that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False
        self.largest_bytes = 0
        self.leaves: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.draws |= is_random(func, args, kwargs or {})
        # Without gradients, a view of a leaf looks like a leaf.
        given = [part for part in tensors_of(args) if part.is_leaf and not part._is_view()]
        self.leaves |= {id(part): part for part in given if part.requires_grad}
        result = func(*args, **(kwargs or {}))
        for leaf in tensors_of(result):
            if leaf.layout is torch.strided:
                self.largest_bytes = max(self.largest_bytes, leaf.nbytes)
        return result


def alike(first: Any, second: Any) -> bool:
    """Check whether two values have the same structure, plain values and numbers; one NaN is like another."""
    (tensors, structure), (others, again) = flatten(first), flatten(second)
    return structure == again and all(
        one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(tensors, others, strict=True)
    )
