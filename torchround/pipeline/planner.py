"""The planner: the fastest plan within the memory limits, a given partition as a plan, and the reason why nothing fits.

The search for the fastest plan is in `search/`. The error for a plan that does not fit names the layer that
needs most, the GiB that are short, and the config keys that would help.
"""

from collections.abc import Iterable, Sequence

from torchround.pipeline.costs import Costs, stage_seconds
from torchround.pipeline.keep_rule import KeepRule
from torchround.pipeline.memory import (
    GIB,
    DeviceMemory,
    MemoryLimits,
    device_memory,
    size_text,
    stage_compute_bytes,
    stage_gradient_bytes,
    stage_weight_bytes,
)
from torchround.pipeline.partition import Partition, PlanError
from torchround.pipeline.plan import Plan, PlannedStage, kept_before
from torchround.pipeline.search.annealing import (
    AS_FAST,
    MOST_EXHAUSTIVE,
    coarse_partitions,
    find_plan,
    num_partitions,
)
from torchround.pipeline.search.choices import (
    fewest_stale_layers,
    find_stale_plan,
    keep_activations,
    keep_on,
)
from torchround.pipeline.search.planning_problem import Candidate, PlanningProblem

DEVICE_KEYS = {
    "weights_bytes": ("engine.device_memory_gib", "model.flavor"),
    "gradients_bytes": ("engine.accumulate_dtype", "lora.rank"),
    "staging_bytes": ("training.micro_batch_size", "training.seq_len"),
    "integers_bytes": ("engine.rounds",),
    "compute_bytes": ("training.micro_batch_size", "training.seq_len"),
    "kept_bytes": ("engine.keep_activations",),
    "constant_bytes": ("engine.device_memory_gib",),
    "job_bytes": ("optimizer.name",),
}
# Config keys that need less of the host; `DEVICE_KEYS` has
# those that need less of a device, by kind of its memory.
HOST_KEYS = ("training.global_batch_size", "engine.rounds", "training.seq_len")
UPDATES = ("sync", "async", "bounded")


class InfeasiblePlanError(ValueError):
    """No partition fits, or the given one does not.

    - `layer`: the layer that needs most.
    - `missing_gib`: the memory that is short.
    - `keys`: config keys, or changes of them, that would help.
    """

    def __init__(self, message: str, layer: str, missing_gib: float, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.layer, self.missing_gib, self.keys = layer, missing_gib, keys


def make_plan(
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    update: str = "sync",
    rounds: int | str = "auto",
    limits: MemoryLimits | None = None,
    as_fast: float = AS_FAST,
    stale_layers: int | None = None,
    keep: KeepRule | None = None,
) -> Plan:
    """Make the plan of least host memory among those within `limits` that are about as fast as the fastest.

    Those take at most the share `as_fast` longer; with 0 the plan is the fastest. `stale_layers` is the number of them in
    `bounded`; None chooses the smallest that costs no time. `keep` says what may be kept; without it `costs` say what is.
    Raises `InfeasiblePlanError`, or `PlanError` for bad arguments.
    """
    problem = _problem(costs, num_devices, num_micro_batches, update, limits, stale_layers, keep)
    choices = _rounds_choices(problem, rounds)
    if problem.stale_layers is None:
        stale = find_stale_plan(problem, as_fast)
        problem, found = stale or (problem, None)
    else:
        found = find_plan(problem, choices, as_fast)
    if found is None:
        raise why_infeasible(problem, choices)
    if keep is not None and keep.is_open:
        problem, found = keep_activations(problem, found, choices, as_fast)
    return _plan(problem, found)


def evaluate_plan(
    partition: Partition,
    rounds: int,
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    update: str = "sync",
    limits: MemoryLimits | None = None,
    stale_layers: int | None = None,
    keep: KeepRule | None = None,
) -> Plan:
    """Make a plan of a given partition, however slow. The last two arguments and the errors are as in `make_plan`."""
    problem = _problem(costs, num_devices, num_micro_batches, update, limits, stale_layers, keep)
    choices = _rounds_choices(problem, rounds)
    if partition.num_layers != costs.num_layers:
        raise PlanError(f"the plan covers {partition.num_layers} layers, the model has {costs.num_layers}")
    candidate = Candidate(partition, rounds)
    if problem.stale_layers is None:
        problem = problem.with_stale_layers(fewest_stale_layers(problem, candidate))
    if not problem.fits_limits(candidate):
        raise why_infeasible(problem, choices, partition)
    if keep is not None and keep.is_open:
        problem, candidate = keep_on(problem, candidate)
    return _plan(problem, candidate)


def _problem(
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    update: str,
    limits: MemoryLimits | None,
    stale_layers: int | None,
    keep: KeepRule | None,
) -> PlanningProblem:
    if num_devices < 1 or num_micro_batches < 1:
        raise PlanError(
            f"{num_devices} devices and {num_micro_batches} micro-batches must both be at least 1"
        )
    if update not in UPDATES:
        raise PlanError(f"update = {update!r} must be one of {UPDATES}")
    if update != "bounded":
        stale_layers = 0
    elif stale_layers is not None and not 0 <= stale_layers < costs.num_layers:
        raise PlanError(
            f"engine.stale_layers = {stale_layers}; legal: 0 to {costs.num_layers - 1}, the layers before the last"
        )
    if keep is not None:
        costs = costs.keeping(keep.fixed(costs))
    return PlanningProblem(
        *(costs, num_devices, num_micro_batches, update, limits or MemoryLimits(), stale_layers),
        link=None if keep is None else keep.link,
    )


def _rounds_choices(problem: PlanningProblem, rounds: int | str) -> tuple[int, ...]:
    """List the numbers of rounds to search: all for a small model, otherwise a few that can be useful.

    Few rounds keep uploads rare. A number near the devices lets whole rounds run beside each other. Steps of `bounded`
    have one round: with more, the first gradients of a step would wait for the last.
    """
    num_layers, num_micro_batches, num_devices = (
        problem.num_layers,
        problem.num_micro_batches,
        problem.num_devices,
    )
    if problem.update == "bounded":
        if rounds not in ("auto", 1):
            raise PlanError(f'rounds = {rounds!r} with update = "bounded" must be 1 or "auto"')
        return (1,)
    if rounds != "auto":
        if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= num_micro_batches:
            raise PlanError(f'rounds = {rounds!r} must be "auto" or 1 to {num_micro_batches} (micro-batches)')
        return (rounds,)
    if num_partitions(num_layers) * num_micro_batches <= MOST_EXHAUSTIVE:
        return tuple(range(1, num_micro_batches + 1))
    useful = {1, 2, 3, 4, num_devices // 2, num_devices, 2 * num_devices, num_micro_batches}
    return tuple(sorted(count for count in useful if 1 <= count <= num_micro_batches))


def _plan(problem: PlanningProblem, candidate: Candidate) -> Plan:
    costs, limits, partition = problem.costs_of(candidate.kept), problem.limits, candidate.partition
    devices, micro_batches, rounds = problem.num_devices, problem.num_micro_batches, candidate.rounds
    step_s = problem.exact_s(candidate)
    stages = tuple(
        PlannedStage(
            kind=stage.kind.value,
            first_layer=costs.layers[stage.start].name,
            last_layer=costs.layers[stage.stop - 1].name,
            num_layers=stage.stop - stage.start,
            seconds=sum(stage_seconds(costs, stage, limits.recompute)),
            weight_bytes=stage_weight_bytes(stage, costs),
            gradient_bytes=stage_gradient_bytes(stage, costs),
            compute_bytes=stage_compute_bytes(stage, costs, limits.recompute),
        )
        for stage in partition.stages()
    )
    busy_s = micro_batches * sum(stage.seconds for stage in stages) + costs.job_s
    return Plan(
        partition=partition,
        rounds=rounds,
        num_devices=devices,
        num_micro_batches=micro_batches,
        update=problem.update,
        stale_layers=problem.stale_layers or 0,
        step_s=step_s,
        bubble=max(0.0, 1 - busy_s / (devices * step_s)) if step_s else 0.0,
        device_bytes=problem.device_bytes(partition, rounds, candidate.kept),
        host_activation_bytes=problem.boundary_bytes(candidate),
        stages=stages,
        kept=kept_before(partition, costs.kept),
    )


def why_infeasible(
    problem: PlanningProblem, rounds_choices: Sequence[int], partition: Partition | None = None
) -> InfeasiblePlanError:
    """Make the error for `partition`, or for the finest partition, which needs least of a device."""
    ones = (1,) * (problem.num_layers - 1)
    finest = Partition(ones, 1, ones)
    chosen = partition or finest
    if (stale_layers := problem.stale_layers or 0) > problem.num_layers - chosen.fused:
        return InfeasiblePlanError(
            f"{stale_layers} stale layers need a fused stage that begins after them, and the given plan's begins at "
            f"layer {problem.num_layers - chosen.fused}. What would help: a smaller engine.stale_layers, or another "
            "engine.plan",
            *(problem.costs.layers[stale_layers].name, 0.0, ("engine.stale_layers", "engine.plan")),
        )
    # The most rounds have the fewest micro-batches each, and so need the least memory for integers.
    size = problem.limits.micro_batches_at_once(problem.num_micro_batches, max(rounds_choices))
    needed = device_memory(chosen, problem.costs, problem.num_devices, size, problem.limits, stale_layers)
    limit = problem.limits.device_bytes
    if limit is not None and needed.total_bytes > limit:
        return _device_error(problem.costs, needed, limit, given=partition is not None)
    candidates = [partition] if partition else coarse_partitions(problem, max(rounds_choices))
    return _host_error(problem, rounds_choices, candidates)


def _device_error(costs: Costs, needed: DeviceMemory, limit: int, given: bool) -> InfeasiblePlanError:
    missing_gib = (needed.total_bytes - limit) / GIB
    largest = max(
        costs.layers,
        key=lambda layer: (
            2 * (layer.weight_bytes + layer.gradient_bytes) + layer.activation_bytes + layer.workspace_bytes
        ),
    )
    parts = {
        "weights_bytes": f"{needed.weights_bytes / GIB:.3g} for the weights of two stages",
        "gradients_bytes": f"{needed.gradients_bytes / GIB:.3g} for their gradients",
        "staging_bytes": f"{needed.staging_bytes / GIB:.3g} for activations on their way",
        "integers_bytes": f"{needed.integers_bytes / GIB:.3g} for tokens and labels",
        "compute_bytes": f"{needed.compute_bytes / GIB:.3g} for activations and workspace",
    }
    if needed.kept_bytes:
        parts["kept_bytes"] = f"{needed.kept_bytes / GIB:.3g} for kept activations on their way"
    if needed.constant_bytes:
        parts["constant_bytes"] = f"{needed.constant_bytes / GIB:.3g} for constant buffers of the model"
    if needed.job_bytes:
        parts["job_bytes"] = f"{needed.job_bytes / GIB:.3g} for matrices of the optimizer on their way"
    by_size = sorted(parts, key=lambda kind: -getattr(needed, kind))
    keys = ("engine.plan",) if given else _keys(key for kind in by_size[:2] for key in DEVICE_KEYS[kind])
    if needed.kept_bytes:
        keys = _keys(("engine.keep_activations", *keys))
    subject = "the given plan" if given else f"layer {largest.name}, a stage of its own,"
    message = (
        f"{subject} needs {needed.total_bytes / GIB:.3g} GiB of a device that may use {limit / GIB:.3g} GiB: "
        f"{missing_gib:.3g} GiB are missing ({', '.join(parts[kind] for kind in by_size)}). "
        f"What would help: {', '.join(keys)}"
    )
    return InfeasiblePlanError(message, largest.name, missing_gib, keys)


def _host_error(
    problem: PlanningProblem, rounds_choices: Sequence[int], candidates: Sequence[Partition]
) -> InfeasiblePlanError:
    limit = problem.limits.host_bytes
    assert limit is not None, "what fits every limit is not infeasible"
    needed, stages = min(
        (problem.host_bytes(Candidate(chosen, rounds)), chosen.num_stages)
        for chosen in candidates
        for rounds in rounds_choices
    )
    largest = max(problem.costs.layers, key=lambda layer: layer.boundary_bytes)
    missing_gib = (needed - limit) / GIB
    besides = " and the virtual devices" if problem.limits.devices_on_host else ""
    keys = (*HOST_KEYS, *problem.limits.host_changes)
    if problem.costs.kept:
        besides, keys = f", those that layers keep{besides}", ("engine.keep_activations", *keys)
    message = (
        f"the activations between {stages} stages{besides} need {size_text(needed)} of host memory and "
        f"{size_text(limit)} are left for them: {size_text(needed - limit)} are missing (the output of layer "
        f"{largest.name} is the largest, {size_text(largest.boundary_bytes)} per micro-batch). "
        f"What would help: {', '.join(keys)}"
    )
    return InfeasiblePlanError(message, largest.name, missing_gib, keys)


def _keys(names: Iterable[str]) -> tuple[str, ...]:
    """Drop repeated names, keep the order."""
    return tuple(dict.fromkeys(names))
