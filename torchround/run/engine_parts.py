"""The parts of a run: what its command builds, and the host store and the engine that its loop makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchround.accelerators import kind_of
from torchround.config import Config, EngineTable
from torchround.data.loader import Loader, ValidationLoader
from torchround.engine.compiled import LayerCompiler
from torchround.engine.device import Device
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import Ownership
from torchround.engine.store.host_store import HostStore
from torchround.hf import PretrainedWeights
from torchround.layer import FileTensor, LayeredModel
from torchround.machines.group import MachineGroup
from torchround.optim import SpikeBounds
from torchround.optim.optimizer import make_optimizer
from torchround.planning.plan import Plan
from torchround.planning.run_question import RunQuestion
from torchround.planning.update_modes import mode_of
from torchround.run.hardware import Hardware
from torchround.run.numbers import DTYPES, compiles_layers
from torchround.run.packed_base import PackedBase
from torchround.run.run_folder import RunFolder
from torchround.run.several_machines import RunMachines
from torchround.run.step_meter import StepMeter, flops_per_token
from torchround.run.validation import RunValidation

# From this size on `engine.compile = "auto"` compiles the update. Compiling takes about 1 s and then saves at least 2 ns per
# parameter and step on two cores, so that at this size it pays for itself in some 250 steps.
COMPILE_FROM_PARAMETERS = 2**21


@dataclass(frozen=True)
class RunParts:
    """All that a trainer needs, checked against each other; nothing large is allocated yet.

    `loader` is at the start of the data. `plan` is the answer to `question`. `mapped` are the frozen weights that stay in
    their files, by parameter name. `packed_base` fills packed ones. `machines` are those of the run, this one among them.
    """

    config: Config
    folder: RunFolder
    model: LayeredModel
    loader: Loader
    validation: RunValidation
    hardware: Hardware
    question: RunQuestion
    plan: Plan
    pretrained: PretrainedWeights | None
    mapped: Mapping[str, Sequence[FileTensor]]
    machines: RunMachines
    packed_base: PackedBase | None = None

    def identity(self) -> dict[str, str]:
        """Return what must be the same on all machines besides the configuration, by names for messages."""
        found = self.loader.fingerprints()
        if isinstance(self.validation.batches, ValidationLoader):
            found |= self.validation.batches.fingerprints()
        if self.pretrained is not None:
            found["pretrained weights"] = self.pretrained.fingerprint()
        if self.packed_base is not None:  # other weights, if the run begins with those of a checkpoint
            found["packed base"] = self.packed_base.weights.fingerprint()
        return found

    def step_meter(self, devices: Sequence[Device], skipped_steps: int) -> StepMeter:
        """Make the meter of the run's steps. All machines make theirs at the same time."""
        training, spec = self.config.training, self.hardware.spec
        peak = None if spec is None else spec.flops_per_s(training.dtype, training.fp16_accumulation)
        peaks = self.machines.agree("start", [peak, len(devices)], "the devices of all machines")
        is_known = all(each is not None for each, _ in peaks)
        all_flops_per_s = float(sum(each * count for each, count in peaks)) if is_known else None
        counted = flops_per_token(self.model, training.seq_len, DTYPES[training.dtype].itemsize)
        return StepMeter(devices, counted, all_flops_per_s, skipped_steps)


def build_store(
    model: LayeredModel,
    config: Config,
    hardware: Hardware,
    mapped: Mapping[str, Sequence[FileTensor]] | None = None,
    ownership: Ownership | None = None,
) -> HostStore:
    # With an optimizer that cannot predict, nothing corrects the delay.
    predicts = config.engine.delay_correction != "none" and config.optimizer.can_predict
    store = HostStore(
        model,
        DTYPES[config.training.dtype],
        mode=mode_of(config.engine.update).with_prediction(predicts),
        # Devices copy asynchronously only from and to locked memory.
        pinned=kind_of(hardware.kind).locks_pages,
        mapped=mapped,
        ownership=ownership,
        optimizer=make_optimizer(config.optimizer),
    )
    # Deviations from the median above which a step is a spike; 0 finds none.
    store.spikes = SpikeBounds(0.0 if config.training.on_spike == "off" else 10.0)
    return store


def build_engine(
    model: LayeredModel,
    store: HostStore,
    devices: Sequence[Device],
    plan: Plan,
    config: Config,
    compiler: LayerCompiler | None = None,
    times_layers: bool = False,
    machines: MachineGroup | None = None,
) -> Engine:
    """Start an engine that runs `plan`. `compiler` may hold layers that an earlier engine of the model compiled."""
    table = config.engine
    settings = EngineSettings(
        rounds=plan.rounds,
        max_norm=config.training.max_norm,
        clip=config.training.clip,
        stale_layers=plan.stale_layers,
        layerwise_recompute=table.recompute == "layer",
        times_layers=times_layers,
        accumulate_dtype=DTYPES[table.accumulate_dtype],
        hang_timeout_s=table.hang_timeout_s,
        compile_update=compiles_update(table, store),
        compiler=compiler,
        kept=plan.kept,
    )
    return Engine(
        *(model, store, devices, plan.partition),
        optimizer=config.optimizer,
        settings=settings,
        machines=machines,
    )


def compiles_update(table: EngineTable, store: HostStore) -> bool:
    if table.compile == "auto":
        return sum(bundle.numel for bundle in store.trained) >= COMPILE_FROM_PARAMETERS
    return table.compile


def layer_compiler(
    model: LayeredModel, table: EngineTable, kind: str, stays_uncompiled: bool = False
) -> LayerCompiler | None:
    if stays_uncompiled or not compiles_layers(table, kind):
        return None
    return LayerCompiler(model, options=table.compile_options)
