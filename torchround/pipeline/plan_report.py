"""The answers to a user's questions before a run: does it fit, what takes the memory, how fast is it, what to change.

`report_plan` answers a `RunQuestion`. This module reads no config, no model and no file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torchround.pipeline.costs import Costs
from torchround.pipeline.kept_report import KeptReport, report_kept
from torchround.pipeline.memory import DeviceMemory, HostMemory, device_memory
from torchround.pipeline.plan import Plan, Transfers, micro_batches_to_hide, plan_transfers
from torchround.pipeline.planner import InfeasiblePlanError, evaluate_plan, least_candidate, make_plan
from torchround.pipeline.run_question import RunQuestion
from torchround.pipeline.search.planning_problem import Candidate, PlanningProblem

# Sequence lengths are tried in multiples of this, up to the limit.
LENGTH_STEP, LONGEST_LENGTH = 1024, 1 << 22
# A shorter length is proposed in steps of a power of two with so many bits less than the length.
LENGTH_BITS = 6
# Changes that are proposed together if none suffices alone.
MOST_TOGETHER = 3
# The least gain in step time that a report mentions.
CLEARLY_FASTER = 0.03


@dataclass(frozen=True)
class ConfigChange:
    """A change of the config that makes steps shorter, and the share of a step that it saves."""

    setting: str
    gain: float
    basis: str = ""

    def __str__(self) -> str:
        return f"{self.setting} would take {100 * self.gain:.0f} % less time per step{self.basis}"


@dataclass(frozen=True)
class PlanReport:
    """The answers about one run.

    `plan` is None if the run does not fit. Then `problem` says what is short, and `host` and `device` are those of the plan
    that needs least. `faster` lists changes that would make steps clearly shorter. `longest_tokens` is the longest sequence
    that fits, `longest_by_16_bits` that with sums of gradients in 16 bits.
    """

    question: RunQuestion
    plan: Plan | None
    problem: str
    host: HostMemory
    device: DeviceMemory | None
    transfers: Transfers | None
    micro_batches_to_hide: float | None
    longest_tokens: int
    longest_by_16_bits: int
    faster: tuple[ConfigChange, ...]
    kept: KeptReport | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Rate predicted from the costs; None if the device is not known or there is no plan."""
        if self.plan is None or not self.plan.step_s or self.question.device is None:
            return None
        return self.question.global_batch_size * self.question.seq_len / self.plan.step_s


def report_plan(question: RunQuestion) -> PlanReport:
    """Answer the question."""
    costs, problem = question.costs(), ""
    plan: Plan | None = None
    least: Plan | None = None
    try:
        plan = least = plan_for(question, costs)
    except InfeasiblePlanError as error:
        problem, least = str(error), error.least
    longest, sums_in_16_bits = longest_tokens(question), question.accumulate_bytes <= 2
    return PlanReport(
        question=question,
        plan=plan,
        problem=problem,
        host=question.state() if least is None else host_memory(question, least),
        device=None if least is None else _device(question, costs, least),
        transfers=_transfers(question, costs, plan),
        micro_batches_to_hide=_to_hide(question, costs),
        longest_tokens=longest,
        longest_by_16_bits=longest
        if sums_in_16_bits
        else longest_tokens(replace(question, accumulate_bytes=2)),
        faster=() if plan is None else tuple(_faster(question, plan)),
        kept=None if plan is None else report_kept(question, plan, costs),
    )


def plan_for(question: RunQuestion, costs: Costs | None = None) -> Plan:
    """Return the plan of the run: `given` evaluated, otherwise the best one. Raises `InfeasiblePlanError`.

    A run, its measuring steps, a dry run and the `plan` command all get their plans here, under the same
    limits. `costs` are measured ones; without them they are counted.
    """
    costs = costs or question.costs()
    run = costs, question.num_devices, question.num_micro_batches, question.update
    limits, as_fast, stale_layers = question.limits(), question.slower_for_memory, question.stale_layers
    if question.given is not None:
        partition, rounds = question.given
        return evaluate_plan(partition, rounds, *run, limits, stale_layers, question.keep_rule(), as_fast)
    return make_plan(*run, question.rounds, limits, as_fast, stale_layers, question.keep_rule())


def host_memory(question: RunQuestion, plan: Plan) -> HostMemory:
    """Count the host memory of a run by kind."""
    return replace(
        question.state_of(plan.rounds),
        activation_bytes=plan.host_activation_bytes,
        integer_bytes=question.host_batch().integers_and_losses_bytes(),
        device_bytes=plan.num_devices * plan.device_bytes if question.devices_on_host else 0,
    )


def _device(question: RunQuestion, costs: Costs, plan: Plan) -> DeviceMemory:
    limits = question.limits()
    size = limits.micro_batches_at_once(question.num_micro_batches, plan.rounds)
    kept = costs.keeping(plan.kept)
    return device_memory(plan.partition, kept, question.num_devices, size, limits, plan.stale_layers)


def _transfers(question: RunQuestion, costs: Costs, plan: Plan | None) -> Transfers | None:
    if plan is None or question.device is None:
        return None
    share = question.gradient_bytes / question.accumulate_bytes
    return plan_transfers(plan, costs, question.device.pcie_gb_per_s, question.recompute, share)


def best_mode(question: RunQuestion, plan: Plan) -> ConfigChange | None:
    """Return the choice of rounds or update mode that makes steps shortest; None if none is clearly faster than `plan`."""
    if question.given is not None:
        return None
    return max(_shorter(question, plan, _modes(question)), key=lambda change: change.gain, default=None)


def _modes(question: RunQuestion) -> list[tuple[str, RunQuestion]]:
    return [
        ('engine.rounds = "auto"', replace(question, rounds="auto")),
        ('engine.update = "async"', replace(question, update="async")),
    ]


def _faster(question: RunQuestion, plan: Plan) -> Iterator[ConfigChange]:
    """Try changes that keep the step's batch, each alone; yield those that make steps clearly shorter."""
    alternatives = [*_modes(question), ('engine.recompute = "layer"', replace(question, recompute="layer"))]
    for size in (question.micro_batch_size // 2, question.micro_batch_size * 2):
        if 1 <= size <= question.global_batch_size:
            changed = replace(question, micro_batch_size=size)
            alternatives.append((f"training.micro_batch_size = {size}", changed))
    # The other changes would leave the given plan in place, which was made for other costs.
    if question.given is not None:
        alternatives = [("engine.plan left out", replace(question, given=None))]
    yield from _shorter(question, plan, alternatives)


def _shorter(
    question: RunQuestion, plan: Plan, alternatives: Iterable[tuple[str, RunQuestion]]
) -> Iterator[ConfigChange]:
    """Yield the changes that make steps clearly shorter."""
    # Compared without a choice of what to keep: with one, each of these plans would take seconds.
    before_s = (
        plan.step_s if question.without_choice() == question else plan_for(question.without_choice()).step_s
    )
    basis = "" if question.device is not None else ", if time is in proportion to counted work"
    for setting, changed in alternatives:
        # A change that alters nothing, or that does not fit, is no advice.
        if changed == question or not fits(changed):
            continue
        gain = 1 - plan_for(changed.without_choice()).step_s / before_s if before_s else 0.0
        if gain > CLEARLY_FASTER:
            yield ConfigChange(setting, gain=gain, basis=basis)


def _to_hide(question: RunQuestion, costs: Costs) -> float | None:
    """Return the micro-batches per round that hide the upload of the layer that needs most of them.

    Layers without work are left out: nothing is computed that could hide their upload.
    """
    if question.device is None:
        return None
    rate = question.device.pcie_gb_per_s
    return max(
        (micro_batches_to_hide(layer, rate) for layer in costs.layers if layer.forward_s), default=None
    )


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
    stale_layers = question.stale_layers if question.update == "bounded" else 0
    run = costs, question.num_devices, question.num_micro_batches, question.update
    problem = PlanningProblem(*run, limits, stale_layers)
    rounds = question.fixed_rounds
    choices = (1, question.num_micro_batches) if rounds is None else (rounds,)
    least = Candidate(*question.given) if question.given else least_candidate(problem, choices)
    needed = problem.device_bytes(least.partition, least.rounds), problem.host_bytes(least)
    allowed = limits.device_bytes, limits.host_bytes
    device, host = (
        0 if most is None else max(0, nbytes - most) for nbytes, most in zip(needed, allowed, strict=True)
    )
    return device, host


def longest_tokens(question: RunQuestion) -> int:
    """Find the longest sequence that fits with one sequence per micro-batch and a batch of one per device; 0 if none does."""
    shortest = replace(
        question,
        micro_batch_size=1,
        global_batch_size=question.num_devices * question.machines.count,
        rounds=1,
        given=None,
    )
    longer = LENGTH_STEP
    while longer < LONGEST_LENGTH and fits(replace(shortest, seq_len=longer)):
        longer *= 2
    if longer == LENGTH_STEP:
        return 0
    return _longest_that_fits(shortest, longer // 2, longer, LENGTH_STEP)


def _longest_that_fits(question: RunQuestion, fitting: int, most: int, step: int) -> int:
    """Return the longest sequence below `most`, in multiples of `step`, with which a run fits: at least `fitting`."""
    # Memory grows with the length.
    low, high = fitting // step, -(-most // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(replace(question, seq_len=middle * step)) else (low, middle)
    return low * step


def changes_that_fit(question: RunQuestion) -> Iterator[str]:
    """Yield changes of the config with each of which a run fits that does not; several together if no change suffices.

    The ones that change least come first.
    """
    found = False
    for setting, changed in _changes(question):
        if fits(changed):
            found = True
            yield setting
    if not found:
        yield from _together(question)


def _together(question: RunQuestion) -> Iterator[str]:
    """Combine up to `MOST_TOGETHER` changes, each the one that leaves least missing."""
    settings: list[str] = []
    left = _missing_share(question)
    while len(settings) < MOST_TOGETHER:
        ranked = [
            (_missing_share(changed), number, setting, changed)
            for number, (setting, changed) in enumerate(_changes(question))
        ]
        if not ranked or min(ranked)[0] >= left:
            return
        left, _, setting, question = min(ranked)
        settings.append(setting)
        if fits(question):
            yield " and ".join(settings)
            return


def _missing_share(question: RunQuestion) -> float:
    """Return the missing memory of a device and of the host, each as a share of what is allowed."""
    limits = question.device_bytes, question.host_bytes
    return sum(
        missing / limit for missing, limit in zip(missing_bytes(question), limits, strict=True) if limit
    )


def _changes(question: RunQuestion) -> Iterator[tuple[str, RunQuestion]]:
    """Yield changes that need less memory, the ones that change least first; none that is in force already."""
    if question.given is not None:
        yield "engine.plan left out", replace(question, given=None)
    if question.keep_activations not in ("auto", "none"):
        yield 'engine.keep_activations = "none"', replace(question, keep_activations="none", given_kept=None)
    if question.micro_batch_size > 1:
        yield _halved(question, "micro_batch_size", 1)
    rounds, most = question.fixed_rounds, question.num_micro_batches
    # Steps of `bounded` have one round.
    if rounds is not None and rounds < most and question.update != "bounded":
        values = [*(rounds << n for n in range(1, most.bit_length()) if rounds << n < most), most]
        more = _first_that_fits(question, "rounds", values)
        yield f"engine.rounds = {more}", replace(question, rounds=more)
    if question.accumulate_bytes > 2:
        yield 'engine.accumulate_dtype = "bfloat16"', replace(question, accumulate_bytes=2)
    yield from question.smaller_states()
    if question.update != "sync":
        yield 'engine.update = "sync"', replace(question, update="sync")
    # Each round of each machine has a micro-batch.
    least = (rounds or 1) * question.micro_batch_size * question.machines.count
    if question.global_batch_size > least:
        yield _halved(question, "global_batch_size", least)
    # A length below a quarter would be another training.
    step = 1 << max(0, question.seq_len.bit_length() - LENGTH_BITS)
    length = _longest_that_fits(question, question.seq_len // 4, question.seq_len, step)
    if 0 < length < question.seq_len:
        yield f"training.seq_len = {length}", replace(question, seq_len=length)


def _halved(question: RunQuestion, key: str, least: int) -> tuple[str, RunQuestion]:
    """Halve a number of `[training]` until the run fits, or down to `least`."""
    value = getattr(question, key)
    values = [value >> n for n in range(1, value.bit_length()) if value >> n >= least] or [least]
    value = _first_that_fits(question, key, values)
    changed: dict[str, Any] = {key: value}
    return f"training.{key} = {value}", replace(question, **changed)


def _first_that_fits(question: RunQuestion, key: str, values: list[int]) -> int:
    """Return the first value with which the run fits; otherwise the last one."""
    changes: Iterator[dict[str, Any]] = ({key: value} for value in values)
    fitting = (change[key] for change in changes if fits(replace(question, **change)))
    return next(fitting, values[-1])
