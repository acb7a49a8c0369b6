"""The answers to a user's questions before a run: does it fit, what takes the memory, how fast is it, what to change.

`report_plan` answers a `RunQuestion`. The other functions say more about its plan, each at the cost of further plans or
counts. This module reads no config, no model and no file.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchround.planning.costs import Costs
from torchround.planning.memory import DeviceMemory, HostMemory, device_memory, size_text
from torchround.planning.plan import Plan, layer_names
from torchround.planning.planner import InfeasiblePlanError, evaluate_plan, least_candidate, make_plan
from torchround.planning.planning_problem import Candidate, PlanningProblem
from torchround.planning.run_question import RunQuestion
from torchround.planning.stage_times import KeptLink, LayerSums
from torchround.planning.update_modes import SYNC

# Sequence lengths are tried in multiples of this, up to the limit.
LENGTH_STEP, LONGEST_LENGTH = 1024, 1 << 22
# A shorter length is proposed in steps of a power of two with so many bits less than the length.
LENGTH_BITS = 6
# Changes that are proposed together if none suffices alone.
MOST_TOGETHER = 3


@dataclass(frozen=True)
class PlanReport:
    """The answers about one run. `plan` None: `problem` says what is short, `host` and `device` are the least plan's."""

    question: RunQuestion
    plan: Plan | None
    problem: str
    host: HostMemory
    device: DeviceMemory | None

    @property
    def tokens_per_s(self) -> float | None:
        """Rate predicted from the costs; None if the device is not known or there is no plan."""
        if self.plan is None or not self.plan.step_s or self.question.device is None:
            return None
        return self.question.global_batch_size * self.question.seq_len / self.plan.step_s


def report_plan(question: RunQuestion) -> PlanReport:
    """Answer whether the run fits, by which plan, and what takes the memory."""
    plan, problem, least = None, "", None
    try:
        plan = least = plan_for(question)
    except InfeasiblePlanError as error:
        problem, least = str(error), error.least
    if least is None:
        return PlanReport(question, None, problem, question.state(), None)
    return PlanReport(question, plan, problem, host_memory(question, least), _device(question, least))


def plan_for(question: RunQuestion, costs: Costs | None = None) -> Plan:
    """Return the plan of the run: `given` evaluated, otherwise the best one. Raises `InfeasiblePlanError`.

    A run, its measuring steps, a dry run and the `plan` command all get their plans here, under the same
    limits. `costs` are measured ones; without them they are counted.
    """
    costs = costs or question.costs()
    run = costs, question.num_devices, question.num_micro_batches, question.update
    limits, stale_layers = question.limits(), question.stale_layers
    if question.given is not None:
        partition, rounds = question.given
        plan = evaluate_plan(partition, rounds, *run, limits, stale_layers, question.keep_rule())
    else:
        plan = make_plan(*run, question.rounds, limits, stale_layers=stale_layers, keep=question.keep_rule())
    return replace(plan, stays_uncompiled=question.stays_uncompiled)


def host_memory(question: RunQuestion, plan: Plan) -> HostMemory:
    return replace(
        question.state_of(plan.rounds),
        activation_bytes=plan.host_activation_bytes,
        integer_bytes=question.host_batch().integers_and_losses_bytes(),
        device_bytes=plan.num_devices * plan.device_bytes if question.devices_on_host else 0,
    )


def _device(question: RunQuestion, plan: Plan) -> DeviceMemory:
    costs, sizes = question.costs().keeping(plan.kept), (question.num_devices, question.num_micro_batches)
    return device_memory(plan.partition, costs, *sizes, plan.rounds, question.limits(), plan.stale_layers)


# The link to the host.


def step_transfers(plan: Plan, costs: Costs, gradient_share: float) -> list[tuple[float, float]]:
    """Count the bytes that each stage moves up and down in a step; `gradient_share` as in `KeptLink`."""
    link, micro_batches = KeptLink(math.inf, gradient_share), plan.num_micro_batches
    sums = LayerSums(costs.keeping(plan.kept), "stage", link, micro_batches)
    moved = sums.stage_bytes(plan.partition, plan.rounds, plan.stale_layers)
    return [(micro_batches * up, micro_batches * down) for up, down in zip(*moved, strict=True)]


def link_text(question: RunQuestion, plan: Plan) -> str:
    """Compare a plan's traffic with the links' busier direction: RoundPipe's appendix C. Above 100 % a stage waits."""
    assert question.device is not None, "the card is known"
    moved = step_transfers(plan, question.costs(), question.gradient_bytes / question.accumulate_bytes)
    rate = question.device.pcie_gb_per_s * 1e9
    up, down = (
        sum(way) / (plan.num_devices * plan.step_s * rate or math.inf) for way in zip(*moved, strict=True)
    )
    loads = [
        max(both) / (plan.num_micro_batches * stage.seconds * rate or math.inf)
        for both, stage in zip(moved, plan.stages, strict=True)
    ]
    busiest = loads.index(max(loads))
    stage = plan.stages[busiest]
    return (
        f"PCIe at {question.device.pcie_gb_per_s:g} GB/s each way: {100 * up:.0f} % up, {100 * down:.0f} % down on average; "
        f"{100 * loads[busiest]:.0f} % in the busiest stage, {busiest} ({stage.kind}, {layer_names(stage, stage)})"
    )


def kept_text(question: RunQuestion, plan: Plan) -> str:
    """Say what a plan keeps of a micro-batch and on the host at once, and the seconds that it saves; empty for nothing."""
    if not plan.kept:
        return ""
    costs = question.costs().keeping(())
    batch, run = question.host_batch(), (plan.num_devices, plan.update, plan.stale_layers)
    kept, nothing = (
        batch.boundary_bytes(plan.partition, plan.rounds, *run, names) for names in (plan.kept, ())
    )
    whole_s = sum(map(sum, LayerSums(costs, question.recompute).seconds(plan.partition)))
    saved_s = whole_s - sum(stage.seconds for stage in plan.stages)
    of_device_s = plan.num_micro_batches * saved_s / plan.num_devices
    return (
        f"kept activations: {size_text(sum(costs.keeping(plan.kept).values('kept_bytes')))} per micro-batch each way, "
        f"{size_text(kept - nothing)} of the host at once"
        + ("" if question.device is None else f"; saves {of_device_s:.4g} s of each device's step")
    )


# What fits.


def fits(question: RunQuestion) -> bool:
    """Check whether some plan, or the given one, keeps within all limits.

    The partition of single layers needs least of a device, and the ones with the fullest stages least of the host. The
    planner has to search for one in between only if both limits are tight and none of them fits.
    """
    if question.host_bytes is not None and question.state().state_bytes > question.host_bytes:
        return False
    if question.given is None:
        device_bytes, host_bytes = missing_bytes(question)
        if device_bytes or not host_bytes:
            return not device_bytes
    try:
        plan_for(question.without_choice())
    except InfeasiblePlanError:
        return False
    return True


def missing_bytes(question: RunQuestion) -> tuple[int, int]:
    """Return what the plan of least memory lacks of each device, and of the host; 0 if it fits there."""
    limits, costs = question.limits(), question.costs()
    costs = costs.keeping(question.keep_rule().fixed(costs))
    run = costs, question.num_devices, question.num_micro_batches, question.update
    problem = PlanningProblem(*run, limits, question.stale_layers)
    rounds = question.fixed_rounds
    choices = (1, question.num_micro_batches) if rounds is None else (rounds,)
    least = Candidate(*question.given) if question.given else least_candidate(problem, choices)
    device_bytes, host_bytes = problem.device_bytes(least.partition, least.rounds), problem.host_bytes(least)
    return (
        0 if limits.device_bytes is None else max(0, device_bytes - limits.device_bytes),
        0 if limits.host_bytes is None else max(0, host_bytes - limits.host_bytes),
    )


def longest_tokens(question: RunQuestion) -> int:
    """Find the longest sequence that fits with one sequence per micro-batch and a batch of one per device; 0 if none does."""
    batch = question.num_devices * question.machines.count
    shortest = replace(question, micro_batch_size=1, global_batch_size=batch, rounds=1, given=None)
    return _first_that_fits(shortest, "seq_len", range(LONGEST_LENGTH, -1, -LENGTH_STEP))


def _first_that_fits(question: RunQuestion, name: str, values: Sequence[int]) -> int:
    """Return the first value of a field with which the run fits, otherwise the last; values need ever less memory."""

    def is_fitting(value: int) -> bool:
        change: dict[str, Any] = {name: value}
        return fits(replace(question, **change))

    return values[bisect_left(values, True, hi=len(values) - 1, key=is_fitting)]


def changes_that_fit(question: RunQuestion) -> Iterator[str]:
    """Yield changes of the config that make a run fit, the smallest first; several together if none suffices alone."""
    found = False
    for setting, changed in _changes(question):
        if fits(changed):
            found = True
            yield setting
    if not found:
        yield from _together(question)


def _together(question: RunQuestion) -> Iterator[str]:
    """Combine up to `MOST_TOGETHER` changes, each the one that leaves least missing."""
    settings: dict[str, str] = {}  # by key
    left = _missing_share(question)
    while len(settings) < MOST_TOGETHER:
        ranked = [
            (_missing_share(changed), number, setting, changed)
            for number, (setting, changed) in enumerate(_changes(question))
        ]
        if not ranked or min(ranked)[0] >= left:
            return
        left, _, setting, question = min(ranked)
        settings[setting.partition(" = ")[0]] = setting
        if fits(question):
            yield " and ".join(settings.values())
            return


def _missing_share(question: RunQuestion) -> float:
    """Add up the missing memory of a device and of the host, each as a share of what is allowed."""
    limits = question.device_bytes, question.host_bytes
    return sum(
        missing / limit for missing, limit in zip(missing_bytes(question), limits, strict=True) if limit
    )


def _changes(question: RunQuestion) -> Iterator[tuple[str, RunQuestion]]:
    """Yield changes that need less memory, the ones that change least first; none that is in force already."""

    def less(key: str, values: Sequence[int]) -> tuple[str, RunQuestion]:
        name = key.partition(".")[2]
        change: dict[str, Any] = {name: _first_that_fits(question, name, values)}
        return f"{key} = {change[name]}", replace(question, **change)

    if question.given is not None:
        yield "engine.plan left out", replace(question, given=None)
    if question.keep_activations not in ("auto", "none"):
        yield 'engine.keep_activations = "none"', replace(question, keep_activations="none", given_kept=None)
    if question.micro_batch_size > 1:
        yield less("training.micro_batch_size", _halves(question.micro_batch_size, 1))
    rounds, most = question.fixed_rounds, question.num_micro_batches
    if rounds is not None and rounds < most and not question.mode.updates_by_layer:
        yield less("engine.rounds", sorted({min(rounds << n, most) for n in range(1, most.bit_length() + 1)}))
    if question.accumulate_bytes > 2:
        yield 'engine.accumulate_dtype = "bfloat16"', replace(question, accumulate_bytes=2)
    for setting, updates in question.updates.smaller:
        changed = replace(question, updates=updates)
        if changed.state().state_bytes < question.state().state_bytes:
            yield setting, changed
    if question.mode != SYNC:
        yield f'engine.update = "{SYNC.name}"', replace(question, update=SYNC.name)
    # Each round of each machine has a micro-batch.
    least = (rounds or 1) * question.micro_batch_size * question.machines.count
    if question.global_batch_size > least:
        yield less("training.global_batch_size", _halves(question.global_batch_size, least))
    step = 1 << max(0, question.seq_len.bit_length() - LENGTH_BITS)
    # A length below a quarter would be another training.
    lengths = [
        steps * step for steps in range((question.seq_len - 1) // step, question.seq_len // 4 // step - 1, -1)
    ]
    if lengths and lengths[-1]:
        yield less("training.seq_len", lengths)


def _halves(value: int, least: int) -> list[int]:
    """List halves of a value, quarters and so on, down to `least`."""
    return [value >> n for n in range(1, value.bit_length()) if value >> n >= least] or [least]
