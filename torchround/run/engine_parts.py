"""The host store and the engine of a run, as its config asks for them."""

from collections.abc import Mapping, Sequence

from torchround.accelerators import kind_of
from torchround.config import EngineTable, OptimizerTable, TrainingTable
from torchround.engine.compiled import LayerCompiler
from torchround.engine.device import Device
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, POLICIES, Ownership, UpdatePolicy
from torchround.engine.store.host_store import HostStore
from torchround.layer import FileTensor, LayeredModel
from torchround.machines.group import MachineGroup
from torchround.optim import SpikeBounds
from torchround.optim.optimizer import make_optimizer
from torchround.planning.machine_shares import step_share
from torchround.planning.partition import split_evenly
from torchround.planning.plan import Plan
from torchround.run.hardware import Hardware
from torchround.run.numbers import RunNumbers, compiles_layers

# From this size on `engine.compile = "auto"` compiles the update. Compiling takes about 1 s and then saves at least 2 ns per
# parameter and step on two cores, so that at this size it pays for itself in some 250 steps.
COMPILE_FROM_PARAMETERS = 2**21


def build_store(
    model: LayeredModel,
    numbers: RunNumbers,
    hardware: Hardware,
    mapped: Mapping[str, Sequence[FileTensor]] | None = None,
    ownership: Ownership | None = None,
) -> HostStore:
    """Allocate the host store, without initial weights. `mapped` and `ownership` as in `HostStore`."""
    store = HostStore(
        model,
        numbers.dtype,
        policy=update_policy(numbers.engine, numbers.optimizer.can_predict),
        # Devices copy asynchronously only from and to locked memory.
        pinned=kind_of(hardware.kind).locks_pages,
        gradient_dtype=numbers.gradient_dtype,
        mapped=mapped,
        ownership=ownership,
        optimizer=make_optimizer(numbers.optimizer),
    )
    store.spikes = SpikeBounds(numbers.spike_factor, numbers.training.spike_window)
    return store


def update_policy(table: EngineTable, can_predict: bool = True) -> UpdatePolicy:
    """Return the policy that `engine.update` and `engine.delay_correction` ask for.

    With an optimizer that cannot predict, nothing corrects the delay.
    """
    policy, corrects = POLICIES[table.update], table.delay_correction != "none" and can_predict
    return ASYNC_PREDICT if policy is ASYNC and corrects else policy


def build_engine(
    model: LayeredModel,
    store: HostStore,
    devices: Sequence[Device],
    plan: Plan,
    numbers: RunNumbers,
    optimizer: OptimizerTable,
    compiler: LayerCompiler | None = None,
    times_layers: bool = False,
    machines: MachineGroup | None = None,
) -> Engine:
    """Start an engine that runs `plan` on `devices`.

    `compiler` holds the layers that an earlier engine compiled of this model. With `times_layers` the reports hold each
    layer's own times. `machines` are those of the run if there are several.
    """
    table = numbers.engine
    settings = EngineSettings(
        rounds=plan.rounds,
        max_norm=numbers.training.max_norm,
        clip=numbers.training.clip,
        stale_layers=plan.stale_layers,
        layerwise_recompute=table.recompute == "layer",
        times_layers=times_layers,
        accumulate_dtype=numbers.accumulate_dtype,
        hang_timeout_s=table.hang_timeout_s,
        compile_update=compiles_update(table, store),
        compiler=compiler or layer_compiler(model, table, devices[0].torch_device.type),
        kept=plan.kept,
    )
    return Engine(
        *(model, store, devices, plan.partition), optimizer=optimizer, settings=settings, machines=machines
    )


def reserve_buffers(engine: Engine, training: TrainingTable, validates: bool) -> None:
    """Take the host buffers and the device space of the whole run before its first step. Raises `HostMemoryError`.

    Each of several machines takes what its own share of a step needs. One without any waits for a longer step.
    """
    count = -(-training.global_batch_size // training.micro_batch_size)
    parts = split_evenly(training.global_batch_size, count)
    ownership = engine.store.ownership
    share = step_share(count, engine.settings.rounds, ownership.machine, ownership.num_machines)
    if share.micro_batches:
        engine.reserve([(len(parts[index]), training.seq_len) for index in share.micro_batches], validates)


def compiles_update(table: EngineTable, store: HostStore) -> bool:
    """Whether `engine.compile` asks for a compiled update of this model."""
    if table.compile == "auto":
        return sum(bundle.numel for bundle in store.trained) >= COMPILE_FROM_PARAMETERS
    return table.compile


def layer_compiler(model: LayeredModel, table: EngineTable, kind: str) -> LayerCompiler | None:
    """Return a compiler of the model's layers if `engine.compile` asks for one on devices of this kind."""
    if not compiles_layers(table, kind):
        return None
    return LayerCompiler(model, is_required=table.compile is True)
