"""The flat host store: master weights, gradients and optimizer state of all layers, the one authority.

Parameters that travel together form a bundle with one flat buffer per kind: a layer's own trainable ones, its
frozen ones, and each parameter that several layers share (tied). An upload is then one contiguous copy, an
update one pass over flat memory, and a checkpoint a set of named views (DESIGN section 4).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchround.engine.store.bundles import (
    SYNC,
    Bundle,
    FlatParameter,
    UpdatePolicy,
    collect_bundles,
    mapped_ranges,
    owner_of,
)
from torchround.engine.store.host_memory import HostAllocator
from torchround.layer import LayeredModel
from torchround.optim import LossScaling, SpikeBounds

# How the names of master weights older than the newest begin in a checkpoint.
OLDER_WEIGHTS = "master_"


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
        self.bundles, self.bindings = collect_bundles(model, mapped or {})
        for bundle in self.bundles:
            if bundle.parameters[0].name in (mapped or {}):
                bundle.segments = tuple(mapped_ranges(bundle, mapped or {}, dtype))
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


# Update policies: how many weight versions are kept, and which one a step reads (DESIGN section 7).
#
# Either way step `t`'s gradient is applied to `v(t)` and gives `v(t+1)`; only where the gradient was computed
# differs. The version a pass reads is fixed by its step number, never by timing.
