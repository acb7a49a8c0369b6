"""The numbers of a run, taken from its config and its model in this one place.

Everything that counts, plans or builds takes them from here, so that the plan of a run, its measuring plan, its dry run
and the `plan` command cannot disagree: `run_question` puts them together, and `pipeline/plan_report.py` answers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import MappingProxyType

import torch

from torchround.accelerators import kind_of
from torchround.config import AdamWTable, EngineTable, MachinesTable, OptimizerTable, TrainingTable
from torchround.engine.errors import EngineUsageError
from torchround.engine.kept_layers import kept_whole
from torchround.engine.store.bundles import ALIGNMENT_ELEMENTS
from torchround.engine.worker.slots import aligned
from torchround.layer import LayeredModel, LayerWork, runs_fused
from torchround.pipeline.cards import ASSUMED_DEVICE
from torchround.pipeline.costs import Costs, ParameterCounts, costs_from_work
from torchround.pipeline.memory import READER_BUFFER_BYTES, READER_BUFFERS
from torchround.pipeline.rates import launch_seconds
from torchround.pipeline.run_question import ONE_MACHINE, PlannedMachines, RunQuestion
from torchround.run.hardware import Hardware
from torchround.run.optimizer_numbers import OptimizerNumbers, optimizer_numbers
from torchround.run.run_plan import given_kept, given_plan, given_stale_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RunNumbers:
    """Types and sizes that `[training]`, `[engine]`, `[machines]` and `[optimizer]` ask for."""

    training: TrainingTable
    engine: EngineTable
    machines: MachinesTable = field(default_factory=MachinesTable)
    optimizer: OptimizerTable = field(default_factory=AdamWTable)

    @property
    def dtype(self) -> torch.dtype:
        """Type that devices compute in, and that weights travel in."""
        return DTYPES[self.training.dtype]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Type that gradients travel to the host in."""
        named = self.engine.grad_dtype
        return DTYPES[self.training.dtype if named == "auto" else named]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Type that devices add gradients up in."""
        return DTYPES[self.engine.accumulate_dtype]

    @property
    def spike_factor(self) -> float:
        """Deviations from the median above which a step is a spike; 0 finds none."""
        return 0.0 if self.training.on_spike == "off" else self.training.spike_factor


def run_question(
    model: LayeredModel,
    numbers: RunNumbers,
    hardware: Hardware,
    mapped: Collection[str] = (),
    *,
    validates: bool = False,
    loader_bytes_for: Callable[[int, int], int] = lambda tokens, batch: 0,
    machines: PlannedMachines = ONE_MACHINE,
) -> RunQuestion:
    """Return what the planner has to know of the run of `model`, adapters included, on `hardware`.

    `mapped` are names of frozen weights that stay in their files. `validates`, `loader_bytes_for` and `machines` are as
    in `RunQuestion`. Raises `EngineUsageError` if `engine.plan` is a file without a plan, or a plan for another number of
    layers, if the devices lack a switch that the run asks for, or if several machines are to update without waiting.
    """
    training, engine = numbers.training, numbers.engine
    if machines.count > 1 and engine.update == "bounded":
        raise EngineUsageError(
            f'engine.update = "bounded" trains on one machine, given {machines.count}; legal on several: "sync", "async". '
            'training.clip = "layer" works with both'
        )
    given = None if engine.plan is None else given_plan(engine)
    _check(model, numbers, hardware, None if given is None else given[0].num_layers)
    optimizer = optimizer_numbers(model, numbers.optimizer, engine, numbers.dtype)
    counts = parameter_counts(model, mapped, optimizer.rule_of)
    # Virtual devices copy weights in files straight from their map.
    reads_files = bool(mapped) and kind_of(hardware.kind).locks_pages
    return RunQuestion(
        costs_for=_counted_costs(model, numbers, hardware, counts, optimizer),
        parameters=counts,
        updates=optimizer.updates,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        num_devices=hardware.num_devices,
        device=hardware.spec,
        device_bytes=hardware.device_bytes,
        host_bytes=hardware.host_bytes,
        update=engine.update,
        rounds=engine.rounds or 1,  # one round unless the config asks for more
        recompute=engine.recompute,
        element_bytes=numbers.dtype.itemsize,
        gradient_bytes=numbers.gradient_dtype.itemsize,
        accumulate_bytes=numbers.accumulate_dtype.itemsize,
        float16_gradients=numbers.gradient_dtype is torch.float16,
        reader_bytes=READER_BUFFERS * READER_BUFFER_BYTES * hardware.num_devices if reads_files else 0,
        loader_bytes_for=loader_bytes_for,
        constant_bytes=model.constant_bytes(),
        devices_on_host=hardware.kind == "cpu",
        validates=validates,
        given=given,
        stale_layers=given_stale_layers(engine),
        keep_activations=engine.keep_activations,
        slower_for_memory=engine.slower_for_memory,
        given_kept=given_kept(engine),
        machines=machines,
    )


def _counted_costs(
    model: LayeredModel,
    numbers: RunNumbers,
    hardware: Hardware,
    counts: ParameterCounts,
    optimizer: OptimizerNumbers,
) -> Callable[[int, int, int], Costs]:
    """Return `RunQuestion.costs_for` of a model."""
    parameters, shared = layer_parameters(model), shared_layers(counts)
    sizes = numbers.dtype.itemsize, numbers.gradient_dtype.itemsize
    adding_share = optimizer.updates.adding_share(counts.by_rule, numbers.engine.update, *sizes)
    # Virtual devices and their updates share processors of unknown speed: their costs are proportions.
    is_virtual = hardware.kind == "cpu" or hardware.spec is None
    moved = [0.0] * len(model.layers)
    for layers, by_rule in zip(counts.bundle_layers, counts.bundle_rules, strict=True):
        moved[layers[0]] += optimizer.updates.traffic_bytes(by_rule, numbers.engine.update, *sizes)

    works_of = cache(partial(layer_works, model, numbers, hardware.kind))

    def costs_for(tokens: int, sequences: int, accumulate_bytes: int) -> Costs:
        works = works_of(tokens, sequences)
        costs = costs_from_work(
            model.names,
            works,
            parameters,
            # The plan of an unknown card follows the assumed one's proportions; no time is shown for it.
            hardware.spec or ASSUMED_DEVICE,
            dtype=numbers.training.dtype,
            fp16_accumulation=numbers.training.fp16_accumulation,
            element_bytes=numbers.dtype.itemsize,
            accumulate_bytes=accumulate_bytes,
            keeps_whole=[
                runs_compiled(layer, numbers.engine, hardware.kind, tokens * sequences)
                for layer in model.layers
            ],
            update_bytes=() if is_virtual else moved,
            adding_share=adding_share,
            jobs=optimizer.jobs,
        )
        launch_s = 0.0 if hardware.kind == "cpu" else launch_seconds([work.products for work in works])
        return replace(costs, shared=shared, launch_s=launch_s)

    return cache(costs_for)  # a report asks for the same lengths many times


def _check(model: LayeredModel, numbers: RunNumbers, hardware: Hardware, planned_layers: int | None) -> None:
    """Raise `EngineUsageError` for a switch that the devices lack, or a given plan of another number of layers."""
    if numbers.training.fp16_accumulation and kind_of(hardware.kind).fp16_accumulation() is None:
        raise EngineUsageError(
            f"training.fp16_accumulation = true: {hardware.kind} devices cannot be told to add up in float16; "
            "legal: false"
        )
    if planned_layers is not None and planned_layers != len(model.layers):
        raise EngineUsageError(
            f"engine.plan covers {planned_layers} layers, the model has {len(model.layers)} "
            "(embedding and head included)"
        )


def layer_works(
    model: LayeredModel, numbers: RunNumbers, kind: str, tokens: int, sequences: int
) -> list[LayerWork]:
    """Count what each layer costs on devices of a kind, for a micro-batch of `sequences` of `tokens` each."""
    element_bytes = numbers.dtype.itemsize
    works = []
    for layer in model.layers:
        work: LayerWork = layer.work(sequences, tokens, element_bytes, kind)  # type: ignore[operator]
        if runs_compiled(layer, numbers.engine, kind, tokens * sequences):
            # A compiled backward gives all gradients of its layer at once.
            trained = sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
            work = replace(kept_whole(work), workspace_bytes=work.workspace_bytes + trained * element_bytes)
        # As it is packed on its way.
        works.append(replace(work, boundary_bytes=aligned(work.boundary_bytes)))
    return works


def compiles_layers(table: EngineTable, kind: str) -> bool:
    """Return whether `engine.compile` asks for compiled layers on devices of a kind.

    `"auto"` asks for them on accelerators that Inductor writes code for. A compiler may still be missing there.
    """
    return kind_of(kind).compiles if table.compile == "auto" else table.compile


def runs_compiled(layer: torch.nn.Module, table: EngineTable, kind: str, num_tokens: int) -> bool:
    """Return whether a layer runs compiled for micro-batches of this size, so that it keeps all its parts or nothing."""
    return compiles_layers(table, kind) and not runs_fused(layer, kind, num_tokens)


def layer_parameters(model: LayeredModel) -> list[ParameterCounts]:
    """Count the parameters of each layer, padding included. A tied one counts in every layer that uses it."""
    counts = []
    for layer in model.layers:
        trained, frozen = (
            sum(stored_numel(each) for each in layer.parameters() if each.requires_grad is is_trained)
            for is_trained in (True, False)
        )
        counts.append(ParameterCounts(trained, frozen))
    return counts


def shared_layers(counts: ParameterCounts) -> tuple[tuple[int, ...], ...]:
    """Return the groups of layers that share trained parameters."""
    return tuple(sorted(layers for layers in counts.bundle_layers if len(layers) > 1))


def num_parameters(model: LayeredModel) -> tuple[int, int]:
    """Return the number of parameters, each tied one once, and how many of them are trained."""
    unique = {id(parameter): parameter for layer in model.layers for parameter in layer.parameters()}
    trained = sum(parameter.numel() for parameter in unique.values() if parameter.requires_grad)
    return sum(parameter.numel() for parameter in unique.values()), trained


def stored_numel(parameter: torch.nn.Parameter) -> int:
    """Return the elements that a parameter takes in its flat buffers, on the host and on devices."""
    return -(-parameter.numel() // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def parameter_counts(
    model: LayeredModel, mapped: Collection[str] = (), rule_of: Mapping[str, int] = MappingProxyType({})
) -> ParameterCounts:
    """Count the parameters of the model, padding included and each tied one once.

    Parameters named in `mapped` are frozen and counted apart, without padding: files have none. `rule_of` gives the
    update rule of trained ones by stored name; without it all have the first.
    """
    # By identity: a tied parameter is one object in several layers.
    users: dict[int, tuple[int, ...]] = {}
    parameters = {}
    in_files: set[int] = set()
    rules: dict[int, int] = {}
    for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        for path, parameter in layer.named_parameters():
            users[id(parameter)] = (*users.get(id(parameter), ()), index)
            parameters[id(parameter)] = parameter
            # A tied parameter is stored under its first name.
            rules.setdefault(id(parameter), rule_of.get(f"{name}.{path}", 0))
            if f"{name}.{path}" in mapped:
                in_files.add(id(parameter))
    trained = {
        key: stored_numel(parameter) for key, parameter in parameters.items() if parameter.requires_grad
    }
    bundles: Counter[tuple[int, ...]] = Counter()
    by_rule = [0] * (1 + max(rule_of.values(), default=0))
    of_bundles: dict[tuple[int, ...], list[int]] = defaultdict(by_rule.copy)
    for key, numel in trained.items():
        bundles[users[key]] += numel
        of_bundles[users[key]][rules[key]] += numel
    return ParameterCounts(
        trained=sum(trained.values()),
        frozen=sum(
            stored_numel(parameter)
            for key, parameter in parameters.items()
            if key not in trained.keys() | in_files
        ),
        tied=sum(numel for key, numel in trained.items() if len(users[key]) > 1),
        mapped=sum(parameters[key].numel() for key in in_files),
        bundles=tuple((numel, len(layers)) for layers, numel in bundles.items()),
        bundle_layers=tuple(bundles),
        bundle_rules=tuple(map(tuple, of_bundles.values())),
    )
