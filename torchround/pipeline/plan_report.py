"""The answers to a user's questions before a run: does it fit, what takes the memory, how fast is it, what to change.

`report_plan` answers a `RunQuestion`. This module reads no config, no model and no file.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torchround.pipeline.cards import DeviceSpec
from torchround.pipeline.costs import Costs, ParameterCounts
from torchround.pipeline.host_buffers import HostBatch
from torchround.pipeline.memory import (
    GIB,
    DeviceMemory,
    HostMemory,
    MemoryLimits,
    device_memory,
    host_state,
    rounding,
    size_text,
)
from torchround.pipeline.partition import Partition, split_evenly
from torchround.pipeline.plan import Plan, Transfers, micro_batches_to_hide, plan_transfers
from torchround.pipeline.planner import InfeasiblePlanError, evaluate_plan, make_plan
from torchround.pipeline.search.partition_batch import Candidate
from torchround.pipeline.search.planning_problem import PlanningProblem
from torchround.pipeline.search.systematic_search import coarse_partitions

# Tensors of a micro-batch's integers: tokens, labels, positions and document ids. Each takes 8 bytes per token,
# and begins at a multiple of ALIGNMENT_BYTES.
INTEGER_TENSORS = 4
ALIGNMENT_BYTES = 256
# Sequence lengths are tried in multiples of this, up to the limit.
LENGTH_STEP, LONGEST_LENGTH = 1024, 1 << 22
# The least gain in step time that a report mentions.
CLEARLY_FASTER = 0.03


@dataclass(frozen=True)
class RunQuestion:
    """A run to be planned.

    - `costs_for(tokens, sequences, accumulate_bytes)`: the layers' costs for micro-batches of so many
      sequences of so many tokens, with gradients accumulated in so many bytes per element.
    - `given`: a partition and its number of rounds, in place of the planner's choice.
    - `device_bytes`, `host_bytes`: memory that the run may use; None is no limit.
    - `reader_bytes`: host memory through which weights in files go up to the devices.
    - `loader_bytes`: host memory of the batches of data that are being made.
    - `devices_on_host`: whether the devices are virtual, so that their memory is host memory.
    - `validates`: whether validations come between steps.
    """

    costs_for: Callable[[int, int, int], Costs]
    parameters: ParameterCounts
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    num_devices: int
    device: DeviceSpec | None
    device_bytes: int | None
    host_bytes: int | None = None
    update: str = "sync"
    rounds: int | str = 1
    recompute: str = "stage"
    element_bytes: int = 2
    gradient_bytes: int = 2
    accumulate_bytes: int = 4
    float16_gradients: bool = False
    reader_bytes: int = 0
    loader_bytes: int = 0
    devices_on_host: bool = False
    validates: bool = False
    given: tuple[Partition, int] | None = None

    @property
    def num_micro_batches(self) -> int:
        return -(-self.global_batch_size // self.micro_batch_size)

    @property
    def longest_micro_batch(self) -> int:
        """Sequences of the first micro-batch. If the batch does not divide evenly, the first ones get one more."""
        return -(-self.global_batch_size // self.num_micro_batches)

    def costs(self) -> Costs:
        return self.costs_for(self.seq_len, self.longest_micro_batch, self.accumulate_bytes)

    def state(self) -> HostMemory:
        """Count the host memory that any plan needs."""
        return self.state_of(self.rounds if isinstance(self.rounds, int) else 1)

    def state_of(self, rounds: int) -> HostMemory:
        """Count the host memory that any plan of so many rounds needs."""
        state = host_state(self.parameters, self.update, rounds, self.element_bytes, self.gradient_bytes)
        return replace(state, reader_bytes=self.reader_bytes, loader_bytes=self.loader_bytes)

    def integer_bytes(self, sequences: int) -> int:
        """Count the bytes of the integers of a micro-batch of so many sequences."""
        each = -(-8 * sequences * self.seq_len // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return INTEGER_TENSORS * each

    def host_batch(self) -> HostBatch:
        """Describe the micro-batches of a step as the pool of host buffers holds them."""
        sequences = [len(part) for part in split_evenly(self.global_batch_size, self.num_micro_batches)]
        sizes = sorted(set(sequences), reverse=True)
        costs = [self.costs_for(self.seq_len, size, self.accumulate_bytes) for size in sizes]
        gradients = [layer.gradient_bytes for layer in costs[0].layers]
        return HostBatch(
            sizes=tuple(sizes.index(size) for size in sequences),
            output_bytes=tuple(tuple(layer.boundary_bytes for layer in of_size.layers) for of_size in costs),
            integer_bytes=tuple(self.integer_bytes(size) for size in sizes),
            frozen_layers=next((index for index, size in enumerate(gradients) if size), len(gradients)),
            validates=self.validates,
        )

    def limits(self) -> MemoryLimits:
        host_bytes = self.host_bytes
        if host_bytes is not None:
            host_bytes = max(0, host_bytes - self.state().state_bytes)
        # `state()` counts one round if the config gives no number; a plan of several rounds also keeps their sums.
        is_open = not isinstance(self.rounds, int)
        rounds_bytes = self.state_of(2).state_bytes - self.state_of(1).state_bytes if is_open else 0
        # Devices never add up in float16, so sums that travel as float16 are always converted.
        rounded = self.gradient_bytes != self.accumulate_bytes or self.float16_gradients
        return MemoryLimits(
            self.device_bytes,
            host_bytes,
            self.integer_bytes(self.longest_micro_batch),
            self.recompute,
            batch=self.host_batch(),
            devices_on_host=self.num_devices if self.devices_on_host else 0,
            rounds_bytes=rounds_bytes,
            **(rounding(self.accumulate_bytes, self.gradient_bytes) if rounded else {}),
        )


@dataclass(frozen=True)
class ConfigChange:
    """One change of the config: whether the run fits with it alone, and the share of a step that it saves."""

    setting: str
    fits: bool = True
    gain: float = 0.0


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
    )


def plan_for(question: RunQuestion, costs: Costs | None = None) -> Plan:
    """Return the plan of the run: `given` evaluated, otherwise the best one. Raises `InfeasiblePlanError`.

    A run, its measuring steps, a dry run and the `plan` command all get their plans here, under the same
    limits. `costs` are measured ones; without them they are counted.
    """
    if (problem := _state_problem(question)) is not None:
        raise problem
    costs = costs or question.costs()
    devices, micro_batches, limits = question.num_devices, question.num_micro_batches, question.limits()
    if question.given is not None:
        partition, rounds = question.given
        return evaluate_plan(partition, rounds, costs, devices, micro_batches, question.update, limits)
    return make_plan(costs, devices, micro_batches, question.update, question.rounds, limits)


def _state_problem(question: RunQuestion) -> InfeasiblePlanError | None:
    """Return the error of a run whose weights, gradients and optimizer state alone exceed host memory."""
    state = question.state()
    missing_gib = state.short_by(question.host_bytes)
    if not missing_gib or question.host_bytes is None:
        return None
    loader = f" ({size_text(state.loader_bytes)} of it for batches of data)" if state.loader_bytes else ""
    keys = tuple(_state_keys(question))
    message = (
        f"weights, gradients and optimizer state need {size_text(state.state_bytes)} of host memory{loader}, and "
        f"{size_text(question.host_bytes)} are available: {size_text(round(missing_gib * GIB))} are missing. "
        f"What would help: {', '.join(keys)}"
    )
    return InfeasiblePlanError(message, "", missing_gib, keys)


def _state_keys(question: RunQuestion) -> Iterator[str]:
    """Yield the changes that make a run's state smaller, without those that it has already."""
    yield "a smaller model.flavor"
    if question.element_bytes > 2:
        yield 'training.dtype = "bfloat16"'
    if question.update != "sync":
        yield 'engine.update = "sync"'
    if question.rounds != 1:
        yield "engine.rounds = 1"
    if question.loader_bytes:
        yield "data.shuffle_sequences = 0"


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
    return device_memory(plan.partition, costs, question.num_devices, size, limits)


def _transfers(question: RunQuestion, costs: Costs, plan: Plan | None) -> Transfers | None:
    if plan is None or question.device is None:
        return None
    share = question.gradient_bytes / question.accumulate_bytes
    return plan_transfers(plan, costs, question.device.pcie_gb_per_s, question.recompute, share)


def _faster(question: RunQuestion, plan: Plan) -> Iterator[ConfigChange]:
    """Try changes that keep the step's batch, each alone; yield those that make steps clearly shorter."""
    alternatives = [
        ('engine.rounds = "auto"', replace(question, rounds="auto")),
        ('engine.recompute = "layer"', replace(question, recompute="layer")),
        ('engine.update = "async"', replace(question, update="async")),
    ]
    for size in (question.micro_batch_size // 2, question.micro_batch_size * 2):
        if 1 <= size <= question.global_batch_size:
            changed = replace(question, micro_batch_size=size)
            alternatives.append((f"training.micro_batch_size = {size}", changed))
    # The other changes would leave the given plan in place, which was made for other costs.
    if question.given is not None:
        alternatives = [("engine.plan left out", replace(question, given=None))]
    for setting, changed in alternatives:
        # A change that alters nothing, or that does not fit, is no advice.
        if changed == question or not fits(changed):
            continue
        gain = 1 - plan_for(changed).step_s / plan.step_s if plan.step_s else 0.0
        if gain > CLEARLY_FASTER:
            yield ConfigChange(setting, gain=gain)


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
    problem = PlanningProblem(
        costs, question.num_devices, question.num_micro_batches, question.update, limits
    )
    rounds = question.rounds if isinstance(question.rounds, int) else question.num_micro_batches
    candidates = coarse_partitions(problem, rounds)
    if any(problem.fits_limits(Candidate(partition, rounds)) for partition in candidates):
        return True
    if limits.host_bytes is None or not problem.fits_device(candidates[-1], rounds):
        return False
    try:
        plan_for(replace(question, given=None), costs)
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
            global_batch_size=question.num_devices,
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
    least = rounds * question.micro_batch_size
    while changed.global_batch_size // 2 >= least:
        changed = replace(changed, global_batch_size=changed.global_batch_size // 2)
        if fits(changed):
            break
    return f"training.global_batch_size = {changed.global_batch_size}", changed


def _changes(question: RunQuestion) -> Iterator[ConfigChange]:
    """Try changes that need less memory, each alone."""
    alternatives = [
        _smaller_batch(question),
        ("training.micro_batch_size = 1", replace(question, micro_batch_size=1)),
        (f"training.seq_len = {question.seq_len // 2}", replace(question, seq_len=question.seq_len // 2)),
        ('engine.accumulate_dtype = "bfloat16"', replace(question, accumulate_bytes=2)),
        ('engine.update = "sync"', replace(question, update="sync")),
        (
            f"engine.rounds = {question.num_micro_batches}",
            replace(question, rounds=question.num_micro_batches),
        ),
        ("engine.plan left out", replace(question, given=None)),
    ]
    # Adapters are no advice for a run that has them.
    if question.parameters.trained and not question.parameters.frozen + question.parameters.mapped:
        alternatives.append(("lora.rank (adapters on frozen weights)", _frozen(question)))
    for setting, changed in alternatives:
        if changed != question:
            yield ConfigChange(setting, fits(changed))
