"""The flat host store: master weights, gradients and optimizer state of all layers, the one authority.

Parameters that travel together form a bundle with one flat buffer per kind: a layer's own trainable ones, its
frozen ones, and each parameter that several layers share (tied). An upload is then one contiguous copy, an
update one pass over flat memory, and a checkpoint a set of named views (DESIGN section 4).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchround.engine.store.host_memory import HostAllocator
from torchround.layer import LayeredModel
from torchround.optim import LossScaling, SpikeBounds, decayed_names

# 256 elements are 512 bytes in 16 bits: each parameter starts where vector loads, CUDA copies and disks want it, and
# matrix kernels see the alignment of an ordinary tensor, so they give the same bits.
ALIGNMENT_ELEMENTS = 256

# How the names of master weights older than the newest begin in a checkpoint.
OLDER_WEIGHTS = "master_"


@dataclass(frozen=True)
class FlatParameter:
    """One parameter's place in its bundle's flat buffers, in elements. `name` is `layer.path`."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class MappedRange:
    """Consecutive elements of a bundle, from element `start` on, flat in memory of their own."""

    start: int
    memory: Tensor


@dataclass
class Bundle:
    """Parameters with common flat buffers. `layers` use it, in model order; more than one means tied.

    Elements `[0, decayed)` belong to parameters with weight decay. Frozen bundles have a master only.
    `masters[v % len(masters)]` holds version `v`. A gradient that `adds_up` comes in several parts, from rounds
    or from the layers that share the bundle, and is summed in fp32 on the host. A frozen bundle whose weights stay in
    mapped files has `segments` instead of a master: they are only read.
    """

    index: int
    layers: tuple[int, ...]
    trainable: bool
    parameters: tuple[FlatParameter, ...]
    numel: int
    decayed: int
    masters: list[Tensor] = field(default_factory=list)
    segments: tuple[MappedRange, ...] = ()
    adds_up: bool = False
    gradient: Tensor | None = None
    weight: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None

    @property
    def authority(self) -> Tensor:
        """Where the bundle's values are decided: fp32 weights, or the master of a frozen bundle."""
        return self.masters[0] if self.weight is None else self.weight

    def sources(self, version: int, start: int, stop: int) -> Iterator[MappedRange]:
        """Where elements `[start, stop)` of a version are uploaded from; in gaps between segments is nothing."""
        if not self.segments:
            yield MappedRange(start, self.masters[version % len(self.masters)][start:stop])
        for segment in self.segments:
            first, last = max(start, segment.start), min(stop, segment.start + segment.memory.numel())
            if first < last:
                yield MappedRange(first, segment.memory[first - segment.start : last - segment.start])


@dataclass(frozen=True)
class ParameterLocation:
    """Where one parameter of a layer lives: `path` in the module, `parameter` in bundle `bundle`."""

    path: str
    bundle: int
    parameter: FlatParameter


class HostStore:
    """All weights, gradients and optimizer state of a model in host memory.

    `dtype` is that of the master weights and of all computation. `policy` says how many weight versions are
    kept. `step` counts steps whose update is complete, skipped ones included;
    `applied_updates` leaves the skipped ones out and drives the bias correction. `loss_scaling` is dynamic in
    float16. `spikes` says which updates are left out because their step is far off the ones before.

    `mapped` are frozen parameters that stay where they are: by name, flat tensors of `dtype` that hold them one after
    the other. They are neither among `weights` nor in checkpoints.
    """

    def __init__(
        self,
        model: LayeredModel,
        dtype: torch.dtype = torch.float32,
        *,
        policy: UpdatePolicy = SYNC,
        pinned: bool = False,
        gradient_dtype: torch.dtype | None = None,
        spikes: SpikeBounds | None = None,
        mapped: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        self.layer_names = model.names
        self.dtype = dtype
        self.policy = policy
        self.gradient_dtype = gradient_dtype or dtype
        self.step = 0
        self.applied_updates = 0
        self.is_consistent = True
        self.loss_scaling = LossScaling(dynamic=dtype == torch.float16)
        self.spikes = spikes or SpikeBounds()
        self._memory = HostAllocator(pinned)
        self.bundles, self.bindings = _collect_bundles(model, mapped or {})
        for bundle in self.bundles:
            if bundle.parameters[0].name in (mapped or {}):
                bundle.segments = tuple(_segments(bundle, mapped or {}, dtype))
            else:
                self._allocate(bundle)

    def initialize(
        self,
        model: LayeredModel,
        seed: int,
        read_weights: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        """Fill all weights by the layers' own `init_weights`, each layer from its own generator.

        `read_weights` is for a model that was trained before: it fills `weights()`, all but what layers with an
        `init_adapters` fill by that.
        """
        method = "init_weights" if read_weights is None else "init_adapters"
        for index, layer in enumerate(model.layers):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
            fill: Callable[[torch.Generator], None] | None = getattr(layer, method, None)
            if fill is not None:
                with torch.no_grad(), bound_to_host(self, index, layer, self._fills(index)):
                    fill(generator)
        if read_weights is not None:
            read_weights(self.weights())
        self.refresh_masters()

    def refresh_masters(self) -> None:
        """Derive every version of the master weights from the fp32 weights; call after writing the latter."""
        for bundle in self.bundles:
            for master in bundle.masters:
                master.copy_(bundle.authority)

    def resume(
        self,
        step: int,
        applied_updates: int,
        loss_scale: Mapping[str, Any] | None = None,
        spikes: Mapping[str, Any] | None = None,
        holds_older_masters: bool = True,
    ) -> None:
        """Continue at `step`; call after reading a checkpoint into `named_views`.

        `loss_scale` is `loss_scale_state`'s, `spikes` that of `spikes.state_dict`. The older masters that the
        checkpoint holds move to the place of their version, and the newest are derived anew; without, all of them
        are: the next step of `async` then reads the newest weights, as its first one does.
        """
        for bundle in self.trained:
            turn = (step - self.step) % len(bundle.masters)
            bundle.masters = bundle.masters[-turn:] + bundle.masters[:-turn]
            anew = [bundle.masters[step % len(bundle.masters)]] if holds_older_masters else bundle.masters
            for master in anew:
                master.copy_(bundle.authority)
        self.step = step
        self.applied_updates = applied_updates
        self.is_consistent = True
        self.loss_scaling.load_state_dict(step, loss_scale or {})
        self.spikes.load_state_dict(spikes or {})

    def resume_state(self) -> dict[str, Any]:
        """What `resume` needs besides the views and the step, JSON-able and no longer changing. Between steps."""
        return {
            "applied_updates": self.applied_updates,
            "loss_scale": self.loss_scale_state(),
            "spikes": self.spikes.state_dict(),
        }

    def loss_scale_state(self) -> dict[str, Any]:
        """What `resume` needs of the loss scale, JSON-able; empty but in float16. Between steps, after a drain."""
        return self.loss_scaling.state_dict(self.step)

    def allocate_gradients(self, rounds: int) -> None:
        """Give each trainable bundle the gradient buffer that steps of `rounds` rounds need."""
        for bundle in self.trained:
            bundle.adds_up = rounds * len(bundle.layers) > 1
            dtype = torch.float32 if bundle.adds_up else self.gradient_dtype
            if bundle.gradient is None or bundle.gradient.dtype != dtype:
                bundle.gradient = self._flat(bundle.numel, dtype)

    @property
    def trained(self) -> list[Bundle]:
        """The bundles that have gradients and optimizer state, in model order."""
        return [bundle for bundle in self.bundles if bundle.trainable]

    def weights(self) -> dict[str, Tensor]:
        """The authoritative values by name: fp32 where trained, the master's dtype where frozen. Views."""
        return {parameter.name: parameter.view(bundle.authority) for bundle, parameter in self._held()}

    def named_views(self) -> dict[str, Tensor]:
        """What a checkpoint holds, as views that it is written from and read into, bundle by bundle.

        Only between steps, after `Engine.drain`: with several versions, the older masters are part of it.
        """
        views: dict[str, Tensor] = {}
        for bundle in self.bundles:
            views |= self.bundle_views(bundle, self.step)
        return views

    def bundle_views(self, bundle: Bundle, step: int) -> dict[str, Tensor]:
        """A bundle's part of the checkpoint after `step` steps: nothing of what stays in mapped files."""
        if bundle.segments:
            return {}
        kinds = {"weights": bundle.authority}
        if bundle.exp_avg is not None and bundle.exp_avg_sq is not None:
            kinds |= {"exp_avg": bundle.exp_avg, "exp_avg_sq": bundle.exp_avg_sq}
        for age in range(1, len(bundle.masters)):
            kinds[f"{OLDER_WEIGHTS}{age}_old"] = bundle.masters[(step - age) % len(bundle.masters)]
        return {
            f"{kind}/{parameter.name}": parameter.view(flat)
            for kind, flat in kinds.items()
            for parameter in bundle.parameters
        }

    def layer_bundles(self, layer: int) -> list[int]:
        """Bundles that a layer uses, in the order in which they lie in a weight slot."""
        return list(dict.fromkeys(binding.bundle for binding in self.bindings[layer]))

    def num_parameters(self) -> int:
        return sum(parameter.shape.numel() for bundle in self.bundles for parameter in bundle.parameters)

    def nbytes(self) -> int:
        """Host memory the store holds."""
        return self._memory.allocated_bytes

    def close(self) -> None:
        """Undo page-locking. The buffers live on as long as somebody refers to them."""
        self._memory.close()

    def _held(self) -> Iterator[tuple[Bundle, FlatParameter]]:
        """All but what stays in files."""
        for bundle in self.bundles:
            if not bundle.segments:
                yield from ((bundle, parameter) for parameter in bundle.parameters)

    def _fills(self, layer: int) -> set[int]:
        """Bundles whose first user is `layer`: the ones it initialises."""
        return {bundle.index for bundle in self.bundles if bundle.layers[0] == layer and not bundle.segments}

    def _allocate(self, bundle: Bundle) -> None:
        versions = self.policy.versions if bundle.trainable else 1
        bundle.masters = [self._flat(bundle.numel, self.dtype) for _ in range(versions)]
        if bundle.trainable:
            bundle.weight = self._flat(bundle.numel, torch.float32, for_devices=False)
            bundle.exp_avg = self._flat(bundle.numel, torch.float32, for_devices=False)
            bundle.exp_avg_sq = self._flat(bundle.numel, torch.float32, for_devices=False)

    def _flat(self, numel: int, dtype: torch.dtype, for_devices: bool = True) -> Tensor:
        return self._memory.allocate(numel * dtype.itemsize, for_devices).view(dtype)


class bound_to_host:
    """Within the block, a layer's parameters are views of the store's authority.

    Bundles outside `only` are left on `meta`, so that a tied parameter is filled by its first user alone.
    """

    def __init__(self, store: HostStore, layer_index: int, layer: nn.Module, only: set[int]) -> None:
        self._layer = layer
        self._views = {
            binding.path: binding.parameter.view(store.bundles[binding.bundle].authority)
            for binding in store.bindings[layer_index]
            if binding.bundle in only
        }
        self._originals: dict[str, nn.Parameter] = {}

    def __enter__(self) -> None:
        for path, view in self._views.items():
            module, name = owner_of(self._layer, path)
            self._originals[path] = getattr(module, name)
            setattr(module, name, nn.Parameter(view, requires_grad=False))

    def __exit__(self, *_: object) -> None:
        for path, original in reversed(self._originals.items()):
            module, name = owner_of(self._layer, path)
            setattr(module, name, original)


def owner_of(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The submodule that holds parameter `path`, and the parameter's name in it."""
    prefix, _, name = path.rpartition(".")
    return layer.get_submodule(prefix), name


def _collect_bundles(
    model: LayeredModel, mapped: Mapping[str, object]
) -> tuple[list[Bundle], list[list[ParameterLocation]]]:
    """Group parameters by (who uses them, trainable, mapped), in order of first use."""
    users: dict[int, list[int]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        for path, parameter in layer.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), [])
            if index not in users[id(parameter)]:
                users[id(parameter)].append(index)
            first.setdefault(id(parameter), (f"{name}.{path}", parameter))
    groups: dict[tuple[tuple[int, ...], bool, bool], list[int]] = {}
    for key, (name, parameter) in first.items():
        groups.setdefault((tuple(users[key]), parameter.requires_grad, name in mapped), []).append(key)
    bundles, place, decayed = [], {}, decayed_names(model)
    for index, ((layers, trainable, _), keys) in enumerate(groups.items()):
        bundle = _lay_out(index, layers, trainable, [first[key] for key in keys], decayed)
        bundles.append(bundle)
        by_name = {parameter.name: parameter for parameter in bundle.parameters}
        place.update({key: (index, by_name[first[key][0]]) for key in keys})
    bindings = [
        [
            ParameterLocation(path, *place[id(parameter)])
            for path, parameter in layer.named_parameters(remove_duplicate=False)
        ]
        for layer in model.layers
    ]
    return bundles, bindings


def _lay_out(
    index: int,
    layers: tuple[int, ...],
    trainable: bool,
    parameters: list[tuple[str, nn.Parameter]],
    with_decay: frozenset[str],
) -> Bundle:
    """Flat places, parameters with weight decay first."""
    placed, start, decayed = [], 0, 0
    for name, parameter in sorted(parameters, key=lambda item: item[0] not in with_decay):
        placed.append(FlatParameter(name, start, parameter.shape))
        start = -(-(start + parameter.numel()) // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        decayed = start if name in with_decay else decayed
    return Bundle(index, layers, trainable, tuple(placed), start, decayed)


def _segments(
    bundle: Bundle, mapped: Mapping[str, Sequence[Tensor]], dtype: torch.dtype
) -> Iterator[MappedRange]:
    assert not bundle.trainable, f"{bundle.parameters[0].name} is trained, so it cannot stay in a file"
    for parameter in bundle.parameters:
        start = parameter.start
        for memory in mapped[parameter.name]:
            assert memory.ndim == 1 and memory.dtype == dtype, (
                f"{parameter.name}: {memory.dtype}, not {dtype}"
            )
            yield MappedRange(start, memory)
            start += memory.numel()
        assert start == parameter.stop, f"{parameter.name}: {start - parameter.start} elements are mapped"


# Update policies: how many weight versions are kept, and which one a step reads (DESIGN section 7).
#
# Either way step `t`'s gradient is applied to `v(t)` and gives `v(t+1)`; only where the gradient was computed
# differs. The version a pass reads is fixed by its step number, never by timing.


@dataclass(frozen=True)
class UpdatePolicy:
    """`versions` master buffers; step `t` reads `v(t - versions + 1)`, at the start of a run `v(0)`."""

    name: str
    versions: int

    def version_read(self, step: int) -> int:
        return max(step - (self.versions - 1), 0)


SYNC = UpdatePolicy("sync", 1)
ASYNC = UpdatePolicy("async", 2)
POLICIES = {policy.name: policy for policy in (SYNC, ASYNC)}
