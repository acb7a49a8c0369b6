"""The probe: each layer runs alone on the host with the first micro-batch, is checked, and is timed for the planner.

Stateless devices run a layer on any of several copies of it, a second time in its backward stage, and beside other layers
of other micro-batches. A layer that remembers something, changes its input, or gives other values when it runs again
would train wrongly without any error, so the probe refuses it by name. One layer's activations exist at a time.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.slots import PLAIN
from torchround.keeping import marking, recording, replaying
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


def probe(
    wrapped: WrappedNet, store: HostStore, batch: SampleBatch, keep: Sequence[str] = ()
) -> list[LayerCost]:
    """Run every layer on the host with one micro-batch and return what it costs, and which of the parts `keep` it has.

    Raises `PipelineUsageError` for the first layer that fails or cannot work. The layers of `wrapped` learn what they draw
    and receive.
    """
    passed = _Passed(None, ())
    costs = []
    for index, (layer, (trained, frozen)) in enumerate(
        zip(wrapped.layers(), layer_numels(wrapped.model), strict=True)
    ):
        name = wrapped.model.names[index]
        cost = LayerCost(
            *(name, 0.0, 0.0),
            weight_bytes=(trained + frozen) * store.dtype.itemsize,
            gradient_bytes=trained * ACCUMULATE_BYTES,
        )
        try:
            passed, cost = _probe_layer(
                *(layer, _with_weights(layer, index, store), batch.for_layer(index), passed, keep, cost)
            )
        except MemoryError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, PipelineUsageError) else f"{type(error).__name__}: "
            raise PipelineUsageError(f"{layer_text(name, layer.module)}: {kind}{error}") from error
        costs.append(cost)
    return costs


@dataclass(frozen=True)
class _Passed:
    """The output of a layer, and which of its tensors need gradients."""

    hidden: Any
    needs: tuple[bool, ...]


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
    shell: ModuleLayer,
    layer: ModuleLayer,
    batch: SampleBatch,
    given: _Passed,
    keep: Sequence[str],
    cost: LayerCost,
) -> tuple[_Passed, LayerCost]:
    """Check and measure `layer`, and note in `shell` what was found."""
    layer.use_modes(batch.is_training)
    before, versions = (
        _state(layer.module),
        [tensor._version for tensor in (*tensors_of(given.hidden), *batch.parts)],
    )
    watch, start = _Watch(), time.perf_counter()
    with torch.no_grad(), watch:
        plain = layer(given.hidden, batch)
    forward_s = time.perf_counter() - start
    if versions != [tensor._version for tensor in (*tensors_of(given.hidden), *batch.parts)]:
        raise PipelineUsageError(
            "it changes its input in place; use an operation that makes a new tensor (inplace=False)"
        )
    after = _state(layer.module)
    if changed := [name for name in {**before, **after} if not alike(before.get(name), after.get(name))]:
        raise PipelineUsageError(
            f"it changes {', '.join(changed)} in its forward, but each device has a copy of the layer and may run it twice "
            "for a micro-batch; compute the value anew, or pass it on. For running statistics: nn.GroupNorm, or .eval()"
        )
    for leaf in pytree.tree_leaves(plain):
        if not isinstance(leaf, PLAIN) and (
            type(leaf) not in (Tensor, nn.Parameter) or leaf.layout is not torch.strided
        ):
            raise PipelineUsageError(
                f"it returns a {type(leaf).__name__}, which cannot travel; return plain dense tensors in tuples, lists, dicts"
            )
    shell.draws = watch.draws
    cost = replace(
        cost,
        boundary_bytes=sum(aligned(leaf.nbytes) for leaf in tensors_of(plain)),
        workspace_bytes=watch.largest_bytes,
        # A pass without gradients keeps nothing. The planner still cuts backward stages, by the usual proportion.
        forward_s=forward_s,
        backward_s=2 * forward_s,
    )
    if not batch.is_training:
        return _Passed(plain, ()), cost
    shell.receives = given.needs
    marks: list[tuple[str, float]] = []
    with marking(lambda name: marks.append((name, time.perf_counter()))):
        start = time.perf_counter()
        leaf, output, activation_bytes = _with_graph(layer, batch, given)
        forward_s = time.perf_counter() - start
    shell.needs_graph = not alike(plain, output)
    if shell.needs_graph and not alike(output, _with_graph(layer, batch, given)[1]):
        raise PipelineUsageError(
            "it gives other values when it runs again with the same input, so its backward stage would not fit its "
            "forward; draw random numbers with torch and the default generator"
        )
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    _check_leaves(output, {id(tensor) for tensor in (*trained, *tensors_of(leaf))})
    if layer.is_last and not output.requires_grad:
        raise PipelineUsageError("the loss does not depend on anything that is trained (requires_grad)")
    needs = tuple(tensor.requires_grad for tensor in tensors_of(output))
    start = time.perf_counter()
    _differentiate(output, [*trained, *tensors_of(leaf)])
    backward_s = time.perf_counter() - start
    part_s: dict[str, float] = defaultdict(float)
    for (name, begun), (_, ended) in zip(marks[::2], marks[1::2], strict=True):
        part_s[name] += ended - begun
    parts = [
        KeptCost(name, nbytes, part_s[name])
        for name in keep
        if name in part_s and (nbytes := _kept_bytes(layer, batch, given, output, name))
    ]
    found = replace(
        cost,
        forward_s=forward_s,
        backward_s=backward_s,
        activation_bytes=activation_bytes,
        keepable=tuple(parts),
        kept=tuple(part.name for part in parts),
    )
    return _Passed(pytree.tree_map_only(Tensor, Tensor.detach, output), needs), found


def _with_graph(layer: ModuleLayer, batch: SampleBatch, given: _Passed) -> tuple[Any, Any, int]:
    """Run the layer with gradients. Returns the leaves of its input, its output, and the bytes kept for its backward."""
    flags = iter(given.needs)
    leaf = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach().requires_grad_(next(flags, False)), given.hidden
    )
    held = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *tensors_of(leaf))}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a saved output that held its own node would never be freed

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(leaf, batch)
    return leaf, output, sum(kept.values())


def _kept_bytes(layer: ModuleLayer, batch: SampleBatch, given: _Passed, output: Any, name: str) -> int:
    """Record a part as a forward stage and replay it as a backward stage. Returns its bytes."""
    with torch.no_grad(), recording((name,)) as record:
        first = layer(given.hidden, batch)
    with replaying((name,), record.tensors):
        second = _with_graph(layer, batch, given)[1]
    if not (alike(first, output) and alike(second, output)):
        raise PipelineUsageError(
            f"it gives other values if its part {name} is kept; leave {name} out of Pipeline(keep=..)"
        )
    return sum(aligned(tensor.nbytes) for tensor in record.tensors)


def _check_leaves(output: Any, own: set[int]) -> None:
    """Refuse a layer whose output depends on trained tensors that are not in `own`."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if (variable := getattr(node, "variable", None)) is not None and id(variable) not in own:
            raise PipelineUsageError(
                f"it uses a trained tensor of shape {tuple(variable.shape)} that is not among its parameters; make it a "
                "parameter of the layer (a parameter may belong to several layers)"
            )
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        nodes += new


def _differentiate(output: Any, wanted: Sequence[Tensor]) -> None:
    """Run the backward, which must draw nothing: it would draw from no seed of the layer."""
    ends = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    wanted = [tensor for tensor in wanted if tensor.requires_grad]
    with _Watch() as watch:
        if ends and wanted:
            torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
    if watch.draws:
        raise PipelineUsageError(
            "it draws random numbers in its backward, as torch.utils.checkpoint does around dropout; leave the "
            "checkpointing out: torchround recomputes by itself"
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
                state[key] = f"{value!r} {getattr(value, '__dict__', '')!r}"
    return state


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
            f"no cut of the net fits the devices: {error}. More micro-batches (num_micro_batches), smaller layers or more "
            "memory (device_memory_gib) help"
        ) from error
