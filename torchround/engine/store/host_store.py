"""The flat host store: fp32 weights, device weights, gradients and optimizer state of all layers, the one authority.

Parameters that travel together form a bundle with one flat buffer for each kind of state: a layer's own
trained parameters, its frozen ones, and each parameter that several layers share. So an upload is one
contiguous copy, an update one pass over flat memory, and a checkpoint a set of named views.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchround.engine.board import Observer
from torchround.engine.store.bundles import (
    BOUNDED,
    SYNC,
    Bundle,
    FlatParameter,
    UpdatePolicy,
    collect_bundles,
    mapped_ranges,
)
from torchround.engine.store.host_memory import HostAllocator
from torchround.engine.store.initial_weights import fill_layer
from torchround.engine.store.ownership import Ownership
from torchround.engine.store.prediction import Prediction, derive_newest
from torchround.layer import FileTensor, LayeredModel
from torchround.optim import LossScaling, SpikeBounds
from torchround.pipeline.partition import Stage

# Checkpoints name versions of the device weights older than the newest `master_<age>_old/..`.
# The word is from an early release: these are not the float32 weights. It stays, so that
# checkpoints already written load.
OLDER_WEIGHTS = "master_"


class HostStore:
    """All weights, gradients and optimizer state of a model in host memory.

    `dtype` is the dtype of the device weights and of all computation. `policy` says how many versions of the
    device weights are kept. `step` counts steps whose update is complete, skipped ones included.
    `applied_updates` leaves the skipped ones out and drives the bias correction. `loss_scaling` is dynamic in
    float16. `spikes` decides which updates are left out because their step is far off the ones before.

    `is_consistent` is False while an update is under way: the bundles then mix two versions, and a save would
    too.

    `stale_layers` counts the layers, from the first one on, whose forward reads the previous version under the
    `bounded` policy. Between steps the device weights of their bundles are one version older than the fp32 weights.

    `ownership` says which part of a run of several machines this is. The store then holds the device weights of all
    bundles, and fp32 weights, optimizer state and gradient sums of the bundles that it owns.

    `mapped` gives frozen parameters that stay in mapped files: for each name, tensors of `dtype` that hold
    the parameter one after the other. They are neither among `weights` nor in checkpoints.

    A store that `keeps_moments` has room for AdamW's; a `HostOptimizer` brings its own state.
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
        mapped: Mapping[str, Sequence[FileTensor]] | None = None,
        ownership: Ownership | None = None,
        keeps_moments: bool = True,
    ) -> None:
        self.layer_names = model.names
        self.dtype = dtype
        self.policy = policy
        self.gradient_dtype = gradient_dtype or dtype
        self.keeps_moments = keeps_moments
        self.step = 0
        self.applied_updates = 0
        self.refreshes = 0  # how often the weights were written as a whole
        self.is_consistent = True
        self.stale_layers = 0
        self.loss_scaling = LossScaling(dynamic=dtype == torch.float16)
        self.spikes = spikes or SpikeBounds()
        # Set by each update if the policy predicts.
        self.prediction: Prediction | None = None
        self._memory = HostAllocator(pinned)
        self.ownership = ownership or Ownership(0, 1)
        self.bundles, self.locations = collect_bundles(model, mapped or {})
        for bundle in self.bundles:
            if bundle.parameters[0].name in (mapped or {}):
                bundle.mapped = tuple(mapped_ranges(bundle, mapped or {}, dtype))
        self.ownership.assign(self.bundles)
        for bundle in self.bundles:
            if not bundle.mapped:
                self._allocate(bundle)

    def initialize(
        self,
        model: LayeredModel,
        seed: int,
        read_weights: Callable[[Mapping[str, Tensor]], None] | None = None,
        advance: Callable[[int], object] = lambda layers: None,
    ) -> None:
        """Fill all weights by the layers' own `init_weights`, each layer from its own generator.

        For a model that was trained before, `read_weights` fills `weights()`. Layers that have an
        `init_adapters` then fill by that method what the model was trained without. `advance` receives 1 after
        each layer.
        """
        method = "init_weights" if read_weights is None else "init_adapters"
        for index, layer in enumerate(model.layers):
            fill_layer(self.bundles, self.locations[index], index, layer, method, seed)
            advance(1)
        if read_weights is not None:
            read_weights(self.weights())
        self.refresh_device_weights()

    def refresh_device_weights(self) -> None:
        """Derive every version of the owned device weights from the fp32 weights, once those are written.

        A frozen bundle has no fp32 weights; its device weights stay as they are. A device that holds a copy of them then
        uploads them again. The device weights of another machine's bundles come from their owner.
        """
        self.refreshes += 1
        for bundle in self.owned:
            for device_weights in bundle.device_weights:
                device_weights.copy_(bundle.authority)

    def lags(self, bundle: Bundle) -> bool:
        """Tell whether the bundle's device weights are one version older than its fp32 weights between steps."""
        return bundle.trainable and bundle.layers[0] < self.stale_layers

    def set_stale_layers(self, stale_layers: int) -> None:
        """Change `stale_layers` between steps. Bundles that lag no more get their newest device weights."""
        lagged = [bundle for bundle in self.bundles if self.lags(bundle)]
        self.stale_layers = stale_layers
        for bundle in lagged:
            if not self.lags(bundle):
                bundle.device_weights[0].copy_(bundle.authority)

    def oldest_version_read(self, step: int, training: bool) -> int:
        """Return the oldest version that a pass after `step` steps reads: a training step, or an evaluation."""
        version = self.policy.version_read(step) if training else step
        return version - (self.stale_layers > 0)

    def resume(
        self,
        step: int,
        applied_updates: int,
        loss_scale: Mapping[str, Any] | None = None,
        spikes: Mapping[str, Any] | None = None,
        holds_older_weights: bool = True,
        prediction: Mapping[str, Any] | None = None,
        stale_layers: int = 0,
    ) -> None:
        """Continue at `step`. Call it after reading a checkpoint into `named_views`.

        `loss_scale` comes from `loss_scale_state`, `spikes` from `spikes.state_dict`. A checkpoint that
        `holds_older_weights` has filled the older versions: each moves to the buffer of its number, and only
        the newest is derived anew. Otherwise every version is derived from the fp32 weights, so the next step
        of `async` reads the newest ones, as the first step of a run does. The same holds for `bounded`, whose
        `stale_layers` is the value that the checkpoint was made with. `prediction` is the saved state of
        `self.prediction`. The newest device weights are predictions again if both runs predict.
        """
        # First: it may refuse what the checkpoint says.
        self.prediction = None
        if prediction is not None and self.policy.predicts:
            self.prediction = Prediction.from_state(prediction, applied_updates)
        self.stale_layers = stale_layers
        for bundle in self.owned:
            # Version v belongs to buffer v modulo their number, but the views were filled as of the
            # store's own step: a buffer that holds version `self.step - age` must come to where `step -
            # age` belongs, `shift` places on.
            shift = (step - self.step) % len(bundle.device_weights)
            bundle.device_weights = bundle.device_weights[-shift:] + bundle.device_weights[:-shift]
            if not holds_older_weights:
                for device_weights in bundle.device_weights:
                    device_weights.copy_(bundle.authority)
        self.step = step
        self.applied_updates = applied_updates
        # Device weights that lag are as old as the checkpoint says.
        newest = [bundle for bundle in self.owned if not self.lags(bundle)]
        derive_newest(newest, step, self.prediction, applied_updates)
        self.is_consistent = True
        self.loss_scaling.load_state_dict(step, loss_scale or {})
        self.spikes.load_state_dict(spikes or {})

    def resume_state(self) -> dict[str, Any]:
        """Return what `resume` needs besides the views and the step, JSON-able and no longer changing.

        Only between steps.
        """
        state: dict[str, Any] = {
            "applied_updates": self.applied_updates,
            "loss_scale": self.loss_scale_state(),
            "spikes": self.spikes.state_dict(),
        }
        if self.policy is BOUNDED:
            state["stale_layers"] = self.stale_layers
        return state if self.prediction is None else {**state, "prediction": self.prediction.state()}

    def untrue_bundles(self) -> list[Bundle]:
        """Return the bundles whose newest device weights are not the fp32 weights: predictions, or those that lag."""
        return self.trained if self.prediction is not None else list(filter(self.lags, self.trained))

    @contextmanager
    def true_device_weights(
        self, observer: Observer | None = None, share: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Let the newest device weights be the fp32 weights for the block, as a validation should see them.

        `Engine.true_device_weights` calls it when no thread reads them. Afterwards they are as before, bit for bit.
        Of several machines each writes the device weights that it owns; `share` then brings those of the others.
        """
        observer, untrue = observer or Observer(), self.untrue_bundles()
        set_aside = []
        for bundle in untrue:
            if self.lags(bundle):
                set_aside.append((bundle.device_weights[0], self._spare(bundle)))
        for device_weights, spare in set_aside:
            observer.touched(reads=[device_weights], writes=[spare])
            spare.copy_(device_weights)
        try:
            self._derive(untrue, None, observer)
            if self.prediction is not None:
                share()
            yield
        finally:
            for device_weights, spare in set_aside:
                observer.touched(reads=[spare], writes=[device_weights])
                device_weights.copy_(spare)
            if self.prediction is not None:
                self._derive(untrue, self.prediction, observer)
        # Not after an exception: the other machines may never come to the end of the block.
        if self.prediction is not None:
            share()

    def write_newest_device_weights(self) -> None:
        """Write the newest device weights of bundles that lag, after a step that was dropped before its update.

        The next step's forward then reads the newest weights in all layers, as the first step of a run does.
        """
        self._derive(filter(self.lags, self.trained), None, Observer())
        self.is_consistent = True

    def _spare(self, bundle: Bundle) -> Tensor:
        """Return room for a copy of device weights: the gradient's, which nothing reads between steps, if it is enough."""
        if bundle.gradient is None or bundle.gradient.itemsize < self.dtype.itemsize:
            return torch.empty_like(bundle.device_weights[0])
        return bundle.gradient.view(self.dtype)[: bundle.numel]

    def _derive(self, bundles: Iterable[Bundle], prediction: Prediction | None, observer: Observer) -> None:
        for bundle in (bundle for bundle in bundles if bundle.is_owned):
            observer.touched(reads=[bundle.authority], writes=[bundle.version(self.step)])
            derive_newest([bundle], self.step, prediction, self.applied_updates)

    def loss_scale_state(self) -> dict[str, Any]:
        """Return what `resume` needs of the loss scale, JSON-able; empty except in float16. Only between steps."""
        return self.loss_scaling.state_dict(self.step)

    def allocate_gradients(self, rounds: int, always_add: bool = False) -> None:
        """Give each trained bundle of this machine the gradient buffer that steps of `rounds` rounds need.

        With `always_add`, parts land in the pool and are added in fp32 even if a step has one part alone.
        """
        machines = self.ownership.num_machines
        for bundle in self.trained:
            # Parts that add up are summed in fp32. A gradient in one part lands as it
            # travels, in the gradient dtype.
            bundle.adds_up = always_add or machines * rounds * len(bundle.layers) > 1
            if bundle.is_remote:
                continue  # its parts pass through the pool on their way to the owner
            dtype = torch.float32 if bundle.adds_up else self.gradient_dtype
            if bundle.gradient is None or bundle.gradient.dtype != dtype:
                bundle.gradient = self._flat(bundle.numel, dtype)

    @property
    def trained(self) -> list[Bundle]:
        """The bundles that have gradients and optimizer state, here or on another machine, in model order."""
        return [bundle for bundle in self.bundles if bundle.trainable]

    @property
    def owned(self) -> list[Bundle]:
        """The trained bundles whose optimizer state is on this machine, in model order."""
        return [bundle for bundle in self.trained if bundle.is_owned]

    def weights(self) -> dict[str, Tensor]:
        """Return views of the authoritative values by name: fp32 if trained, otherwise in the store's dtype.

        What other machines train is not among them.
        """
        return {parameter.name: parameter.view(bundle.authority) for bundle, parameter in self._held()}

    def named_views(self) -> dict[str, Tensor]:
        """Return this machine's part of a checkpoint, as views that it is written from and read into, bundle by bundle.

        Only between steps, after `Engine.drain`: with several versions, the older device weights are part of
        it, and with `stale_layers` the device weights that lag.
        """
        views: dict[str, Tensor] = {}
        for bundle in self.bundles:
            views |= self.bundle_views(bundle, self.step)
        return views

    def loadable_views(self) -> dict[str, Tensor]:
        """Return the views that a checkpoint may fill: `named_views` as they are for any `stale_layers`.

        Frozen weights that another machine saves are among them, because each machine computes with them.
        """
        if self.policy is not BOUNDED:
            return self.named_views() | {f"weights/{name}": view for name, view in self.weights().items()}
        kind = f"{OLDER_WEIGHTS}1_old"
        older = {
            f"{kind}/{parameter.name}": parameter.view(bundle.device_weights[0])
            for bundle in self.trained
            for parameter in bundle.parameters
        }
        return self.named_views() | older

    def bundle_views(self, bundle: Bundle, step: int) -> dict[str, Tensor]:
        """Return a bundle's part of the checkpoint after `step` steps, without what stays in mapped files.

        The bundle's owner saves it: a bundle of another machine gives nothing.
        """
        if bundle.mapped or not bundle.is_owned:
            return {}
        kinds = {"weights": bundle.authority}
        if bundle.exp_avg is not None and bundle.exp_avg_sq is not None:
            kinds |= {"exp_avg": bundle.exp_avg, "exp_avg_sq": bundle.exp_avg_sq}
        # The newest device weights are not saved: the fp32 weights, rounded, or what `prediction` makes of them.
        for age in range(1, len(bundle.device_weights)):
            kinds[f"{OLDER_WEIGHTS}{age}_old"] = bundle.version(step - age)
        if self.lags(bundle):
            kinds[f"{OLDER_WEIGHTS}1_old"] = bundle.device_weights[0]
        return {
            f"{kind}/{parameter.name}": parameter.view(flat)
            for kind, flat in kinds.items()
            for parameter in bundle.parameters
        }

    def layer_bundles(self, layer: int) -> list[int]:
        """Return the bundles that a layer uses, in the order of a weight slot."""
        return list(dict.fromkeys(location.bundle for location in self.locations[layer]))

    def stage_bytes(self, stage: Stage) -> int:
        """Return the bytes of one upload of a stage's weights."""
        numel = sum(
            self.bundles[bundle].numel
            for layer in range(stage.start, stage.stop)
            for bundle in self.layer_bundles(layer)
        )
        return numel * self.dtype.itemsize

    def num_parameters(self) -> int:
        """Return the number of parameters, shared ones counted once."""
        return sum(parameter.shape.numel() for bundle in self.bundles for parameter in bundle.parameters)

    def nbytes(self) -> int:
        """Return the bytes of host memory that the store holds."""
        return self._memory.allocated_bytes

    def close(self) -> None:
        """Undo page-locking. Each buffer lives on while a tensor refers to it."""
        self._memory.close()

    def _held(self) -> Iterator[tuple[Bundle, FlatParameter]]:
        """Yield all parameters whose authority is here, except those that stay in files."""
        for bundle in self.bundles:
            if not (bundle.mapped or bundle.is_remote):
                yield from ((bundle, parameter) for parameter in bundle.parameters)

    def _allocate(self, bundle: Bundle) -> None:
        versions = self.policy.versions if bundle.trainable else 1
        bundle.device_weights = [self._flat(bundle.numel, self.dtype) for _ in range(versions)]
        # Devices never touch what follows, so page-locking them would gain nothing.
        if bundle.trainable and bundle.is_owned:
            bundle.weight = self._flat(bundle.numel, torch.float32, for_devices=False)
        if bundle.weight is not None and self.keeps_moments:
            bundle.exp_avg = self._flat(bundle.numel, torch.float32, for_devices=False)
            bundle.exp_avg_sq = self._flat(bundle.numel, torch.float32, for_devices=False)

    def _flat(self, numel: int, dtype: torch.dtype, for_devices: bool = True) -> Tensor:
        return self._memory.allocate(numel * dtype.itemsize, for_devices).view(dtype)
