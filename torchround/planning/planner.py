"""The planner: the fastest plan within the memory limits, a given partition as a plan, and the reason why nothing fits.

The search for the fastest plan is in `search.py`. The error for a run that does not fit says what is short and by how much.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torchround.planning.choices import fewest_stale_layers, find_stale_plan, keep_activations, keep_on
from torchround.planning.costs import Costs
from torchround.planning.keep_rule import KeepRule
from torchround.planning.memory import (
    MemoryLimits,
    device_memory,
    gib_text,
    size_text,
    stage_bytes,
    stage_compute_bytes,
)
from torchround.planning.partition import Partition, PlanError, StageKind
from torchround.planning.plan import Plan, PlannedStage, kept_before
from torchround.planning.planning_problem import Candidate, PlanningProblem
from torchround.planning.search import (
    AS_FAST,
    MOST_EXHAUSTIVE,
    coarse_partitions,
    find_plan,
    num_partitions,
)
from torchround.planning.update_modes import SYNC, mode_of


class InfeasiblePlanError(ValueError):
    """A run that no plan fits, or not the given one. `least`: the plan of least memory; None if more would not help."""

    def __init__(self, message: str, least: Plan | None = None) -> None:
        super().__init__(message)
        self.least = least


def make_plan(
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    update: str = SYNC.name,
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
    if (problem.limits.host_bytes or 0) < 0:
        raise why_infeasible(problem, choices)  # the state alone does not fit
    if problem.stale_layers is None:
        stale = find_stale_plan(problem, as_fast)
        problem, found = stale or (problem, None)
    else:
        found = find_plan(problem, choices, as_fast)
    if found is None:
        # The search is not exhaustive.
        if problem.stale_layers is None:
            problem = replace(problem, stale_layers=0)
        least = least_candidate(problem, choices)
        if not problem.fits_limits(least):
            raise why_infeasible(problem, choices)
        found = least
    if keep is not None and keep.is_open:
        problem, found = keep_activations(problem, found, choices, as_fast)
    return _plan(problem, found)


def evaluate_plan(
    partition: Partition,
    rounds: int,
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    update: str = SYNC.name,
    limits: MemoryLimits | None = None,
    stale_layers: int | None = None,
    keep: KeepRule | None = None,
) -> Plan:
    """Make a plan of a given partition, however slow. The last arguments and the errors are as in `make_plan`."""
    problem = _problem(costs, num_devices, num_micro_batches, update, limits, stale_layers, keep)
    choices = _rounds_choices(problem, rounds)
    if partition.num_layers != costs.num_layers:
        raise PlanError(f"the plan covers {partition.num_layers} layers, the model has {costs.num_layers}")
    candidate = Candidate(partition, rounds)
    if problem.stale_layers is None:
        problem = replace(problem, stale_layers=fewest_stale_layers(problem, candidate))
    if not problem.fits_limits(candidate):
        raise why_infeasible(problem, choices, partition)
    if keep is not None and keep.is_open:
        problem, candidate = keep_on(problem, candidate, AS_FAST)
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
    if mode_of(update).updates_by_layer and not 0 <= (stale_layers or 0) < costs.num_layers:
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
    num_micro_batches, num_devices = problem.num_micro_batches, problem.num_devices
    if problem.mode.updates_by_layer:
        if rounds not in ("auto", 1):
            raise PlanError(
                f'rounds = {rounds!r} with update = "{problem.mode.name}" must be 1 or "auto": the first gradients would wait for the last'
            )
        return (1,)
    if rounds != "auto":
        if isinstance(rounds, bool) or not isinstance(rounds, int) or not 1 <= rounds <= num_micro_batches:
            raise PlanError(f'rounds = {rounds!r} must be "auto" or 1 to {num_micro_batches} (micro-batches)')
        return (rounds,)
    if num_partitions(problem.num_layers) * num_micro_batches <= MOST_EXHAUSTIVE:
        return tuple(range(1, num_micro_batches + 1))
    useful = {1, 2, 3, 4, num_devices // 2, num_devices, 2 * num_devices, num_micro_batches}
    return tuple(sorted(count for count in useful if 1 <= count <= num_micro_batches))


def _plan(problem: PlanningProblem, candidate: Candidate) -> Plan:
    costs, limits, partition = problem.costs_of(candidate.kept), problem.limits, candidate.partition
    devices, micro_batches, rounds = problem.num_devices, problem.num_micro_batches, candidate.rounds
    step_s, seconds = problem.exact_s(candidate), problem.sums_of(candidate.kept).seconds(partition)
    stages = tuple(
        PlannedStage(
            kind=stage.kind.value,
            first_layer=costs.layers[stage.start].name,
            last_layer=costs.layers[stage.stop - 1].name,
            num_layers=stage.stop - stage.start,
            seconds=early_s + late_s,
            weight_bytes=stage_bytes(stage, costs, "weight_bytes"),
            gradient_bytes=0
            if stage.kind is StageKind.FORWARD
            else stage_bytes(stage, costs, "gradient_bytes"),
            compute_bytes=stage_compute_bytes(stage, costs, limits.recompute),
        )
        for stage, early_s, late_s in zip(partition.stages(), *seconds, strict=True)
    )
    busy_s = micro_batches * sum(stage.seconds for stage in stages) + costs.job_s
    return Plan(
        partition=partition,
        rounds=rounds,
        num_devices=devices,
        num_micro_batches=micro_batches,
        update=problem.mode.name,
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
    """Make the error for `partition`, or for the plan of least memory: what is short, and by how much."""
    limits = problem.limits
    split = problem.num_layers - partition.fused if partition else 0
    if partition and (problem.stale_layers or 0) > split:
        return InfeasiblePlanError(
            f"engine.stale_layers = {problem.stale_layers}: the fused stage of engine.plan begins at layer {split}, and must "
            "begin after all stale layers"
        )
    if partition is not None:
        candidate = Candidate(partition, rounds_choices[0])
    else:
        candidate = least_candidate(problem, rounds_choices)
    plan = _plan(problem, candidate)
    run = problem.num_devices, problem.num_micro_batches, plan.rounds, limits, problem.stale_layers or 0
    device = device_memory(plan.partition, problem.costs_of(0), *run)
    host_bytes = problem.host_bytes(candidate)
    needs = []
    if limits.device_bytes is not None and device.total_bytes > limits.device_bytes:
        note, sizes = f"the most for {device.text(2)}", (device.total_bytes, limits.device_bytes)
        needs.append(_short("each device", "engine.device_memory_gib", *sizes, note))
    if limits.host_bytes is not None and host_bytes > limits.host_bytes:
        state = limits.state_bytes
        note = f"weights, gradients and optimizer state {size_text(state)}" if state else "for activations"
        sizes = state + host_bytes, state + limits.host_bytes
        needs.append(_short("the host", "engine.host_memory_gib", *sizes, note))
    return InfeasiblePlanError("; ".join(needs), plan)


def _short(what: str, key: str, needed: int, allowed: int, note: str) -> str:
    return (
        f"{what} needs {gib_text(needed)} ({note}) and may use {gib_text(allowed)} ({key}): "
        f"{gib_text(needed - allowed)} are missing"
    )


def least_candidate(problem: PlanningProblem, rounds_choices: Sequence[int]) -> Candidate:
    """Return the candidate of least host memory among those that fit a device, or need no more of it than they must."""
    layers, rounds, split = problem.num_layers, max(rounds_choices), problem.stale_layers or 0
    ones, limit = (1,) * (layers - 1), problem.limits.device_bytes
    # Single layers need least of a device; if they keep activations, one fused stage may need less. The most rounds hold the
    # fewest integers.
    extremes = [Partition(ones, 1, ones), *([] if split else [Partition((), layers, ())])]
    least_bytes = min(problem.device_bytes(partition, rounds) for partition in extremes)
    if limit is not None and least_bytes > limit:
        problem = replace(problem, limits=replace(problem.limits, device_bytes=least_bytes))
    candidates = [
        Candidate(partition, rounds)
        for rounds in rounds_choices
        for partition in coarse_partitions(problem, rounds)
        if problem.fits_device(partition, rounds) and layers - partition.fused >= split
    ]
    best = min(candidates, key=problem.host_bytes)
    if problem.limits.host_bytes is None or problem.host_bytes(best) <= problem.limits.host_bytes:
        return best
    uneven = [Candidate(partition, best.rounds) for partition in _around_fused(problem, best.rounds, split)]
    best = min([best, *uneven], key=problem.host_bytes)
    return min(best, _with_joined_stages(problem, best), key=problem.host_bytes)


def _with_joined_stages(problem: PlanningProblem, candidate: Candidate) -> Candidate:
    """Join neighbouring backward stages wherever a device has room, from the deepest one on."""
    partition, rounds, index = candidate.partition, candidate.rounds, 0
    while index + 1 < len(partition.backward):
        joined = partition.joined(index)
        if problem.fits_device(joined, rounds):
            partition = joined
        else:
            index += 1
    return Candidate(partition, rounds)


def _around_fused(problem: PlanningProblem, rounds: int, least_split: int) -> Iterator[Partition]:
    """Yield for each size of the backward stages the partition with the largest fused stage that fits a device.

    Fine forward stages keep nothing on the host, and leave room on a device for the fused stage.
    """
    layers = problem.num_layers
    for size in range(1, layers):

        def cut(fused: int, size: int = size) -> Partition:
            stages, rest = divmod(layers - fused, size)
            return Partition((1,) * (layers - fused), fused, (size,) * stages + ((rest,) if rest else ()))

        def is_too_large(fused: int, cut: Callable[[int], Partition] = cut) -> bool:
            return not problem.fits_device(cut(fused), rounds)

        largest = bisect_left(range(1, layers - max(1, least_split) + 1), True, key=is_too_large)
        if largest:
            yield cut(largest)
