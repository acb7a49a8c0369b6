"""The plan that needs least host memory among those that take hardly longer than the fastest.

Plans of about the same step time may differ by half of the pool: fewer, larger backward stages keep fewer
boundaries on the host. A hundredth of a step is less than the counted times are sure of, so it is not worth
tens of GiB.
"""

from collections.abc import Iterator

import numpy as np

from torchround.pipeline.partition import Partition
from torchround.pipeline.search.partition_batch import Candidate, Floats, PartitionBatch, batch_of
from torchround.pipeline.search.planning_problem import PlanningProblem

# Plans whose step is longer than the fastest one's by at most this share count as fast as it.
AS_FAST = 0.01
# Exact step times that are computed at most to choose one plan of a small model.
MOST_TRIED = 400


class LeastHost:
    """The plans that a search met in one number of rounds: for each need of host memory the one of the lowest rank."""

    def __init__(self, problem: PlanningProblem, rounds: int) -> None:
        self._problem, self._rounds = problem, rounds
        # By bytes of host memory, a lower bound: the estimated rank, and the partition.
        self._met: dict[int, tuple[float, Partition]] = {}

    def add(self, rows: PartitionBatch, ranks_s: Floats) -> None:
        """Note rows [K] with their estimated ranks [K]; rows of infinite rank do not fit."""
        problem = self._problem
        found = np.flatnonzero(np.isfinite(ranks_s))
        if not len(found):
            return
        host_bytes = problem.host_bounds(rows.take(found), self._rounds)
        # By need of memory, then by rank: the rows that are faster than all that need less memory.
        order = np.lexsort((ranks_s[found], host_bytes))
        best_before = np.minimum.accumulate(np.concatenate([[np.inf], ranks_s[found][order][:-1]]))
        for index in order[ranks_s[found][order] < best_before].tolist():
            key, rank_s = int(host_bytes[index]), float(ranks_s[found][index])
            if key not in self._met or rank_s < self._met[key][0]:
                self._met[key] = rank_s, rows.partition(int(found[index]))

    def choose(self, fastest: Candidate, as_fast: float) -> Candidate:
        """Return the plan of least host memory that takes at most `as_fast` longer than `fastest`, in as many rounds."""
        if not as_fast:
            return fastest
        problem, best = self._problem, fastest
        best_bytes, most_s = problem.host_bytes(fastest), problem.rank_s(fastest) * (1 + as_fast)
        tried = 0
        for host_bytes, (estimate_s, partition) in sorted(self._met.items()):
            if host_bytes >= best_bytes or tried == MOST_TRIED:
                break
            if estimate_s > most_s:
                continue
            tried += 1
            candidate = Candidate(partition, fastest.rounds)
            if problem.rank_s(candidate) <= most_s and problem.host_bytes(candidate) < best_bytes:
                best, best_bytes = candidate, problem.host_bytes(candidate)
        return _with_joined_stages(problem, best, most_s)


def _with_joined_stages(problem: PlanningProblem, candidate: Candidate, most_s: float) -> Candidate:
    """Join backward stages, two by two, as long as the plan fits, takes at most `most_s` and needs less memory."""
    while True:
        joined = [Candidate(partition, candidate.rounds) for partition in _joins(candidate.partition)]
        fits = (
            problem.fits(batch_of([other.partition for other in joined]), candidate.rounds) if joined else ()
        )
        ranked = [
            (problem.host_bytes(other), problem.rank_s(other), index)
            for index, (other, is_fitting) in enumerate(zip(joined, fits, strict=True))
            if is_fitting
        ]
        before = problem.host_bytes(candidate)
        better = [found for found in ranked if found[0] < before and found[1] <= most_s]
        if not better:
            return candidate
        candidate = joined[min(better)[2]]


def _joins(partition: Partition) -> Iterator[Partition]:
    """Yield the partitions in which two neighbouring backward stages are one."""
    backward = partition.backward
    for index in range(len(backward) - 1):
        both = (*backward[:index], backward[index] + backward[index + 1], *backward[index + 2 :])
        yield Partition(partition.forward, partition.fused, both)
