"""The numbers of a run, taken from its config and its model in this one place.

Everything that counts, plans or builds takes them from here, so that the plan of a run, its measuring plan, its dry run
and the `plan` command cannot disagree: `run_question` puts them together, and `planning/plan_report.py` answers.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import torch

from torchround.accelerators import kind_of
from torchround.config import Config, EngineTable
from torchround.engine.errors import EngineUsageError
from torchround.engine.passes import StepResult
from torchround.engine.reports import layer_times
from torchround.engine.store.bundles import Bundle, collect_bundles, parameter_facts, stored_numel
from torchround.engine.worker.orthogonalise import directed_parameters
from torchround.layer import LayeredModel, LayerWork, aligned, may_compile
from torchround.optim.formats import FORMATS
from torchround.optim.optimizer import make_optimizer
from torchround.optim.rules.muon import STEPS
from torchround.planning import update_costs
from torchround.planning.cards import ASSUMED_DEVICE, DeviceSpec
from torchround.planning.costs import BundleCount, Costs, LayerCost, ParameterCounts, measured_costs
from torchround.planning.keep_rule import kept_whole
from torchround.planning.memory import READER_BUFFER_BYTES, READER_BUFFERS
from torchround.planning.partition import KeptNames, Partition
from torchround.planning.plan import Plan
from torchround.planning.plan_report import fits, plan_for
from torchround.planning.planner import InfeasiblePlanError
from torchround.planning.rates import CardRates, costs_from_work, launch_seconds
from torchround.planning.run_question import ONE_MACHINE, PlannedMachines, RunQuestion
from torchround.run.hardware import Hardware

logger = logging.getLogger(__name__)

COMPACT_STATE = 'optimizer.state = "compact"'
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def run_question(
    model: LayeredModel,
    config: Config,
    hardware: Hardware,
    mapped: Collection[str] = (),
    machines: PlannedMachines = ONE_MACHINE,
    loader_bytes_for: Callable[[int, int], int] = lambda tokens, batch: 0,
) -> RunQuestion:
    """Describe the run of `model`, adapters included, on `hardware` for the planner.

    `mapped` are names of frozen weights that stay in their files, beside packed ones. `loader_bytes_for` and `machines` are as in
    `RunQuestion`. Raises `EngineUsageError` as `given_plan` does, or if the devices lack a switch that is asked for.
    """
    training, engine, dtype = config.training, config.engine, DTYPES[config.training.dtype]
    given, stale_layers, given_kept = given_plan(engine, len(model.layers))
    if training.fp16_accumulation and not kind_of(hardware.kind).adds_in_fp16:
        text = f"{hardware.kind} devices cannot add up in float16; legal: false"
        raise EngineUsageError(f"training.fp16_accumulation = true: {text}")
    mapped = {*mapped, *(model.packed if config.lora.map_base else ())}
    bundles, _ = collect_bundles(model, mapped, make_optimizer(config.optimizer), dtype.itemsize)
    updates, rule_of = optimizer_costs(model, bundles, config)
    counts = parameter_counts(bundles, mapped, rule_of)
    # Virtual devices copy weights in files straight from their map.
    reads_files = bool(mapped) and kind_of(hardware.kind).locks_pages
    counted = partial(_counted_costs, model, config, hardware, bundles, counts, updates)
    compiles = compiles_layers(engine, hardware.kind)
    question = RunQuestion(
        costs_for=counted(compiles),
        uncompiled_costs_for=counted(False) if compiles and engine.compile == "auto" else None,
        parameters=counts,
        updates=updates,
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
        element_bytes=dtype.itemsize,
        gradient_bytes=dtype.itemsize,
        accumulate_bytes=DTYPES[engine.accumulate_dtype].itemsize,
        float16_gradients=dtype is torch.float16,
        reader_bytes=READER_BUFFERS * READER_BUFFER_BYTES * hardware.num_devices if reads_files else 0,
        loader_bytes_for=loader_bytes_for,
        constant_bytes=model.constant_bytes(),
        devices_on_host=hardware.kind == "cpu",
        validates=config.validation.interval_steps > 0,
        given=given,
        stale_layers=stale_layers,
        keep_activations=engine.keep_activations,
        given_kept=given_kept,
        machines=machines,
    )
    if question.uncompiled_costs_for and not fits(question) and fits(question.uncompiled()):
        logger.warning(
            'engine.compile = "auto": layers run uncompiled. Compiled ones need room for one more gradient of a block, '
            "and the run fits only without it. Losses of compiled layers differ in the last bits"
        )
        return question.uncompiled()
    return question


def measured_plan(question: RunQuestion, counted: Plan, steps: Sequence[StepResult]) -> Plan:
    """Plan again from the medians of measured `steps`, all of which must be done. They ran under the `counted` plan."""
    times = layer_times(report for step in steps for report in step.reports())
    updates = [[(span.layers.start, span.seconds) for span in step.update().bundles] for step in steps]
    run_again = set[int]()
    if question.recompute == "layer":  # all layers but a stage's last run again, while it goes backward
        for stage in counted.partition.stages()[len(counted.partition.forward) :]:
            run_again.update(range(stage.start, stage.stop - 1))
    before = question.costs().keeping(counted.kept)
    costs = measured_costs(before, times, updates, run_again).keeping(())
    try:
        # Losses depend on the rounds and on the stale layers. Both stay as they were counted: the question has the latter.
        return plan_for(replace(question, rounds=counted.rounds), costs)
    except InfeasiblePlanError as error:
        # The search is not exhaustive: under other times it may miss the partitions that fit. One is known.
        logger.warning("no plan from measured times fits, so the counted one stays: %s", error)
        return counted


def given_plan(
    engine: EngineTable, num_layers: int
) -> tuple[tuple[Partition, int] | None, int | None, KeptNames | None]:
    """Return what `engine.plan` gives, a table or the path of a plan.json, and `engine.stale_layers`.

    That is the partition with its rounds, the number of stale layers, and what each layer keeps. None is left to the
    planner. A key of the config comes before the file's value. Raises `EngineUsageError` for a file without a plan, and
    for a plan of another number of layers.
    """
    given, kept = engine.plan, None
    stale_layers = None if engine.stale_layers == "auto" else engine.stale_layers
    if given is None:
        return None, stale_layers, None
    if isinstance(given, str):
        try:
            plan = Plan.from_json(Path(given).read_text())
        except (OSError, ValueError) as error:
            raise EngineUsageError(f'engine.plan = "{given}" cannot be read as a plan: {error}') from error
        if stale_layers is None and plan.update == engine.update:
            stale_layers = plan.stale_layers
        partition, rounds = plan.partition, plan.rounds
        kept = plan.kept if engine.keep_activations == "auto" else None
    else:
        rounds = given.rounds or (engine.rounds if isinstance(engine.rounds, int) else 1)
        partition = Partition.from_lists(given.forward, given.fused, given.backward)
    if partition.num_layers != num_layers:
        text = f"the model has {num_layers} (embedding and head included)"
        raise EngineUsageError(f"engine.plan covers {partition.num_layers} layers, {text}")
    return (partition, rounds), stale_layers, kept


def _counted_costs(
    model: LayeredModel,
    config: Config,
    hardware: Hardware,
    bundles: Sequence[Bundle],
    counts: ParameterCounts,
    updates: update_costs.UpdateCosts,
    compiles: bool,
) -> Callable[[int, int, int], Costs]:
    numels, dtype = layer_numels(bundles, len(model.layers)), config.training.dtype
    element_bytes = DTYPES[dtype].itemsize
    every, early, scratch = ([0] * len(model.layers) for _ in range(3))
    # By layer, the matrices that devices orthogonalise for its update.
    matrices: list[list[torch.Size]] = [[] for _ in model.layers]
    for bundle in bundles:
        matrices[bundle.layers[0]] += [parameter.shape for parameter in directed_parameters(bundle)]
        for index in bundle.layers:
            every[index] += bundle.unpacked_numel * element_bytes
            early[index] += bundle.early_numel * element_bytes
            scratch[index] = max(scratch[index], bundle.unpacking_bytes(element_bytes, hardware.kind))
    moving = config.engine.update, element_bytes, element_bytes
    adding_share = updates.adding_share(counts.by_rule, *moving)
    # The plan of an unknown card follows the assumed one's proportions; no time is shown for it.
    device = hardware.spec or ASSUMED_DEVICE
    card = CardRates.of(device, dtype, config.training.fp16_accumulation)
    # Virtual devices and their updates share processors of unknown speed: their costs are proportions.
    is_virtual = hardware.kind == "cpu" or hardware.spec is None
    moved = [0.0] * len(model.layers)
    for count in counts.bundles:
        moved[count.layers[0]] += updates.traffic_bytes(count.by_rule, *moving)

    works_of = cache(partial(layer_works, model, element_bytes, hardware.kind, compiles))

    def costs_for(tokens: int, sequences: int, accumulate_bytes: int) -> Costs:
        works = works_of(tokens, sequences)
        costs = costs_from_work(
            model.names, works, numels, card, element_bytes, accumulate_bytes, () if is_virtual else moved
        )
        layers = tuple(
            with_job(
                replace(card.unpacking(layer, nbytes, scratch_bytes), unpacked_bytes=early_bytes),
                shapes,
                device,
                dtype,
            )
            for layer, shapes, nbytes, early_bytes, scratch_bytes in zip(
                costs.layers, matrices, every, early, scratch, strict=True
            )
        )
        launch_s = 0.0 if hardware.kind == "cpu" else launch_seconds([work.products for work in works])
        return replace(
            costs, layers=layers, shared=counts.shared_layers, adding_share=adding_share, launch_s=launch_s
        )

    return cache(costs_for)  # a report asks for the same lengths many times


def layer_works(
    model: LayeredModel, element_bytes: int, kind: str, compiles: bool, tokens: int, sequences: int
) -> list[LayerWork]:
    works = []
    for layer in model.layers:
        work: LayerWork = layer.work(sequences, tokens, element_bytes, kind)  # type: ignore[operator]
        if compiles and may_compile(layer, tokens * sequences):
            # The layer keeps all its parts or nothing. A compiled backward gives all gradients of its layer at once.
            trained = sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
            workspace_bytes = work.workspace_bytes + trained * element_bytes
            work = replace(kept_whole(work), workspace_bytes=workspace_bytes, keeps_whole=True)
        # As it is packed on its way.
        works.append(replace(work, boundary_bytes=aligned(work.boundary_bytes)))
    return works


def compiles_layers(table: EngineTable, kind: str) -> bool:
    """Compile on `"auto"` where Inductor writes code for the kind. A compiler may still be missing there."""
    return kind_of(kind).compiles if table.compile == "auto" else table.compile


def layer_numels(bundles: Sequence[Bundle], num_layers: int) -> list[tuple[int, int]]:
    """Count the elements of each layer's trained and frozen bundles. A tied one counts in every layer that uses it."""
    found = [[0, 0] for _ in range(num_layers)]
    for bundle in bundles:
        for layer in bundle.layers:
            found[layer][not bundle.trainable] += bundle.numel
    return [(trained, frozen) for trained, frozen in found]


def num_parameters(model: LayeredModel) -> tuple[int, int]:
    unique = {id(parameter): parameter for layer in model.layers for parameter in layer.parameters()}
    trained = sum(parameter.numel() for parameter in unique.values() if parameter.requires_grad)
    return sum(parameter.numel() for parameter in unique.values()), trained


def parameter_counts(
    bundles: Sequence[Bundle], mapped: Collection[str] = (), rule_of: Mapping[str, int] = MappingProxyType({})
) -> ParameterCounts:
    """Count the parameters in the bundles of a model, padding included.

    Parameters named in `mapped` are frozen and counted apart, without padding: files have none. `rule_of` gives the
    update rule of trained ones by stored name; without it all have the first.
    """
    trained, frozen, in_files, packed = [], 0, 0, 0
    for bundle in bundles:
        numels = {parameter.name: parameter.shape.numel() for parameter in bundle.parameters}
        if bundle.trainable:
            by_rule = [0] * (1 + max(rule_of.values(), default=0))
            for name, numel in numels.items():
                by_rule[rule_of.get(name, 0)] += stored_numel(numel)
            trained.append(BundleCount(tuple(by_rule), bundle.layers))
        elif numels.keys() <= set(mapped):
            in_files += sum(numels.values()) if bundle.packed is None else bundle.numel
        elif bundle.packed is not None:
            packed += bundle.numel
        else:
            frozen += bundle.numel
    return ParameterCounts(tuple(trained), frozen, in_files, packed)


def optimizer_costs(
    model: LayeredModel, bundles: Sequence[Bundle], config: Config
) -> tuple[update_costs.UpdateCosts, dict[str, int]]:
    """Ask the run's optimizer what it keeps and moves. Rules that keep and move the same are one.

    Also returns the place in `UpdateCosts.rules` of each trained parameter, by its stored name.
    """
    table, rule_of = config.optimizer, make_optimizer(config.optimizer).rule_of
    trained = {parameter.name for bundle in bundles if bundle.trainable for parameter in bundle.parameters}
    rules = {name: rule_of(facts) for name, facts in parameter_facts(model).items() if name in trained}
    kinds = {name: (rule.values, rule.uses_direction) for name, rule in rules.items()}
    distinct = list(dict.fromkeys(kinds.values())) or [((), False)]

    def costs(state: str) -> update_costs.UpdateCosts:
        kept_bytes = FORMATS[state].element_bytes
        return update_costs.UpdateCosts(
            tuple(
                update_costs.RuleCosts(
                    sum(map(kept_bytes, values)), update_costs.JOB_ELEMENT_BYTES if uses_direction else 0.0
                )
                for values, uses_direction in distinct
            ),
            splits_weights=make_optimizer(table).splits_weights and config.training.dtype == "bfloat16",
            predicts=config.engine.delay_correction != "none" and table.can_predict,
        )

    # The planner names a smaller state where the run's own does not fit.
    smaller = () if table.state == "compact" else ((COMPACT_STATE, costs("compact")),)
    updates = replace(costs(table.state), smaller=smaller)
    return updates, {name: distinct.index(kind) for name, kind in kinds.items()}


def with_job(layer: LayerCost, shapes: Sequence[Sequence[int]], device: DeviceSpec, dtype: str) -> LayerCost:
    """Return a layer whose update orthogonalises matrices of these shapes, or stacks of them, on one device.

    The device computes at its rate in bfloat16, or in `dtype` if it has none there.
    """
    if not shapes:
        return layer
    is_known = update_costs.JOB_DTYPE in device.peak_flops
    card = CardRates.of(device, update_costs.JOB_DTYPE if is_known else dtype)
    return replace(
        layer,
        job_s=card.product_s(sum(update_costs.newton_schulz_flops(shape, STEPS) for shape in shapes)),
        job_link_s=device.hop_s(update_costs.JOB_ELEMENT_BYTES * sum(map(math.prod, shapes))),
        # The matrices take the same memory one after the other.
        job_slot_bytes=max(map(update_costs.slot_bytes, shapes)),
        job_scratch_bytes=max(map(update_costs.scratch_bytes, shapes)),
    )
