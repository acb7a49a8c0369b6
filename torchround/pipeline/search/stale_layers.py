"""The number of stale layers of a plan in `bounded`: the smallest one that costs no time.

The forward of step t + 1 reads the first K layers one version older, so that it can begin beside the backward of step t.
More stale layers than that gain nothing, and each one also keeps its input on the host for its backward.
"""

from torchround.pipeline.search.partition_batch import Candidate
from torchround.pipeline.search.planning_problem import PlanningProblem
from torchround.pipeline.search.random_search import find_plan
from torchround.pipeline.simulation.bounded_time import bounded_step_seconds

# Steps that are longer by at most this share count as equally long: the smaller number of stale layers wins.
AS_SHORT = 0.001
# Shares of the first number of stale layers that are tried if the host has no room for the inputs of all.
FEWER = (0.75, 0.5, 0.25, 0.0)


def find_stale_plan(
    problem: PlanningProblem, as_fast: float
) -> tuple[PlanningProblem, tuple[Candidate, float | None]] | None:
    """Find a plan and its stale layers: the problem with their number, and the plan as `find_plan` returns it.

    `problem` leaves the number open. Returns None if nothing fits. The first search times each plan with as many stale
    layers as can be. The second one, with the number that its plan needs, counts their inputs.
    """
    whole, problem_of = problem, problem.with_stale_layers
    found = find_plan(whole, (1,), as_fast)
    if found is None:
        return None
    candidate, proven_s = found
    first = fewest_stale_layers(whole, candidate)
    for share in (1.0, *FEWER):
        stale_layers = round(share * first)
        problem = problem_of(stale_layers)
        again = find_plan(problem, (1,), as_fast)
        if again is None:
            continue
        chosen = again[0]
        if problem.fits_limits(candidate):
            # The first search has seen plans that the second one may have missed.
            chosen = min(chosen, candidate, key=problem.exact_s)
        fewest = fewest_stale_layers(problem, chosen)
        return (problem_of(fewest) if fewest < stale_layers else problem), (chosen, proven_s)
    return None


def fewest_stale_layers(problem: PlanningProblem, candidate: Candidate) -> int:
    """Return the fewest stale layers with which a step of the plan is about as short as with the most."""
    most_s = problem.exact_s(candidate) * (1 + AS_SHORT)
    high = problem.num_layers - candidate.partition.fused
    if problem.stale_layers is not None:
        high = min(high, problem.stale_layers)
    low = -1
    # A stage waits for no more updates with more stale layers, so halving the interval finds the fewest.
    while high - low > 1:
        middle = (low + high) // 2
        step_s = bounded_step_seconds(
            problem.sums, candidate.partition, middle, problem.num_devices, problem.num_micro_batches
        )
        low, high = (low, middle) if step_s <= most_s else (middle, high)
    return high
