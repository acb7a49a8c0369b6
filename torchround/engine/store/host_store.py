"""The flat host store, by bundle (`bundles.py`), and the only code that writes weights. This table has all its writers.

All are in host memory; docs/engine.md ("Memory") has the copies on devices, docs/checkpoints.md those in files. D stands for
device weights, the copies that devices upload, S for fp32 weights (or the residuals of split ones) with the optimizer's values.
In a step the optimizer's thread writes, in tasks that `program.py` orders; `receive`, and `copy_version` of a bundle that
another machine owns, run on the thread that receives from it. A bundle lags if it is of the
first `stale_layers` layers (`bounded`): between steps its D is one version behind its S.

    writer                  writes  when
    initialize              D S     before the first engine of a new run: the layers' own weights, or pretrained ones
    writing, write_weights  D S     between engines: weights by name, such as a state dict of the library
    loadable_views, resume  D S     between engines: the reader of a checkpoint (or of the library's state dict, by `named_views`)
                                    fills the views, `resume` makes what they lack
    set_stale_layers        D       when an engine begins with fewer stale layers, or ends inside a step: those that lag no more
    receive                 D       on machines that do not own a bundle: before the first step, then after each write by its owner
    update                  D S     "the update" of a step (not with a `HostOptimizer`); S alone of a bundle that lags
    step_host_optimizer     S       "the optimizer" of a step: all weights at once, and its own state, before the updates
    derive_device_weights   D       "the update" after that; and "the stale device weights" of `bounded`, behind a step's forward
    copy_version            D       "the update" or "the receiving" of a skipped step, if there are several versions
    write_true_weights      D       a validation begins: predicted or stale weights become the true ones
    restore_device_weights  D       it ends: what was there before

`tests/engine/test_weight_writers.py` sees that no weight changes outside these methods. A gradient is written as its parts
land (`worker/transfers.py`, or their sum in `exchange.py`), clipped in place for a `HostOptimizer` (`update.py`), and between
steps it is the room where `write_true_weights` sets weights aside.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchround.config import AdamWTable
from torchround.engine.board import Observer
from torchround.engine.store.bundles import (
    Bundle,
    FlatParameter,
    Ownership,
    collect_bundles,
    mapped_ranges,
    owner_of,
    parameter_facts,
)
from torchround.engine.store.host_memory import HostAllocator
from torchround.layer import FileTensor, LayeredModel
from torchround.optim import HostOptimizer, LossScaling, SpikeBounds, UpdateProgress
from torchround.optim.host_optimizer import Hyperparameters
from torchround.optim.kernel import KernelKind
from torchround.optim.optimizer import Optimizer, make_optimizer
from torchround.optim.update_pass import UpdateBuffers, UpdateKernel, predict_, update_
from torchround.packed_formats import PackedPlace
from torchround.planning.partition import Stage
from torchround.planning.update_modes import SYNC, UpdateMode


class HostStore:
    """All weights, gradients and optimizer state of a model in host memory.

    `dtype` is that of the device weights and of all computation, `mode` the number of their versions. `step` counts steps
    whose update is complete; `applied_updates`, which drives the bias correction, leaves skipped ones out.
    `is_consistent` is False while an update is under way: the bundles then mix two versions, and a save would too. After an
    engine that could not end the store `is_in_use`: a device may still copy.

    `stale_layers` counts the layers, from the first one on, whose forward reads the previous version under the
    `bounded` mode. Between steps the device weights of their bundles are one version older than the fp32 weights.

    `ownership` says which part of a run of several machines this is. The store then holds the device weights of all
    bundles, and fp32 weights, optimizer state and gradient sums of the bundles that it owns. `mapped` gives frozen parameters
    that stay in files, neither among `weights` nor in checkpoints: for each name, tensors of `dtype` that hold it one after
    the other. `optimizer` says which state is kept for each parameter: by default AdamW's in fp32, and none with `NO_STATE`,
    for inference and for a `HostOptimizer`, which brings its own.
    """

    def __init__(
        self,
        model: LayeredModel,
        dtype: torch.dtype = torch.float32,
        *,
        mode: UpdateMode = SYNC,
        pinned: bool = False,
        mapped: Mapping[str, Sequence[FileTensor]] | None = None,
        ownership: Ownership | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.layer_names = model.names
        self.dtype = dtype
        self.mode = mode
        self.optimizer = optimizer or make_optimizer(AdamWTable())
        can_split = mode.splits_weights and self.optimizer.splits_weights
        self.splits_weights = dtype == torch.bfloat16 and can_split
        self.step = 0
        self.applied_updates = 0
        self.refreshes = 0  # how often the weights were written as a whole
        self.is_consistent = True
        self.is_in_use = False
        self.observer = Observer()  # that of the engine
        self.stale_layers = 0
        self.loss_scaling = LossScaling(dynamic=dtype == torch.float16)
        self.spikes = SpikeBounds()
        # The learning rate of the last applied update, if it predicted the newest device weights.
        self.prediction: float | None = None
        self._memory = HostAllocator(pinned)
        self.ownership = ownership or Ownership(0, 1)
        mapped = mapped or {}
        self.bundles, self.locations = collect_bundles(model, mapped, self.optimizer, dtype.itemsize)
        for bundle in self.bundles:
            if bundle.parameters[0].name in mapped:
                bundle.mapped = tuple(mapped_ranges(bundle, mapped, dtype))
        self.ownership.assign(self.bundles)
        for bundle in self.bundles:
            if not bundle.mapped:
                self._allocate(bundle)

    # Writers of weights: the table of this file.

    def initialize(
        self,
        model: LayeredModel,
        seed: int,
        read_weights: Callable[[Mapping[str, AbstractContextManager[Tensor | PackedPlace]]], None]
        | None = None,
        advance: Callable[[int], object] = lambda layers: None,
    ) -> None:
        """Fill all weights by the layers' own `init_weights`. `advance` receives 1 after each layer.

        For a model that was trained before, `read_weights` fills what `writing` yields, and `init_adapters` of layers the rest.
        """
        method = "init_weights" if read_weights is None else "init_adapters"
        with self.writing() as values:
            for index, layer in enumerate(model.layers):
                if (fill := getattr(layer, method, None)) is not None:
                    self._fill_layer(index, layer, fill, seed)
                advance(1)
            if read_weights is not None:
                read_weights(values)

    def _fill_layer(
        self, index: int, layer: nn.Module, fill: Callable[[torch.Generator], None], seed: int
    ) -> None:
        """Fill what this machine holds of a layer. The first layer that uses a shared parameter fills it."""
        ours = [b for b in self.layer_bundles(index) if b.layers[0] == index and not b.is_reloaded]
        if ours and all(bundle.is_remote for bundle in ours):
            return
        with torch.no_grad(), ExitStack() as blocks:
            values: dict[str, Tensor] = {}
            for bundle in ours:
                for parameter in bundle.parameters:
                    # One of another machine is filled too, and dropped: the layer's next one needs the same generator.
                    weight: Any = torch.zeros(parameter.shape)
                    if not bundle.is_remote:
                        weight = blocks.enter_context(bundle.writing(parameter, self.step))
                    values[parameter.name] = weight
            for location in self.locations[index]:
                if location.parameter.name in values:
                    module, name = owner_of(layer, location.path)
                    blocks.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, nn.Parameter(values[location.parameter.name], requires_grad=False))
            # A generator for each layer, so that a machine may leave out layers that others own. The factor is above every
            # number of layers, so that no two seeds give two layers the same numbers.
            fill(torch.Generator().manual_seed(seed * 1_000_003 + index))

    @contextmanager
    def writing(self) -> Iterator[Mapping[str, AbstractContextManager[Tensor | PackedPlace]]]:
        """Yield, by parameter, a block `with values[name] as weight` to write in. All device weights follow at the end."""
        held = self._held().items()
        yield {name: bundle.writing(parameter, self.step) for name, (bundle, parameter) in held}
        self.refreshes += 1  # a device that holds a copy of frozen weights uploads them again
        self.prediction = None
        for bundle in self.owned:
            self._derive_every_version(bundle)

    def write_weights(self, values: Mapping[str, Tensor]) -> None:
        """Copy values by name into the weights. Only between steps."""
        with self.writing() as weights:
            for name, value in values.items():
                with weights[name] as weight:
                    weight.copy_(value)

    def derive_device_weights(self, bundle: Bundle, version: int) -> None:
        """Make a version of an owned bundle's device weights its newest weights, unpredicted."""
        newest, device_weights = bundle.newest(self.step), bundle.version(version)
        if device_weights is not newest:
            _copy(newest, device_weights, self.observer)

    def _derive_every_version(self, bundle: Bundle) -> None:
        for age in range(len(bundle.device_weights)):
            self.derive_device_weights(bundle, self.step - age)

    def lags(self, bundle: Bundle) -> bool:
        """Decide by the stale layers if a bundle's device weights are one version behind its fp32 weights between steps."""
        return bundle.trainable and bundle.layers[0] < self.stale_layers

    def set_stale_layers(self, stale_layers: int) -> None:
        """Change `stale_layers` between steps. Bundles that lag no more get their newest device weights."""
        lagged = list(filter(self.lags, self.owned))
        self.stale_layers = stale_layers
        for bundle in lagged:
            if not self.lags(bundle):
                self._derive_every_version(bundle)

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
        """Continue at `step`. Call it after reading a checkpoint into `loadable_views`. The other arguments are as in `resume_state`.

        The views have given each bundle its fp32 weights and optimizer state. If the checkpoint `holds_older_weights`, they have
        its device weights too: each version moves to the buffer of its number, and the newest ones, if they do not lag, are
        derived from the fp32 weights. Otherwise all are, as for the first step of a run. If both runs predict, the newest ones
        are then predicted again.
        """
        lr: Any = None
        if self.mode.predicts and prediction is not None:
            lr = prediction.get("lr") if isinstance(prediction, Mapping) else None
            if type(lr) is not float or not 0 <= lr < math.inf or applied_updates <= 0:
                raise ValueError(f"prediction is {str(prediction)[:100]} after {applied_updates} updates")
        self.prediction = lr
        # Version v belongs to buffer v modulo their number, but the views were filled as of the store's own step: a buffer
        # that holds version `self.step - age` must come to where `step - age` belongs, `step - self.step` places on.
        places, self.step = step - self.step, step
        self.applied_updates = applied_updates
        self.stale_layers = stale_layers
        for bundle in self.owned:
            shift = places % len(bundle.device_weights)
            bundle.device_weights = bundle.device_weights[-shift:] + bundle.device_weights[:-shift]
            if not holds_older_weights:
                self._derive_every_version(bundle)
            elif not self.lags(bundle):
                self.derive_device_weights(bundle, step)
            if lr is not None:
                for buffers in bundle.update_buffers(bundle.version(step), step):
                    predict_(buffers, lr=lr, update=applied_updates)
        self.is_consistent = True
        self.loss_scaling.load_state_dict(step, loss_scale or {})
        self.spikes.load_state_dict(spikes or {})

    def receive(self, bundle: Bundle, version: int, fill: Callable[[Tensor], object]) -> None:
        device_weights = bundle.version(version)
        self.observer.touched(reads=(), writes=[device_weights])
        fill(device_weights)

    def update(
        self,
        bundle: Bundle,
        step: int,
        lr: float,
        gradient_scale: float,
        progress: Sequence[UpdateProgress],
        kernels: Mapping[KernelKind, UpdateKernel],
    ) -> None:
        """Update an owned bundle after `step` steps, segment by segment. A retry continues from `progress`, one for each."""
        predicts = self.mode.predicts
        self.observer.touched(bundle.inputs(step), [*bundle.state(), self._written(bundle, step)])
        for buffers, done in zip(self.update_buffers(bundle, step), progress, strict=True):
            kind = KernelKind.of(buffers, predicts) if kernels else None
            update_(
                buffers,
                lr=lr,
                update=self.applied_updates,
                gradient_scale=self.direction_scale(step) if buffers.rule.uses_direction else gradient_scale,
                progress=done,
                kernel=kernels.get(kind) if kind is not None else None,
                predicts=predicts,
            )

    def update_buffers(self, bundle: Bundle, step: int) -> list[UpdateBuffers]:
        """List what the update of an owned bundle after `step` steps reads and writes, segment by segment."""
        return [*bundle.update_buffers(self._written(bundle, step), step)]

    def _written(self, bundle: Bundle, step: int) -> Tensor:
        # The fp32 weights in place of device weights that lag: the next step's forward has to read those first.
        return bundle.fp32_weight if self.lags(bundle) else bundle.version(step + 1)

    def direction_scale(self, step: int) -> float:
        # Orthogonalisation takes a matrix of any scale, so what has a direction is not clipped.
        return 1.0 / self.loss_scaling.scale_of(step)

    def step_host_optimizer(
        self, optimizer: HostOptimizer, hyperparameters: Hyperparameters, gradients: Mapping[str, Tensor]
    ) -> None:
        optimizer.step(hyperparameters, gradients)

    def copy_version(self, bundle: Bundle, step: int) -> None:
        """Make version `step + 1` of a bundle's device weights equal to version `step`. Any thread may call this."""
        if len(bundle.device_weights) > 1:
            _copy(bundle.version(step), bundle.version(step + 1), self.observer)

    def write_true_weights(self, kept: list[tuple[Bundle, Tensor]]) -> None:
        """Make the newest device weights of this machine's bundles the fp32 weights, as a validation should see them.

        `Engine.true_device_weights` calls it when no thread reads them. `kept` gets what `restore_device_weights` takes.
        """
        for bundle in self.stale_or_predicted():
            if bundle.is_owned:
                aside = bundle.whole_gradient.view(self.dtype)[: bundle.numel]  # free between steps
                _copy(bundle.version(self.step), aside, self.observer)
                kept.append((bundle, aside))
                self.derive_device_weights(bundle, self.step)

    def restore_device_weights(self, kept: Sequence[tuple[Bundle, Tensor]]) -> None:
        for bundle, aside in kept:
            _copy(aside, bundle.version(self.step), self.observer)

    # What the store holds.

    def resume_state(self) -> dict[str, Any]:
        """Return what `resume` needs besides the views and the step, as JSON has it. Only between steps."""
        state: dict[str, Any] = {
            "applied_updates": self.applied_updates,
            "loss_scale": self.loss_scaling.state_dict(self.step),
            "spikes": self.spikes.state_dict(),
        }
        if self.mode.updates_by_layer:
            state["stale_layers"] = self.stale_layers
        if self.prediction is not None:
            state["prediction"] = {"lr": self.prediction}
        return state

    def stale_or_predicted(self) -> list[Bundle]:
        return self.trained if self.prediction is not None else list(filter(self.lags, self.trained))

    def allocate_gradients(self, rounds: int, always_add: bool = False) -> None:
        """Give each trained bundle the gradient buffer for steps of `rounds` rounds, an fp32 sum if it `always_add`s."""
        machines = self.ownership.num_machines
        for bundle in self.trained:
            # Parts that add up are summed in fp32. A gradient in one part lands as it travels, in the dtype of the weights.
            bundle.adds_up = always_add or machines * rounds * len(bundle.layers) > 1
            if bundle.is_remote:
                continue  # its parts pass through the pool on their way to the owner
            dtype = torch.float32 if bundle.adds_up else self.dtype
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

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights' values by name, for reading until the next update: fp32 if trained, otherwise in `dtype`.

        Each access to split weights makes a copy. What other machines train, and what stays in files, is not among them.
        """
        return _WeightValues(self._held(), self.step)

    def _held(self) -> dict[str, tuple[Bundle, FlatParameter]]:
        held = [bundle for bundle in self.bundles if not (bundle.mapped or bundle.is_remote)]
        return {parameter.name: (bundle, parameter) for bundle in held for parameter in bundle.parameters}

    def assign_rules(self, model: LayeredModel, optimizer: Optimizer) -> None:
        """Let the rules of `optimizer` update the bundles. Raises `EngineUsageError` if they keep other state."""
        rules = {name: optimizer.rule_of(facts) for name, facts in parameter_facts(model).items()}
        for segment in [segment for bundle in self.trained for segment in bundle.segments]:
            segment.assign(rules, optimizer.format)

    def named_views(self) -> dict[str, Tensor]:
        """View this machine's part of a checkpoint, bundle by bundle. Only between steps, after `Engine.drain`."""
        return {name: view for b in self.bundles for name, view in self.bundle_views(b, self.step).items()}

    def loadable_views(self) -> dict[str, Tensor]:
        """Return the views that a checkpoint may fill: `named_views` as they are for any `stale_layers`.

        Frozen weights that another machine saves are among them, because each machine computes with them.
        """
        views = self.named_views()
        for bundle in self.bundles:
            if not (bundle.trainable or bundle.is_reloaded):
                views |= bundle.saved_views(self.step, lags=False)
            elif self.mode.updates_by_layer and bundle.trainable:
                views |= bundle.older_views(self.step, lags=True)
        return views

    def bundle_views(self, bundle: Bundle, step: int) -> dict[str, Tensor]:
        if bundle.is_reloaded or not bundle.is_owned:
            return {}
        return bundle.saved_views(step, self.lags(bundle))

    def layer_bundles(self, layer: int) -> list[Bundle]:
        return [self.bundles[i] for i in dict.fromkeys(location.bundle for location in self.locations[layer])]

    def stage_bytes(self, stage: Stage) -> int:
        layers = range(stage.start, stage.stop)
        return sum(bundle.numel for i in layers for bundle in self.layer_bundles(i)) * self.dtype.itemsize

    def unpacked_bytes(self) -> int:
        """Compute the most that the numbers of a layer take, in the store's dtype, that are unpacked before it runs."""
        layers = (self.layer_bundles(layer) for layer in range(len(self.layer_names)))
        return max(sum(b.early_numel for b in bundles) for bundles in layers) * self.dtype.itemsize

    def nbytes(self) -> int:
        return self._memory.allocated_bytes

    def close(self) -> None:
        """Give the memory back, unless a device that hangs may still copy."""
        if not self.is_in_use:
            self._memory.close()

    def _allocate(self, bundle: Bundle) -> None:
        versions = self.mode.versions if bundle.trainable else 1
        bundle.device_weights = [self._flat(bundle.numel, self.dtype) for _ in range(versions)]
        if not (bundle.trainable and bundle.is_owned):
            return

        # Devices never touch what follows, so page-locking would gain nothing.
        unlocked = partial(self._flat, for_devices=False)
        if self.splits_weights:
            bundle.residual = unlocked(bundle.numel, torch.int16)
        else:
            bundle.weight = unlocked(bundle.numel, torch.float32)
        for segment in bundle.segments:
            segment.parts = {p.name: unlocked(p.numel(segment.numel), p.dtype) for p in segment.kinds}
            if segment.rule.uses_direction:
                segment.direction = self._flat(segment.numel, torch.bfloat16)

    def _flat(self, numel: int, dtype: torch.dtype, for_devices: bool = True) -> Tensor:
        return self._memory.allocate(numel * dtype.itemsize, for_devices).view(dtype)


def _copy(source: Tensor, target: Tensor, observer: Observer) -> None:
    observer.touched(reads=[source], writes=[target])
    target.copy_(source)


class _WeightValues(Mapping[str, Tensor]):
    """Weights by name, each read when it is asked for: split weights are nowhere in memory as fp32 numbers."""

    def __init__(self, held: Mapping[str, tuple[Bundle, FlatParameter]], version: int) -> None:
        self._held = held
        self._version = version

    def __getitem__(self, name: str) -> Tensor:
        bundle, parameter = self._held[name]
        return bundle.values(parameter, self._version)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
