"""Choices of a plan besides its cuts: the stale layers of `bounded`, and the activations that it keeps.

A stale layer is one whose weights the forward of step t + 1 reads one version older, so that it can begin beside the
backward of step t. More than the fewest without a bubble gain nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torchround.planning.keep_rule import items_by_gain
from torchround.planning.planning_problem import Candidate, PlanningProblem
from torchround.planning.search import SAME_STEP, Search, find_plan

# A step that is longer than the fastest one by at most this share is as short, if no larger share is given.
AS_SHORT = 0.001
# The idle share of the devices that counts as no bubble.
NO_BUBBLE = 0.01
# Plans whose fewest stale layers are counted.
MOST_COMPARED = 12
# Shares of the layers that are tried as stale ones if the host has no room for the fewest without a bubble.
FEWER = (0.75, 0.5, 0.25, 0.0)
# Numbers of rounds that get a search with kept activations, the most promising first.
MOST_ROUNDS = 3
# Cuts that such a search starts from, for each of three amounts.
KEPT_STARTS = 3


def find_stale_plan(problem: PlanningProblem, as_fast: float) -> tuple[PlanningProblem, Candidate] | None:
    """Find a plan and its number of stale layers, which `problem` leaves open; None if nothing fits.

    The search times each plan with as many stale layers as can be, which gives the fastest step. Of the plans that are
    about as fast and have no bubble, the one that needs the fewest stale layers is taken.
    """
    search = Search(problem)
    search.run((1,))
    fastest = search.best()
    if fastest is None:
        return _with_fewer(problem, problem.num_layers - 1, as_fast)
    step_s = problem.exact_s(fastest) * (1 + max(as_fast, AS_SHORT))
    bubble = max(NO_BUBBLE, problem.bubble(fastest, problem.exact_s(fastest)))

    def is_met(candidate: Candidate, seconds: float) -> bool:
        return seconds <= step_s and problem.bubble(candidate, seconds) <= bubble

    ranked = sorted(
        (rank_s, index) for index, rank_s in enumerate(search.met.values()) if rank_s < float("inf")
    )
    met = list(search.met)
    good = [met[index] for _, index in ranked if is_met(met[index], problem.exact_s(met[index]))]
    fewest = sorted(
        (fewest_stale_layers(problem, candidate, is_met), index)
        for index, candidate in enumerate(good[:MOST_COMPARED])
    )
    for stale_layers, index in fewest:
        fixed = replace(problem, stale_layers=stale_layers)
        if fixed.fits_limits(good[index]):
            alike = [good[other] for number, other in fewest if number <= stale_layers]
            fitting = [candidate for candidate in alike if fixed.fits_limits(candidate)]
            return fixed, min(fitting, key=fixed.host_bytes)
    return _with_fewer(problem, fewest[0][0], as_fast)


def _with_fewer(
    problem: PlanningProblem, most: int, as_fast: float
) -> tuple[PlanningProblem, Candidate] | None:
    """Find the fastest plan of fewer stale layers, if memory has no room for `most`; its steps may have a bubble.

    The inputs of stale layers take host memory. What layers keep takes it too, and stale layers keep nothing.
    """
    tried = [
        replace(problem, stale_layers=number)
        for number in sorted({round(share * most) for share in (1.0, *FEWER)})
    ]
    found = [(fixed, find_plan(fixed, (1,), as_fast)) for fixed in tried]
    fitting = [(fixed, candidate) for fixed, candidate in found if candidate is not None]
    return min(fitting, key=lambda pair: pair[0].exact_s(pair[1]), default=None)


def fewest_stale_layers(
    problem: PlanningProblem, candidate: Candidate, is_met: Callable[[Candidate, float], bool] | None = None
) -> int:
    """Return the fewest stale layers whose step time is good enough, by default as short as with the most."""
    if is_met is None:
        most_s = problem.exact_s(candidate) * (1 + AS_SHORT)
        is_met = lambda _, step_s: step_s <= most_s
    low, high = -1, problem.num_layers - candidate.partition.fused
    # A stage waits for no more updates with more stale layers, so halving the interval finds the fewest.
    while high - low > 1:
        middle = (low + high) // 2
        step_s = problem.simulated_s(candidate, middle)
        low, high = (low, middle) if is_met(candidate, step_s) else (middle, high)
    return high


def keep_activations(
    problem: PlanningProblem, found: Candidate, rounds_choices: Sequence[int], as_fast: float
) -> tuple[PlanningProblem, Candidate]:
    """Return a plan that keeps something and is clearly faster than `found`, with its problem; otherwise `found`.

    Keeping makes backward stages shorter, so the cuts change with it: annealing moves both. More rounds keep fewer
    micro-batches alive, so each number of rounds has a choice of its own.
    """
    items = items_by_gain(problem.costs, problem.stale_layers or 0)
    if not items:
        return problem, found
    without, problem = problem, replace(problem, items=items)
    search = Search(problem)
    scores = []
    for rounds in rounds_choices:
        # Other cuts may leave more room on a device than those of `found`, so the host alone limits the amount here.
        if fitting := fitting_amounts(problem, Candidate(found.partition, rounds), counts_devices=False):
            start = min(fitting, key=problem.busy_s)
            scores.append((rounds != found.rounds, problem.exact_s(start), rounds, start.kept))
    for _, _, rounds, kept in sorted(scores)[:MOST_ROUNDS]:
        base = found if rounds == found.rounds else find_plan(without, (rounds,), 0.0) or found
        place = problem.amounts.index(kept)
        amounts = sorted({problem.amounts[part * place // 2] for part in (0, 1, 2)})
        cuts = [one.partition for amount in amounts for _, one in search.starts(rounds, amount)[:KEPT_STARTS]]
        # The best plan of other rounds: with more rounds its micro-batches take less of the host.
        cuts += [base.partition, *([best.partition] if (best := search.best()) else [])]
        fits_on = [fitting_amounts(problem, Candidate(cut, rounds)) for cut in dict.fromkeys(cuts)]
        # With few rounds a device may have no room for the tokens, with any cuts.
        if starts := [min(each, key=problem.busy_s) for each in fits_on if each]:
            search.anneal(starts)
    search.rank(found)
    fast = [candidate for candidate, rank_s in search.met.items() if rank_s < float("inf")]
    is_fast = _fast_rule(problem, found, fast, as_fast)
    fastest = min(filter(is_fast, fast), key=problem.exact_s)
    best = search.least_host(fastest, is_fast)
    if is_fast(found) and problem.host_bytes(found) <= problem.host_bytes(best):
        return problem, found
    return problem, best


def keep_on(
    problem: PlanningProblem, candidate: Candidate, as_fast: float
) -> tuple[PlanningProblem, Candidate]:
    """Keep what is best on given cuts, which fit without keeping anything."""
    problem = replace(problem, items=items_by_gain(problem.costs, problem.stale_layers or 0))
    fitting = fitting_amounts(problem, candidate)
    return problem, next(filter(_fast_rule(problem, candidate, fitting, as_fast), fitting))


def fitting_amounts(
    problem: PlanningProblem, candidate: Candidate, counts_devices: bool = True
) -> list[Candidate]:
    """List the candidate with all amounts that fit, from none on; empty if none does."""
    low, high = -1, len(problem.amounts)
    each = [Candidate(candidate.partition, candidate.rounds, kept) for kept in problem.amounts]
    limit = problem.limits.host_bytes

    def fits(one: Candidate) -> bool:
        if counts_devices:
            return problem.fits_limits(one)
        return limit is None or problem.host_bytes(one) <= limit

    # More never needs less memory.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(each[middle]) else (low, middle)
    return each[: low + 1]


def _fast_rule(
    problem: PlanningProblem, without: Candidate, candidates: Sequence[Candidate], as_fast: float
) -> Callable[[Candidate], bool]:
    """Return whether a candidate is about as fast as the fastest of `candidates`; `without` keeps nothing.

    Keeping must not make a step longer, not even by the share that counts as fast. It is paid for with host memory, so
    a candidate that needs more than `without` must save more than that share.
    """
    without_s, share = problem.exact_s(without), 1 + max(as_fast, SAME_STEP)
    most_s = min(without_s, share * min(map(problem.exact_s, candidates)))
    clearly_s, host_bytes = without_s / share, problem.host_bytes(without)

    def is_fast(candidate: Candidate) -> bool:
        if (step_s := problem.exact_s(candidate)) > most_s:
            return False
        return step_s <= clearly_s or problem.host_bytes(candidate) <= host_bytes

    return is_fast
