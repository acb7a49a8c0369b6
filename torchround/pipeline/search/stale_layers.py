"""The number of stale layers of a plan in `bounded`: the smallest one without a bubble.

The forward of step t + 1 reads the first K layers one version older, so that it can begin beside the backward of step t.
More stale layers than that gain nothing. Each one is a layer with older weights, and keeps its input on the host for its
backward.
"""

from dataclasses import dataclass

from torchround.pipeline.search.partition_batch import Candidate
from torchround.pipeline.search.planning_problem import PlanningProblem
from torchround.pipeline.search.random_search import find_plan
from torchround.pipeline.simulation.bounded_time import bounded_step_seconds

# A step that is longer than the fastest one by at most this share is as short, if no larger share is given.
AS_SHORT = 0.001
# The idle share of the devices that counts as no bubble.
NO_BUBBLE = 0.01
# Searches at most for a smaller number, each with half of the interval that is left.
MOST_HALVINGS = 4
# Shares of the first number that are tried if the host has no room for the inputs of all its layers.
FEWER = (0.75, 0.5, 0.25, 0.0)
# Numbers that are tried if what is kept by name does not fit without stale layers.
MOST_KEPT_TRIES = 8


@dataclass(frozen=True)
class StepGoal:
    """What a plan with fewer stale layers must reach: the longest step, and the largest idle share of the devices."""

    step_s: float
    bubble: float

    def is_met(self, problem: PlanningProblem, candidate: Candidate) -> bool:
        """Check a candidate's exact step."""
        step_s = problem.exact_s(candidate)
        return step_s <= self.step_s and bubble_of(problem, candidate, step_s) <= self.bubble


def find_stale_plan(
    problem: PlanningProblem, as_fast: float
) -> tuple[PlanningProblem, tuple[Candidate, float | None]] | None:
    """Find a plan and its stale layers: the problem with their number, and the plan as `find_plan` returns it.

    `problem` leaves the number open. Returns None if nothing fits. The first search times each plan with as many stale
    layers as can be, which gives the fastest step. The others look for the fewest with which a plan is about as fast and
    has no bubble, and count their inputs.
    """
    found = find_plan(problem, (1,), 0.0)
    if found is None:
        return _beside_what_is_kept(problem, as_fast)
    fastest, proven_s = found
    if problem.costs.shared and proven_s is None:
        # A head that shares the embedding's weights waits for its gradient, as `sync` does. Estimates leave that out, so
        # plans made for such waits are tried too.
        others = find_plan(problem.with_stale_layers(0), (1,), 0.0)
        fastest = min([fastest, *([others[0]] if others else [])], key=problem.exact_s)
    fastest_s = problem.exact_s(fastest)
    bubble = max(NO_BUBBLE, bubble_of(problem, fastest, fastest_s))
    goal = StepGoal(fastest_s * (1 + max(as_fast, AS_SHORT)), bubble)
    most = fewest_stale_layers(problem, fastest, goal)
    best = _plan_with(problem, most, fastest, goal)
    if best is None:
        limited = _fastest_that_fits(problem, most, fastest, as_fast)
        return None if limited is None else (limited[0], (limited[1], None))
    low = -1
    for _ in range(MOST_HALVINGS):
        high = best[0].stale_layers or 0
        if high - low <= 1:
            break
        middle = (low + high) // 2
        fewer = _plan_with(problem, middle, best[1], goal)
        low, best = (middle, best) if fewer is None else (low, fewer)
    return best[0], (_with_least_host(*best, goal, as_fast), proven_s)


def _beside_what_is_kept(
    problem: PlanningProblem, as_fast: float
) -> tuple[PlanningProblem, tuple[Candidate, float | None]] | None:
    """Find a plan for kept activations that fit only because stale layers keep none: the open problem counts all of them."""
    most = problem.num_layers - 1 if problem.costs.kept else 0
    for stale_layers in sorted(
        {-(-most * part // MOST_KEPT_TRIES) for part in range(1, 1 + MOST_KEPT_TRIES)}
    ):
        fixed = problem.with_stale_layers(stale_layers)
        found = find_plan(fixed, (1,), as_fast) if stale_layers else None
        if found is not None:
            return fixed, (found[0], None)
    return None


def fewest_stale_layers(problem: PlanningProblem, candidate: Candidate, goal: StepGoal | None = None) -> int:
    """Return the fewest stale layers with which the plan meets the goal, by default a step as short as with the most."""
    high = problem.num_layers - candidate.partition.fused
    if problem.stale_layers is not None:
        high = min(high, problem.stale_layers)
    if goal is None:
        goal = StepGoal(problem.exact_s(candidate) * (1 + AS_SHORT), 1.0)
    low = -1
    # A stage waits for no more updates with more stale layers, so halving the interval finds the fewest.
    while high - low > 1:
        middle = (low + high) // 2
        step_s = bounded_step_seconds(
            *(problem.sums, candidate.partition, middle, problem.num_devices, problem.num_micro_batches)
        )
        is_met = step_s <= goal.step_s and bubble_of(problem, candidate, step_s) <= goal.bubble
        low, high = (low, middle) if is_met else (middle, high)
    return high


def bubble_of(problem: PlanningProblem, candidate: Candidate, step_s: float) -> float:
    """Return the idle share of the devices if the plan's step takes so long."""
    partition = candidate.partition
    times = problem.sums.times(partition.forward, partition.fused, partition.backward)
    busy_s = problem.num_micro_batches * sum(times.total_s)
    return 1 - busy_s / (problem.num_devices * step_s) if step_s else 0.0


def _plan_with(
    problem: PlanningProblem, stale_layers: int, known: Candidate, goal: StepGoal
) -> tuple[PlanningProblem, Candidate] | None:
    """Find a plan that meets the goal with at most so many stale layers: the one of another number, or a new one."""
    fixed = problem.with_stale_layers(stale_layers)
    candidates = [known] if fixed.fits_limits(known) and goal.is_met(fixed, known) else []
    if not candidates and (found := find_plan(fixed, (1,), 0.0)) is not None:
        candidates = [found[0]] if goal.is_met(fixed, found[0]) else []
    if not candidates:
        return None
    fewest = fewest_stale_layers(fixed, candidates[0], goal)
    return (problem.with_stale_layers(fewest) if fewest < stale_layers else fixed), candidates[0]


def _with_least_host(
    problem: PlanningProblem, candidate: Candidate, goal: StepGoal, as_fast: float
) -> Candidate:
    """Return a plan of less host memory that meets the goal with the same stale layers, otherwise the candidate."""
    found = find_plan(problem, (1,), as_fast)
    others = [] if found is None or not goal.is_met(problem, found[0]) else [found[0]]
    return min([candidate, *others], key=problem.host_bytes)


def _fastest_that_fits(
    problem: PlanningProblem, most: int, fastest: Candidate, as_fast: float
) -> tuple[PlanningProblem, Candidate] | None:
    """Find the fastest plan within the host's memory over a few numbers of stale layers; its steps may have a bubble."""
    found = []
    for stale_layers in sorted({round(share * most) for share in (1.0, *FEWER)}, reverse=True):
        fixed = problem.with_stale_layers(stale_layers)
        plan = find_plan(fixed, (1,), as_fast)
        if plan is not None:
            found.append((fixed, plan[0]))
        if fixed.fits_limits(fastest):
            found.append((fixed, fastest))  # the first search may have met what this one has missed
    return min(found, key=lambda pair: pair[0].exact_s(pair[1]), default=None)
