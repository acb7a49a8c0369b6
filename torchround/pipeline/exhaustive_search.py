"""Every plan of a small model: all partitions in all rounds, ranked by a bound, proven by the exact step time."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from torchround.pipeline.partition import Partition
from torchround.pipeline.problem import SAME_STEP, Problem
from torchround.pipeline.rows import Candidate, Floats, Integers, Rows, joined, rows_of


def num_partitions(num_layers: int) -> int:
    """Pairs of compositions of the layers before each possible fused stage: 5462 for 8 layers."""
    return 1 + sum(4 ** (split - 1) for split in range(1, num_layers))


def search_all(problem: Problem, rounds_choices: Sequence[int]) -> Candidate | None:
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


def _all_rows(num_layers: int) -> Rows:
    """All partitions."""
    parts = [rows_of([Partition((), num_layers, ())])]
    for split in range(1, num_layers):
        ways = [_compositions(split, stages) for stages in range(1, split + 1)]
        parts += [_all_pairs(left, right, num_layers - split) for left in ways for right in ways]
    return joined(parts)


def _all_pairs(left: Integers, right: Integers, fused: int) -> Rows:
    """All forward counts x all backward counts."""
    number = len(left) * len(right)
    counts = [
        np.repeat(left, len(right), axis=0),
        np.full((number, 1), fused),
        np.tile(right, (len(left), 1)),
    ]
    return Rows(np.concatenate(counts, axis=1), np.full(number, left.shape[1]))


def _compositions(total: int, parts: int) -> Integers:
    """All lists of `parts` positive integers with this sum [K, parts]."""
    chosen = list(combinations(range(1, total), parts - 1))
    cuts = np.array(chosen, dtype=np.int64).reshape(len(chosen), parts - 1)
    ends = np.full((len(cuts), 1), total)
    return np.asarray(np.diff(np.concatenate([0 * ends, cuts, ends], axis=1), axis=1))


def _best_first(problem: Problem, bounds: Floats, keys: Integers, rows: Rows) -> Candidate | None:
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
