"""The paper's partitions (RoundPipe section 4.4.2): for each possible longest stage, stages as full as they go."""

from bisect import bisect_left, bisect_right

import numpy as np

from torchround.pipeline.partition import Partition
from torchround.pipeline.problem import Problem
from torchround.pipeline.rows import Floats

# Longest stages tried; equal layers have far fewer different sums than this.
MOST_CAPS = 20


def greedy_partitions(problem: Problem, slowest_s: float) -> list[Partition]:
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


def greedy_partition(problem: Problem, longest_s: float) -> Partition:
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
