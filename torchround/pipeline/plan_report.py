"""The answers to a user's questions before a run: does it fit, what takes the memory, how fast is it, what to change.

`report_plan` answers a `RunQuestion`. This module reads no config, no model and no file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from torchround.pipeline.costs import Costs, ParameterCounts
from torchround.pipeline.kept_report import KeptReport, report_kept
from torchround.pipeline.memory import (
    GIB,
    DeviceMemory,
    HostMemory,
    device_memory,
    size_text,
)
from torchround.pipeline.plan import Plan, Transfers, micro_batches_to_hide, plan_transfers
from torchround.pipeline.planner import InfeasiblePlanError, evaluate_plan, make_plan
from torchround.pipeline.run_question import RunQuestion
from torchround.pipeline.search.annealing import coarse_partitions
from torchround.pipeline.search.planning_problem import Candidate, PlanningProblem

# Sequence lengths are tried in multiples of this, up to the limit.
LENGTH_STEP, LONGEST_LENGTH = 1024, 1 << 22
# What makes the buffers of the data loader smaller.
OF_DATA = "a smaller training.seq_len, training.global_batch_size or data.shuffle_sequences"
# The least gain in step time that a report mentions.
CLEARLY_FASTER = 0.03


@dataclass(frozen=True)
class ConfigChange:
    """One change of the config: whether the run fits with it alone, and the share of a step that it saves."""

    setting: str
    fits: bool = True
    gain: float = 0.0
    basis: str = ""

    def __str__(self) -> str:
        return f"{self.setting} would take {100 * self.gain:.0f} % less time per step{self.basis}"


@dataclass(frozen=True)
class PlanReport:
    """The answers about one run.

    `plan` is None if the run does not fit; then `problem` says why and `changes` lists what could help.
    `faster` lists changes that would make steps clearly shorter.
    """

    question: RunQuestion
    plan: Plan | None
    problem: str
    host: HostMemory
    device: DeviceMemory | None
    transfers: Transfers | None
    micro_batches_to_hide: float | None
    longest_tokens: int
    changes: tuple[ConfigChange, ...]
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
    costs, plan, problem = question.costs(), None, ""
    try:
        plan = plan_for(question, costs)
    except InfeasiblePlanError as error:
        problem = str(error)
    return PlanReport(
        question=question,
        plan=plan,
        problem=problem,
        host=host_memory(question, plan),
        device=_device(question, costs, plan),
        transfers=_transfers(question, costs, plan),
        micro_batches_to_hide=_to_hide(question, costs),
        longest_tokens=longest_tokens(question),
        changes=() if plan else tuple(_changes(question)),
        faster=() if plan is None else tuple(_faster(question, plan)),
        kept=None if plan is None else report_kept(question, plan, costs),
    )


def plan_for(question: RunQuestion, costs: Costs | None = None) -> Plan:
    """Return the plan of the run: `given` evaluated, otherwise the best one. Raises `InfeasiblePlanError`.

    A run, its measuring steps, a dry run and the `plan` command all get their plans here, under the same
    limits. `costs` are measured ones; without them they are counted.
    """
    if (problem := _state_problem(question)) is not None:
        raise problem
    costs = costs or question.costs()
    run = costs, question.num_devices, question.num_micro_batches, question.update
    limits, stale_layers = question.limits(), question.stale_layers
    if question.given is not None:
        partition, rounds = question.given
        return evaluate_plan(partition, rounds, *run, limits, stale_layers, question.keep_rule())
    return make_plan(*run, question.rounds, limits, stale_layers=stale_layers, keep=question.keep_rule())


def _state_problem(question: RunQuestion) -> InfeasiblePlanError | None:
    """Return the error of a run whose weights, gradients and optimizer state alone exceed host memory."""
    state = question.state()
    missing_gib = state.short_by(question.host_bytes)
    if not missing_gib or question.host_bytes is None:
        return None
    keys = tuple(_state_changes(question, state))
    loader = f", batches of data {size_text(state.loader_bytes)}" if state.loader_bytes else ""
    message = (
        f"weights, gradients and optimizer state need {size_text(state.state_bytes - state.loader_bytes)} of host "
        f"memory{loader}, and {size_text(question.host_bytes)} are available: "
        f"{size_text(round(missing_gib * GIB))} are missing for these alone. What would help: {', '.join(keys)}"
    )
    return InfeasiblePlanError(message, "", missing_gib, keys)


def _state_changes(question: RunQuestion, state: HostMemory) -> Iterator[str]:
    """Name the changes that make the state smaller, the largest part first; none that is in force already."""
    if mostly_data := 2 * state.loader_bytes > state.state_bytes:
        yield OF_DATA
    yield "a smaller model (model.flavor or model.shape)"
    if _trains_all(question):
        yield "adapters on frozen weights (lora.rank)"
    yield from (setting for setting, _ in question.smaller_states())
    if question.element_bytes > 2:
        yield 'training.dtype = "bfloat16"'
    if question.update == "async":
        yield 'engine.update = "sync"'
    if isinstance(question.rounds, int) and question.rounds > 1:
        yield "engine.rounds = 1"
    if state.loader_bytes and not mostly_data:
        yield OF_DATA


def host_memory(question: RunQuestion, plan: Plan | None) -> HostMemory:
    """Count the host memory of a run by kind; without a plan, what any plan needs."""
    state = question.state()
    if plan is None:
        return state
    if plan.rounds > 1:
        state = question.state_of(plan.rounds)
    return replace(
        state,
        activation_bytes=plan.host_activation_bytes,
        integer_bytes=question.host_batch().integers_and_losses_bytes(),
        device_bytes=plan.num_devices * plan.device_bytes if question.devices_on_host else 0,
    )


def _device(question: RunQuestion, costs: Costs, plan: Plan | None) -> DeviceMemory | None:
    if plan is None:
        return None
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
    """Check whether some plan keeps within all limits.

    The finest partition needs least of a device, and the ones with the fullest stages least of the host. The
    planner has to search for one in between only if both limits are tight and none of them fits.
    """
    if _state_problem(question):
        return False
    limits, costs = question.limits(), question.costs()
    costs = costs.keeping(replace(question, given=None).keep_rule().fixed(costs))
    stale_layers = question.stale_layers if question.update == "bounded" else 0
    problem = PlanningProblem(
        costs, question.num_devices, question.num_micro_batches, question.update, limits, stale_layers
    )
    rounds = question.rounds if isinstance(question.rounds, int) else question.num_micro_batches
    candidates = coarse_partitions(problem, rounds)
    if any(problem.fits_limits(Candidate(partition, rounds)) for partition in candidates):
        return True
    if limits.host_bytes is None or not problem.fits_device(candidates[-1], rounds):
        return False
    try:
        plan_for(replace(question, given=None).without_choice())
    except InfeasiblePlanError:
        return False
    return True


def longest_tokens(question: RunQuestion) -> int:
    """Find the longest sequence that fits with one sequence per micro-batch and a batch of one per device; 0 if none does."""

    def possible(steps: int) -> bool:
        longer = replace(
            question,
            seq_len=steps * LENGTH_STEP,
            micro_batch_size=1,
            global_batch_size=question.num_devices * question.machines.count,
            rounds=1,
            given=None,
        )
        return fits(longer)

    # Memory grows with the length, so the longest one is found by doubling and then halving the interval.
    low, high = 0, 1
    while possible(high) and high * LENGTH_STEP < LONGEST_LENGTH:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low * LENGTH_STEP


def _trains_all(question: RunQuestion) -> bool:
    """Return whether no weight is frozen; adapters are no advice for a run that has them."""
    return not question.parameters.frozen + question.parameters.mapped


def _frozen(question: RunQuestion) -> RunQuestion:
    """Return the run with frozen weights alone; adapters of a usual rank add little to it."""

    def costs_for(tokens: int, sequences: int, accumulate_bytes: int) -> Costs:
        # Without gradients a frozen layer neither accumulates nor downloads; its compute is left as it is.
        costs = question.costs_for(tokens, sequences, accumulate_bytes)
        return replace(costs, layers=tuple(replace(layer, gradient_bytes=0) for layer in costs.layers))

    counts = question.parameters
    frozen = ParameterCounts(0, counts.trained + counts.frozen, mapped=counts.mapped)
    return replace(question, costs_for=costs_for, parameters=frozen)


def _smaller_batch(question: RunQuestion) -> tuple[str, RunQuestion]:
    """Halve the batch until it fits, or until each round has one micro-batch left; return it with its config key."""
    changed, rounds = question, question.rounds if isinstance(question.rounds, int) else 1
    least = rounds * question.micro_batch_size * question.machines.count
    while changed.global_batch_size // 2 >= least:
        changed = replace(changed, global_batch_size=changed.global_batch_size // 2)
        if fits(changed):
            break
    return f"training.global_batch_size = {changed.global_batch_size}", changed


def _changes(question: RunQuestion) -> Iterator[ConfigChange]:
    """Try changes that need less memory, each alone; a smaller state with a smaller batch too if neither does."""
    alternatives = [
        _smaller_batch(question),
        ("training.micro_batch_size = 1", replace(question, micro_batch_size=1)),
        (f"training.seq_len = {question.seq_len // 2}", replace(question, seq_len=question.seq_len // 2)),
        ('engine.accumulate_dtype = "bfloat16"', replace(question, accumulate_bytes=2)),
        ('engine.update = "sync"', replace(question, update="sync")),
        *question.smaller_states(),
        ('engine.keep_activations = "none"', replace(question, keep_activations="none")),
        (
            f"engine.rounds = {question.num_micro_batches}",
            replace(question, rounds=question.num_micro_batches),
        ),
        ("engine.plan left out", replace(question, given=None)),
    ]
    if _trains_all(question):
        alternatives.append(("lora.rank (adapters on frozen weights)", _frozen(question)))
    for setting, changed in alternatives:
        # Steps of `bounded` have one round.
        has_rounds = changed.update == "bounded" and changed.rounds not in ("auto", 1)
        if changed != question and not has_rounds:
            yield ConfigChange(setting, fits(changed))
    for setting, smaller in question.smaller_states():
        batch, changed = _smaller_batch(smaller)
        if not fits(smaller) and fits(changed) and not fits(_smaller_batch(question)[1]):
            yield ConfigChange(f"{setting} and {batch}")
