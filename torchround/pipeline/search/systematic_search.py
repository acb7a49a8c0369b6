"""Every plan of a small model: all partitions in all rounds, ranked by a bound, proven by the exact step time."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from torchround.pipeline.partition import Partition
from torchround.pipeline.search.partition_batch import (
    Candidate,
    Floats,
    Integers,
    PartitionBatch,
    joined,
    rows_of,
)
from torchround.pipeline.search.planning_problem import SAME_STEP, PlanningProblem


def num_partitions(num_layers: int) -> int:
    """Pairs of compositions of the layers before each possible fused stage: 5462 for 8 layers."""
    return 1 + sum(4 ** (split - 1) for split in range(1, num_layers))


def search_all(problem: PlanningProblem, rounds_choices: Sequence[int]) -> Candidate | None:
    """The fastest of all candidates that fit, or None if none does."""
    rows = _all_rows(problem.num_layers)
    bounds: list[Floats] = []
    keys: list[Integers] = []
    for rounds in rounds_choices:
        fitting = np.flatnonzero(problem.fits(rows, rounds))
        fitting_rows = rows.take(fitting)
        bounds.append(problem.estimate_s(fitting_rows, rounds))
        keys.append(np.stack([np.full_like(fitting, rounds), fitting_rows.num_stages, fitting], axis=1))
    return _best_first(problem, np.concatenate(bounds), np.concatenate(keys), rows)


def _all_rows(num_layers: int) -> PartitionBatch:
    """All partitions."""
    parts = [rows_of([Partition((), num_layers, ())])]
    for split in range(1, num_layers):
        ways = [_compositions(split, stages) for stages in range(1, split + 1)]
        parts += [_all_pairs(left, right, num_layers - split) for left in ways for right in ways]
    return joined(parts)


def _all_pairs(left: Integers, right: Integers, fused: int) -> PartitionBatch:
    """All forward counts x all backward counts."""
    number = len(left) * len(right)
    counts = [
        np.repeat(left, len(right), axis=0),
        np.full((number, 1), fused),
        np.tile(right, (len(left), 1)),
    ]
    return PartitionBatch(np.concatenate(counts, axis=1), np.full(number, left.shape[1]))


def _compositions(total: int, parts: int) -> Integers:
    """All lists of `parts` positive integers with this sum [K, parts]."""
    chosen = list(combinations(range(1, total), parts - 1))
    cuts = np.array(chosen, dtype=np.int64).reshape(len(chosen), parts - 1)
    ends = np.full((len(cuts), 1), total)
    return np.asarray(np.diff(np.concatenate([0 * ends, cuts, ends], axis=1), axis=1))


def _best_first(
    problem: PlanningProblem, bounds: Floats, keys: Integers, rows: PartitionBatch
) -> Candidate | None:
    """Exact step times in the order of their bounds, until no bound is below the best.

    `keys` [.., 3]: rounds, number of stages and row of each candidate.
    """
    if not len(bounds):
        return None
    # Bounds that differ by rounding count as equal; beyond 1e15 times the least they need not be told apart.
    unit = max(float(bounds.min()), 1e-15 * float(bounds.max())) * SAME_STEP
    equal = np.round(bounds / unit) if unit else bounds
    best: Candidate | None = None
    for index in np.lexsort((keys[:, 1], keys[:, 0], equal)):
        if best is not None and bounds[index] >= problem.exact_s(best) * (1 - SAME_STEP):
            break
        rounds, _, row = keys[index].tolist()
        best = problem.better(best, Candidate(rows.partition(row), rounds))
    return best


# The paper's partitions (RoundPipe section 4.4.2): for each possible longest stage, stages as full as they go.


# Longest stages tried; equal layers have far fewer different sums than this.
MOST_CAPS = 20


def greedy_partitions(problem: PlanningProblem, slowest_s: float) -> list[Partition]:
    """Partitions for every sum of consecutive forward or forward + backward times up to `slowest_s`.

    Sums repeat for equal layers and are tried once, evenly thinned where there are still too many.
    """
    sums = np.concatenate([_range_sums(problem.forward_s), _range_sums(np.array(problem.both_s))])
    caps = np.unique(np.round(sums[sums <= slowest_s], 12))
    if len(caps) > MOST_CAPS:
        caps = caps[np.linspace(0, len(caps) - 1, MOST_CAPS).round().astype(np.int64)]
    found: dict[Partition, None] = {}
    for cap_s in caps.tolist():
        found.setdefault(greedy_partition(problem, cap_s))
    return list(found)


def _range_sums(sums_s: Floats) -> Floats:
    first, last = np.triu_indices(len(sums_s), 1)
    return np.asarray(sums_s[last] - sums_s[first])


def greedy_partition(problem: PlanningProblem, longest_s: float) -> Partition:
    """Fused and backward stages filled from the last layer, then forward stages from the first."""
    longest_s *= 1 + 1e-9  # running sums of equal layers differ by rounding
    both_s, forward_s = problem.both_s, problem.sums.forward_s
    backward, stop = [], problem.num_layers
    while stop > 0:
        start = bisect_left(both_s, both_s[stop] - longest_s, 0, stop - 1)
        start = max(start, problem.first_layers[stop])
        backward.append(stop - start)
        stop = start
    forward, start, split = [], 0, problem.num_layers - backward[0]
    while start < split:
        stop = bisect_right(forward_s, forward_s[start] + longest_s, start + 2, split + 1) - 1
        stop = min(stop, problem.last_ends[start])
        forward.append(stop - start)
        start = stop
    return Partition(tuple(forward), backward[0], tuple(backward[1:]))
