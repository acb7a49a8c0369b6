"""The probe: each layer runs alone on the host with the first micro-batch, is checked, and is timed for the planner.

Stateless devices run a layer on any of several copies of it, a second time in its backward stage, and beside other layers
of other micro-batches. A layer that remembers something, changes its input, or gives other values when it runs again
would train wrongly without any error, so the probe refuses it by name. One layer's activations exist at a time.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.slots import PLAIN
from torchround.keeping import recording, replaying
from torchround.layer import LayeredModel, aligned
from torchround.library.module_layer import ModuleLayer, WrappedNet
from torchround.library.refusals import PipelineUsageError, layer_text
from torchround.library.sample_batch import SampleBatch, tensors_of
from torchround.library.seeds import is_random
from torchround.planning.cards import ASSUMED_DEVICE
from torchround.planning.costs import Costs, KeptCost, LayerCost
from torchround.planning.memory import MemoryLimits
from torchround.planning.partition import Partition
from torchround.planning.planner import InfeasiblePlanError, make_plan
from torchround.run.hardware import Hardware
from torchround.run.numbers import layer_numels, parameter_counts

# Gradients add up on devices in float32.
ACCUMULATE_BYTES = 4
# Containers and objects inside each other are followed this deep, for what a layer remembers.
FOLLOWED = 4


def probe(
    wrapped: WrappedNet, store: HostStore, batch: SampleBatch, keep: Sequence[str] = ()
) -> list[LayerCost]:
    """Run every layer on the host with one micro-batch and return what it costs, and which of the parts `keep` it has.

    Raises `PipelineUsageError` for the first layer that fails or cannot work. The layers of `wrapped` learn what they draw
    and receive.
    """
    hidden: Any = None
    costs = []
    layers = zip(wrapped.model.names, wrapped.layers(), layer_numels(wrapped.model), strict=True)
    for index, (name, layer, (trained, frozen)) in enumerate(layers):
        try:
            probed = _with_weights(layer, index, store)
            hidden, cost = _probe_layer(layer, probed, batch.for_layer(index), hidden, keep)
        except MemoryError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, PipelineUsageError) else f"{type(error).__name__}: "
            raise PipelineUsageError(f"{layer_text(name, layer.module)}: {kind}{error}") from error
        weight_bytes, gradient_bytes = (trained + frozen) * store.dtype.itemsize, trained * ACCUMULATE_BYTES
        costs.append(replace(cost, name=name, weight_bytes=weight_bytes, gradient_bytes=gradient_bytes))
    return costs


def _with_weights(layer: ModuleLayer, index: int, store: HostStore) -> ModuleLayer:
    """Return a copy of a layer with its weights from the store, and without what an earlier probe has found."""
    found = copy.deepcopy(layer)
    found.forget_probe()
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
    shell: ModuleLayer, layer: ModuleLayer, batch: SampleBatch, hidden: Any, keep: Sequence[str]
) -> tuple[Any, LayerCost]:
    """Check and measure `layer`, and note in `shell` what was found. Returns its output and its costs.

    A tensor of `hidden` requires a gradient if it does in a plain loop.
    """
    watch, start = _Watch(), time.perf_counter()
    plain = _first_run(layer, batch, hidden, watch)
    forward_s = time.perf_counter() - start
    shell.draws = watch.draws
    # A pass without gradients keeps nothing. The planner still cuts backward stages, by the usual proportion.
    cost = LayerCost(
        *("", forward_s, 2 * forward_s),
        boundary_bytes=sum(aligned(leaf.nbytes) for leaf in tensors_of(plain)),
        workspace_bytes=watch.largest_bytes,
    )
    if not batch.is_training:
        return plain, cost
    shell.receives = tuple(tensor.requires_grad for tensor in tensors_of(hidden))
    start = time.perf_counter()
    output, activation_bytes = _with_graph(layer, batch, hidden)
    forward_s = time.perf_counter() - start
    shell.needs_graph = not alike(plain, output)
    if shell.needs_graph and not alike(output, _with_graph(layer, batch, hidden)[0]):
        raise PipelineUsageError(
            "it gives other values when it runs again with the same input; draw by torch's default generator"
        )
    if layer.is_last and not output.requires_grad:
        raise PipelineUsageError("the loss does not depend on anything that is trained (requires_grad)")
    trained = [tensor for tensor in (*layer.parameters(), *tensors_of(hidden)) if tensor.requires_grad]
    start = time.perf_counter()
    _differentiate(output, trained)
    backward_s = time.perf_counter() - start
    kept = [KeptCost(name, _kept_bytes(layer, batch, hidden, output, name), 0.0) for name in keep]
    kept = [part for part in kept if part.nbytes]
    cost = replace(
        cost,
        forward_s=forward_s,
        backward_s=backward_s,
        activation_bytes=activation_bytes,
        keepable=tuple(kept),
        kept=tuple(part.name for part in kept),
    )
    return pytree.tree_map_only(Tensor, _leaf, output), cost


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _first_run(layer: ModuleLayer, batch: SampleBatch, hidden: Any, watch: "_Watch") -> Any:
    """Run the layer without gradients, and refuse what changes anything but its output."""
    layer.use_modes(batch.is_training)
    state, inputs = _state(layer.module), [*tensors_of(hidden), *batch.parts]
    versions = [tensor._version for tensor in inputs]
    with torch.no_grad(), watch:
        output = layer(hidden, batch)
    if versions != [tensor._version for tensor in inputs]:
        raise PipelineUsageError("it changes its input in place; make a new tensor (inplace=False)")
    after = _state(layer.module)
    if changed := [name for name in {**state, **after} if not alike(state.get(name), after.get(name))]:
        raise PipelineUsageError(
            f"it changes {', '.join(changed)} in its forward, which devices run on copies and twice; compute it anew, or "
            "pass it on. For running statistics: nn.GroupNorm, or .eval()"
        )
    for leaf in pytree.tree_leaves(output):
        is_dense = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
        if not is_dense and not isinstance(leaf, PLAIN):
            raise PipelineUsageError(
                f"it returns a {type(leaf).__name__}, which cannot travel; return plain dense tensors in tuples, lists, dicts"
            )
    return output


def _with_graph(layer: ModuleLayer, batch: SampleBatch, hidden: Any) -> tuple[Any, int]:
    """Run the layer with gradients. Returns its output, and the bytes that it keeps for its backward."""
    held = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *tensors_of(hidden))}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a saved output that held its own node would never be freed

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(hidden, batch)
    return output, sum(kept.values())


def _kept_bytes(layer: ModuleLayer, batch: SampleBatch, hidden: Any, output: Any, name: str) -> int:
    """Record a part as a forward stage and replay it as a backward stage. Returns its bytes, 0 without such a part."""
    with torch.no_grad(), recording((name,)) as record:
        first = layer(hidden, batch)
    with replaying((name,), record.tensors):
        second = _with_graph(layer, batch, hidden)[0]
    if not (alike(first, output) and alike(second, output)):
        raise PipelineUsageError(f"it gives other values if its part {name} is kept; leave it out of keep")
    return sum(aligned(tensor.nbytes) for tensor in record.tensors)


def _differentiate(output: Any, trained: Sequence[Tensor]) -> None:
    """Run the backward, whose graph must end in `trained` and draw nothing: it would draw from no seed of the layer."""
    ends = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    nodes: list[Any] = [tensor.grad_fn for tensor in ends if tensor.grad_fn is not None]
    seen, own = set(nodes), {id(tensor) for tensor in trained}
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in own:
            raise PipelineUsageError(
                f"it uses a trained tensor of shape {tuple(variable.shape)} that is not among its parameters; make it one"
            )
        nodes += {after for after, _ in node.next_functions if after is not None} - seen
        seen.update(nodes)
    with _Watch() as watch:
        if ends and trained:
            torch.autograd.grad(ends, trained, [torch.ones_like(end) for end in ends], allow_unused=True)
    if watch.draws:
        raise PipelineUsageError(
            "it draws random numbers in its backward, as torch.utils.checkpoint does; leave the checkpointing out"
        )


def _state(module: nn.Module) -> dict[str, Any]:
    """Return what a module and its parts hold, by name, so that `alike` finds a change. Buffers are copied."""
    state: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in {**vars(part), **part._parameters, **part._buffers, **part._modules}.items():
            # A recurrent module lists its weights anew in its forward if they were exchanged.
            if isinstance(part, nn.RNNBase) and name.startswith("_flat_weight"):
                continue
            key = f"{path}.{name}".removeprefix(".")
            if isinstance(value, Tensor):
                values = None if isinstance(value, nn.Parameter) else value.detach().clone()
                state[key] = id(value), value._version, values
            elif isinstance(value, nn.Module):
                state[key] = id(value)
            elif name not in ("_parameters", "_buffers", "_modules"):
                state[key] = _token(value, FOLLOWED)
    return state


def _token(value: Any, depth: int) -> str:
    """Return a text that differs once the value has changed, also in containers and objects inside it."""
    if isinstance(value, Tensor):
        return f"{id(value)} {value._version} {value!r}"
    inside: Any = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, (list, tuple)):
        inside = value
    elif not isinstance(value, (nn.Module, type, ModuleType)):
        inside = [*(held := getattr(value, "__dict__", {})), *held.values()]
    return f"{value!r} {[_token(each, depth - 1) for each in inside] if depth else ''}"


class _Watch(TorchDispatchMode):
    """A mode that sees whether operations draw random numbers, and the largest tensor that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False
        self.largest_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.draws |= is_random(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        for leaf in tensors_of(result):
            if leaf.layout is torch.strided:
                self.largest_bytes = max(self.largest_bytes, leaf.nbytes)
        return result


def alike(first: Any, second: Any) -> bool:
    """Return whether two values have the same structure, plain values and bits."""
    one, structure = pytree.tree_flatten(first)
    other, again = pytree.tree_flatten(second)
    return structure == again and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)


def cut_model(
    model: LayeredModel,
    store: HostStore,
    layers: Sequence[LayerCost],
    batches: Sequence[SampleBatch],
    hardware: Hardware,
    update: str,
) -> Partition:
    """Return the partition that is fastest by the measured costs. Raises `PipelineUsageError` if none fits.

    Costs are of the first micro-batch, which is one of the longest.
    """
    hop_s = ASSUMED_DEVICE.hop_s(max(layer.boundary_bytes for layer in layers))
    costs = Costs(tuple(layers), hop_s, parameter_counts(store.bundles).shared_layers)
    limit, constants = hardware.device_bytes, model.constant_bytes()
    limits = MemoryLimits(
        device_bytes=None if limit is None else max(0, limit - constants),
        integer_bytes=sum(aligned(part.nbytes) for part in batches[0].tensors()),
        accumulate_bytes=ACCUMULATE_BYTES,
        rounded_bytes=0 if (size := store.gradient_dtype.itemsize) == ACCUMULATE_BYTES else size,
    )
    try:
        return make_plan(costs, hardware.num_devices, len(batches), update, rounds=1, limits=limits).partition
    except InfeasiblePlanError as error:
        raise PipelineUsageError(
            f"no cut of the net fits the devices: {error}. What helps: more num_micro_batches, smaller layers"
        ) from error
