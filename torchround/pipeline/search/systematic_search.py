"""The two searches that draw no random numbers: every plan of a small model, and the paper's greedy packing.

`search_all` ranks all partitions in all numbers of rounds by a lower bound of their step time and proves the
winner with the exact one. `greedy_partition` packs stages as full as a longest stage allows (RoundPipe
section 4.4.2); the random search starts from its partitions.

Shapes: K partitions, S stages.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from torchround.pipeline.partition import Partition
from torchround.pipeline.search.least_host import AS_FAST, LeastHost
from torchround.pipeline.search.memory_table import StageLimits
from torchround.pipeline.search.partition_batch import (
    Candidate,
    Floats,
    Integers,
    PartitionBatch,
    batch_of,
    joined,
)
from torchround.pipeline.search.planning_problem import SAME_STEP, PlanningProblem

# Longest stages tried as starts of the random search. Equal layers have far fewer different sums than this.
MOST_LONGEST_STAGES = 20


def num_partitions(num_layers: int) -> int:
    """Count the pairs of compositions of the layers before each possible fused stage: 5462 for 8 layers."""
    return 1 + sum(4 ** (split - 1) for split in range(1, num_layers))


def search_all(
    problem: PlanningProblem, rounds_choices: Sequence[int], as_fast: float = AS_FAST
) -> tuple[Candidate, Candidate] | None:
    """Return the fastest of all candidates that fit, and of those as fast the one of least host memory; None if none fits."""
    batch = _all_partitions(problem.num_layers)
    bounds: list[Floats] = []
    keys: list[Integers] = []
    for rounds in rounds_choices:
        fitting = np.flatnonzero(problem.fits(batch, rounds))
        fitting_batch = batch.take(fitting)
        bounds.append(problem.estimate_s(fitting_batch, rounds))
        keys.append(np.stack([np.full_like(fitting, rounds), fitting_batch.num_stages, fitting], axis=1))
    fastest = _best_first(problem, np.concatenate(bounds), np.concatenate(keys), batch)
    if fastest is None:
        return None
    index = list(rounds_choices).index(fastest.rounds)
    least_host = LeastHost(problem, fastest.rounds)
    least_host.add(batch.take(keys[index][:, 2]), bounds[index])
    return fastest, least_host.choose(fastest, as_fast)


def _all_partitions(num_layers: int) -> PartitionBatch:
    """Enumerate all partitions of the layers."""
    parts = [batch_of([Partition((), num_layers, ())])]
    for split in range(1, num_layers):
        ways = [_compositions(split, stages) for stages in range(1, split + 1)]
        parts += [_all_pairs(left, right, num_layers - split) for left in ways for right in ways]
    return joined(parts)


def _all_pairs(left: Integers, right: Integers, fused: int) -> PartitionBatch:
    """Combine all forward layer counts `left` with all backward layer counts `right`."""
    number = len(left) * len(right)
    counts = [
        np.repeat(left, len(right), axis=0),
        np.full((number, 1), fused),
        np.tile(right, (len(left), 1)),
    ]
    return PartitionBatch(np.concatenate(counts, axis=1), np.full(number, left.shape[1]))


def _compositions(total: int, parts: int) -> Integers:
    """List all ways to write `total` as a sum of `parts` positive integers [K, parts]."""
    chosen = list(combinations(range(1, total), parts - 1))
    cuts = np.array(chosen, dtype=np.int64).reshape(len(chosen), parts - 1)
    ends = np.full((len(cuts), 1), total)
    return np.asarray(np.diff(np.concatenate([0 * ends, cuts, ends], axis=1), axis=1))


def _best_first(
    problem: PlanningProblem, bounds: Floats, keys: Integers, batch: PartitionBatch
) -> Candidate | None:
    """Compute exact step times in the order of their bounds, until no bound is below the best of them.

    `keys` [.., 3]: rounds, number of stages and row of each candidate.
    """
    if not len(bounds):
        return None
    # Bounds that differ by rounding count as equal, so that the fewest rounds and stages come first among
    # them. Bounds beyond 1e15 times the least need no order: rounding them to the unit below would overflow.
    unit = max(float(bounds.min()), 1e-15 * float(bounds.max())) * SAME_STEP
    equal = np.round(bounds / unit) if unit else bounds
    best: Candidate | None = None
    for index in np.lexsort((keys[:, 1], keys[:, 0], equal)):
        if best is not None and bounds[index] >= problem.exact_s(best) * (1 - SAME_STEP):
            break
        rounds, _, row = keys[index].tolist()
        best = problem.better(best, Candidate(batch.partition(row), rounds))
    return best


def published_packing(problem: PlanningProblem) -> Partition:
    """Return the partition that RoundPipe's planner chooses: the greedy packing of the shortest predicted step.

    The prediction is the paper's `(M S + N (N - 1)) / N` times the longest stage, for N devices, M
    micro-batches and S stages. It leaves out hops and uneven stages, which our search counts; a benchmark
    compares the time that both take.
    """
    devices, micro_batches = problem.num_devices, problem.num_micro_batches

    def predicted_s(longest_s: float) -> float:
        stages = greedy_partition(problem, longest_s).num_stages
        return longest_s * (micro_batches * stages + devices * (devices - 1)) / devices

    return greedy_partition(problem, min(_longest_stages_s(problem), key=predicted_s))


def greedy_partitions(problem: PlanningProblem, slowest_s: float) -> list[Partition]:
    """Return the greedy partitions for longest stages up to `slowest_s`, evenly thinned if there are many."""
    longest = [longest_s for longest_s in _longest_stages_s(problem) if longest_s <= slowest_s]
    if len(longest) > MOST_LONGEST_STAGES:
        kept = np.linspace(0, len(longest) - 1, MOST_LONGEST_STAGES).round().astype(np.int64)
        longest = [longest[index] for index in kept]
    # A dict keeps the order and drops partitions that several longest stages lead to.
    return list(dict.fromkeys(greedy_partition(problem, longest_s) for longest_s in longest))


def _longest_stages_s(problem: PlanningProblem) -> list[float]:
    """List the distinct seconds of consecutive layers, forward and forward + backward, in ascending order.

    A stage takes one of these times, so no other longest stage leads to another packing.
    """
    sums = np.concatenate([_range_sums(problem.forward_s), _range_sums(np.array(problem.both_s))])
    distinct: list[float] = np.unique(np.round(sums, 12)).tolist()
    return distinct


def _range_sums(sums_s: Floats) -> Floats:
    first, last = np.triu_indices(len(sums_s), 1)
    return np.asarray(sums_s[last] - sums_s[first])


def greedy_partition(
    problem: PlanningProblem, longest_s: float, limits: StageLimits | None = None
) -> Partition:
    """Fill the fused and the backward stages from the last layer, then the forward stages from the first.

    A stage takes layers up to `longest_s` seconds per micro-batch, and no more than `limits` allow: those of
    even stages, which fit together, if none are given.
    """
    limits = limits or problem.even
    longest_s *= 1 + 1e-9  # running sums of equal layers differ by rounding
    forward_s = problem.sums.forward_s
    backward: list[int] = []
    stop = problem.num_layers
    while stop > 0:
        both_s = problem.both_s if backward else problem.fused_s
        start = bisect_left(both_s, both_s[stop] - longest_s, 0, stop - 1)
        start = max(start, limits.first_layers[stop])
        backward.append(stop - start)
        stop = start
    # The first stage packed is the fused one; the forward stages cover what lies before it.
    forward, start, split = [], 0, problem.num_layers - backward[0]
    while start < split:
        stop = bisect_right(forward_s, forward_s[start] + longest_s, start + 2, split + 1) - 1
        stop = min(stop, limits.last_ends[start])
        forward.append(stop - start)
        start = stop
    return Partition(tuple(forward), backward[0], tuple(backward[1:]))


def coarse_partitions(problem: PlanningProblem, rounds: int) -> list[Partition]:
    """List partitions that need little host memory and fit a device, the finest one in any case.

    Few backward stages keep few boundaries on the host, but need room on a device.
    """
    layers = problem.num_layers
    ones = (1,) * (layers - 1)
    found = [Partition((), layers, ())]
    for limits in (problem.widest, problem.even):
        full = greedy_partition(problem, float("inf"), limits)
        # Fine forward stages next to full backward ones: only backward stages keep boundaries.
        found += [full, Partition((1,) * sum(full.forward), full.fused, full.backward)]
    fitting = [partition for partition in found if problem.fits_device(partition, rounds)]
    return [*dict.fromkeys(fitting), Partition(ones, 1, ones)]
