"""From config tables to devices, a plan and an engine: what train.py and scripts put together."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from torchround.config import EngineTable, OptimizerTable, TrainingTable
from torchround.engine.compiled import LayerCompiler
from torchround.engine.device import GIB, CpuDevice, CudaDevice, Device
from torchround.engine.engine import Engine, EngineSettings
from torchround.engine.errors import EngineUsageError
from torchround.engine.store.bundles import POLICIES
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, LayerWork
from torchround.optim import SpikeBounds
from torchround.pipeline.costs import Costs, LayerParameters, costs_from_work
from torchround.pipeline.devices import ASSUMED_DEVICE, DeviceSpec, find_device
from torchround.pipeline.memory import MemoryLimits, rounding
from torchround.pipeline.partition import Partition
from torchround.pipeline.plan import Plan
from torchround.pipeline.planner import evaluate_plan, make_plan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What `engine.compile = "auto"` compiles the update for: it saves about 2 ns per parameter and step on two cores,
# so that here the 20 s of compiling are won back in some 300 steps.
COMPILE_FROM_PARAMETERS = 2**25

# Of a GPU's memory, what is left for the plan after the CUDA context, library workspaces and fragmentation.
USABLE_CUDA_FRACTION = 0.9
# Of free host memory, what virtual devices may use together.
USABLE_HOST_FRACTION = 0.5


@dataclass(frozen=True)
class DeviceChoice:
    """Which devices a run uses. `spec` is None where the card is not in the device table."""

    kind: str
    count: int
    memory_bytes: int
    spec: DeviceSpec | None

    def make(self) -> list[Device]:
        """The devices, without allocating on them yet. More than the machine has share its GPUs in turn."""
        if self.kind == "cpu":
            return [CpuDevice(index, self.memory_bytes) for index in range(self.count)]
        present = torch.cuda.device_count()
        shared = self.count > present
        return [CudaDevice(index % present, index if shared else None) for index in range(self.count)]


def choose_devices(table: EngineTable) -> DeviceChoice:
    """What `[engine]` asks for on this machine. Raises `EngineUsageError` for GPUs that are not there."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if table.devices == "cpu" or (table.devices == "auto" and not present):
        count = table.num_devices or 1
        share = int(psutil.virtual_memory().available * USABLE_HOST_FRACTION) // count
        return DeviceChoice("cpu", count, _limit(table, share), None)
    if not present:
        raise EngineUsageError(
            'engine.devices is "cuda", but PyTorch sees no GPU; legal here: "cpu" or "auto"'
        )
    count = table.num_devices or present
    smallest = min(torch.cuda.get_device_properties(index).total_memory for index in range(present))
    share = int(smallest * USABLE_CUDA_FRACTION) // -(-count // present)
    return DeviceChoice("cuda", count, _limit(table, share), find_device(torch.cuda.get_device_name(0)))


def model_costs(
    model: LayeredModel, training: TrainingTable, engine: EngineTable, devices: DeviceChoice
) -> Costs:
    """Costs of the longest micro-batch, counted from shapes; measured ones replace them later."""
    dtype = DTYPES[training.dtype]
    micro_batch = -(-training.global_batch_size // _num_micro_batches(training))
    return costs_from_work(
        model.names,
        layer_works(
            model,
            micro_batch,
            training.seq_len,
            dtype.itemsize,
            devices.kind,
            compiled=engine.compile is True,
        ),
        layer_parameters(model),
        devices.spec or ASSUMED_DEVICE,
        dtype=training.dtype,
        element_bytes=dtype.itemsize,
        accumulate_bytes=DTYPES[engine.accumulate_dtype].itemsize,
    )


def layer_parameters(model: LayeredModel) -> list[LayerParameters]:
    """Of each layer; tied ones in every layer that uses them."""
    return [
        LayerParameters(
            sum(parameter.numel() for parameter in layer.parameters()),
            sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad),
        )
        for layer in model.layers
    ]


def layer_works(
    model: LayeredModel, batch: int, tokens: int, element_bytes: int, kind: str, compiled: bool
) -> list[LayerWork]:
    """What each layer costs on devices of this kind. Compiled, its backward gives all its gradients at once."""
    works = []
    for layer in model.layers:
        work: LayerWork = layer.work(batch, tokens, element_bytes, kind)  # type: ignore[operator]
        if compiled:
            trained = sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
            work = replace(work, workspace_bytes=work.workspace_bytes + trained * element_bytes)
        works.append(work)
    return works


def plan_run(
    model: LayeredModel,
    training: TrainingTable,
    engine: EngineTable,
    devices: DeviceChoice,
    kept_rounds: int | None = None,
) -> Plan:
    """The plan of the config, or the planner's. Raises `InfeasiblePlanError` or `EngineUsageError`.

    `kept_rounds` are those that a run which goes on had before; they stand for `rounds = "auto"`.
    """
    costs = model_costs(model, training, engine, devices)
    if engine.plan is None:
        rounds = kept_rounds if kept_rounds and engine.rounds == "auto" else engine.rounds or 1
        return make_plan(
            costs,
            devices.count,
            _num_micro_batches(training),
            engine.update,
            rounds,
            _limits(training, engine, devices),
        )
    partition, rounds = given_plan(engine)
    if partition.num_layers != len(model.layers):
        raise EngineUsageError(
            f"engine.plan covers {partition.num_layers} layers, the model has {len(model.layers)} "
            "(embedding and head included)"
        )
    return plan_of(partition, rounds, costs, training, engine, devices)


def plan_of(
    partition: Partition,
    rounds: int,
    costs: Costs,
    training: TrainingTable,
    engine: EngineTable,
    devices: DeviceChoice,
) -> Plan:
    """A given partition as a plan. Raises `InfeasiblePlanError` when it does not fit."""
    limits = _limits(training, engine, devices)
    micro_batches = _num_micro_batches(training)
    return evaluate_plan(partition, rounds, costs, devices.count, micro_batches, engine.update, limits)


def replan(
    plan: Plan, costs: Costs, training: TrainingTable, engine: EngineTable, devices: DeviceChoice
) -> Plan:
    """The best plan under measured costs, with the same rounds: they decide how gradients round."""
    limits = _limits(training, engine, devices)
    return make_plan(costs, plan.num_devices, plan.num_micro_batches, plan.update, plan.rounds, limits)


def build_store(
    model: LayeredModel,
    training: TrainingTable,
    engine: EngineTable,
    devices: DeviceChoice,
    mapped: Mapping[str, Sequence[Tensor]] | None = None,
) -> HostStore:
    """The host store that the tables ask for, without initial weights. `mapped` as in `HostStore`."""
    dtype = DTYPES[training.dtype]
    factor = 0.0 if training.on_spike == "off" else training.spike_factor
    return HostStore(
        model,
        dtype,
        policy=POLICIES[engine.update],
        pinned=devices.kind == "cuda",
        gradient_dtype=gradient_dtype(training, engine),
        spikes=SpikeBounds(factor, training.spike_window),
        mapped=mapped,
    )


def gradient_dtype(training: TrainingTable, engine: EngineTable) -> torch.dtype:
    """In which gradients travel to the host."""
    return DTYPES[training.dtype if engine.grad_dtype == "auto" else engine.grad_dtype]


def build_engine(
    model: LayeredModel,
    store: HostStore,
    devices: Sequence[Device],
    plan: Plan,
    table: EngineTable,
    optimizer: OptimizerTable,
    max_norm: float,
    compiler: LayerCompiler | None = None,
    turns: Sequence[Sequence[int]] = (),
) -> Engine:
    """An engine that runs `plan` on `devices`. `compiler` holds what an engine before it compiled of this model.

    `turns` are the groups of devices that take turns (`find_link_use`).
    """
    settings = EngineSettings(
        rounds=plan.rounds,
        max_norm=max_norm,
        layerwise_recompute=table.recompute == "layer",
        accumulate_dtype=DTYPES[table.accumulate_dtype],
        hang_timeout_s=table.hang_timeout_s,
        compile_update=compiles_update(table, store),
        compiler=compiler or layer_compiler(model, table),
        turns=turns,
    )
    return Engine(model, store, devices, plan.partition, optimizer=optimizer, settings=settings)


def compiles_update(table: EngineTable, store: HostStore) -> bool:
    """Whether `engine.compile` asks for a compiled update of this model."""
    if table.compile == "auto":
        return sum(bundle.numel for bundle in store.trained) >= COMPILE_FROM_PARAMETERS
    return table.compile


def layer_compiler(model: LayeredModel, table: EngineTable) -> LayerCompiler | None:
    """What compiles the layers where `engine.compile` asks for that: `true`, not `"auto"`."""
    return LayerCompiler(model) if table.compile is True else None


def given_plan(engine: EngineTable) -> tuple[Partition, int]:
    """Partition and rounds of `engine.plan`, a table or a path to a plan.json."""
    given = engine.plan
    if isinstance(given, str):
        try:
            plan = Plan.from_json(Path(given).read_text())
        except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise EngineUsageError(f'engine.plan = "{given}" cannot be read as a plan: {error}') from error
        return plan.partition, plan.rounds
    assert given is not None, "engine.plan is not set"
    rounds = given.rounds or (engine.rounds if isinstance(engine.rounds, int) else 1)
    return Partition.from_lists(given.forward, given.fused, given.backward), rounds


def _limits(training: TrainingTable, engine: EngineTable, devices: DeviceChoice) -> MemoryLimits:
    longest = -(-training.global_batch_size // _num_micro_batches(training))
    accumulated, travels = DTYPES[engine.accumulate_dtype], gradient_dtype(training, engine)
    return MemoryLimits(
        device_bytes=devices.memory_bytes,
        integer_bytes=4 * 8 * longest * training.seq_len,
        recompute=engine.recompute,
        **(rounding(accumulated.itemsize, travels.itemsize) if accumulated != travels else {}),
    )


def _num_micro_batches(training: TrainingTable) -> int:
    return -(-training.global_batch_size // training.micro_batch_size)


def _limit(table: EngineTable, default_bytes: int) -> int:
    return default_bytes if table.device_memory_gib is None else int(table.device_memory_gib * GIB)
