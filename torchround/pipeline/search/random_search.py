"""The search for the fastest plan: every candidate for small models, seeds and random search for large ones.

A large model is searched in three passes, all ranked by the simulated step time: the paper's greedy family
and random shapes for every number of rounds, variations of the best shapes, random moves of single layers.
The random numbers have a fixed seed and the effort is counted, not timed: the same problem, the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchround.pipeline.partition import Partition
from torchround.pipeline.search.candidate_shapes import (
    CandidateShapes,
    ShapeRange,
    even_shapes,
    random_shapes,
    shaped_rows,
    varied,
)
from torchround.pipeline.search.lower_bound import largest_fused, least_work_s
from torchround.pipeline.search.partition_batch import (
    Candidate,
    Floats,
    Integers,
    PartitionBatch,
    joined,
    moved,
    rows_of,
)
from torchround.pipeline.search.planning_problem import SAME_STEP, PlanningProblem
from torchround.pipeline.search.systematic_search import (
    greedy_partition,
    greedy_partitions,
    num_partitions,
    search_all,
)

# Up to this many partitions x rounds all are tried: 8 layers and 8 micro-batches have 43696.
MOST_EXHAUSTIVE = 50_000
SEED = 2  # of five tried, the one that did best on the published models; none missed a target by much
# An `async` step that waits for its weights, not for a device, gets longer by all that the update takes more
# than the costs say. So of steps about as long the one with less idle time is taken.
IDLE_WEIGHT = {"sync": 0.0, "async": 0.5}
# CandidateShapes tried first, up to so many layers, and children of a generation, up to so many stages; fewer beyond, so
# that a plan takes tens of milliseconds. The steady state of `async` takes N + 2 times the arithmetic.
SHAPES, FULL_SHAPES_LAYERS = {"sync": 384, "async": 96}, 40
CHILDREN, FULL_CHILDREN_STAGES = 192, {"sync": 80, "async": 24}
FEWEST = 48
# The best kept from one generation to the next, and how many of them may have the same number of stages.
ELITES, ELITES_PER_SIZE = 32, 6
# What generations may cost, in slots of the longest partition; each also costs as much as these slots.
BUDGET, FIXED_COST, SHAPES_SHARE = {"sync": 1600, "async": 1000}, 60, 0.6
# Rounds of fewer micro-batches than devices are searched up to this many stages per device.
MOST_TURNS_OF_SHORT_ROUNDS = 2


@dataclass(frozen=True)
class Found:
    """The best candidate, and whether no other one can be faster."""

    candidate: Candidate
    proven: bool


def find_plan(problem: PlanningProblem, rounds_choices: Sequence[int]) -> Found | None:
    """The fastest candidate within the limits, or None where the finest partition does not fit."""
    if is_small(problem.num_layers, len(rounds_choices)):
        best = search_all(problem, rounds_choices)
        return Found(best, proven=True) if best else None
    problem.idle_weight = IDLE_WEIGHT[problem.update]
    return _search_large(problem, rounds_choices)


def is_small(num_layers: int, num_rounds_choices: int) -> bool:
    """Whether all candidates are tried."""
    return num_partitions(num_layers) * num_rounds_choices <= MOST_EXHAUSTIVE


def _search_large(problem: PlanningProblem, rounds_choices: Sequence[int]) -> Found | None:
    best = _best_whole(problem, rounds_choices)
    least_s = least_work_s(problem, largest_fused(problem)) / problem.num_devices
    enough_s = least_s * (1 + SAME_STEP)
    if best is not None and problem.rank_s(best) <= enough_s:
        return Found(best, proven=True)
    known = _Known.of(problem)
    promising = _promising(problem, known.fullest, rounds_choices)
    starts = [_Search(problem, rounds, known) for rounds in promising]
    starts = sorted((start for start in starts if len(start)), key=lambda start: start.best_s)
    if not starts:
        best = best or _anything_that_fits(problem, known, rounds_choices)
        return Found(best, proven=False) if best else None
    search = starts[0]
    spent, budget = 0, BUDGET[problem.update]
    while spent < budget and search.best_s > enough_s:
        spent += FIXED_COST + search.rounds * search.longest
        if spent < SHAPES_SHARE * budget:
            search.vary_shapes()
        else:
            search.move_layers()
    for found in (search, *starts[1:2]):
        best = found.best(best)
    assert best is not None, "a search that has started holds a partition that fits"
    return Found(best, proven=problem.exact_s(best) <= enough_s)


def _promising(problem: PlanningProblem, fullest: Partition, rounds_choices: Sequence[int]) -> Sequence[int]:
    """Rounds worth a search: of fewer micro-batches than devices only where memory allows few stages.

    Such a round cannot fill the devices unless all its stages, or those of several rounds, run at once.
    """
    few = fullest.num_stages <= MOST_TURNS_OF_SHORT_ROUNDS * problem.num_devices
    filling = [rounds for rounds in rounds_choices if _fills(problem, rounds)]
    return rounds_choices if few or not filling else filling


def _fills(problem: PlanningProblem, rounds: int) -> bool:
    """Whether every round has at least as many micro-batches as there are devices."""
    return rounds * problem.num_devices <= problem.num_micro_batches


def _best_whole(problem: PlanningProblem, rounds_choices: Sequence[int]) -> Candidate | None:
    """All layers in one stage: no recomputation, no hop, and rounds spread over the devices."""
    best: Candidate | None = None
    whole = Partition((), problem.num_layers, ())
    for rounds in rounds_choices:
        if problem.fits(rows_of([whole]), rounds)[0]:
            best = problem.better(best, Candidate(whole, rounds))
    return best


@dataclass(frozen=True)
class _Known:
    """What all numbers of rounds start from: what memory allows, the finest partition and the greedy ones."""

    fullest: Partition
    seeds: tuple[Partition, ...]

    @staticmethod
    def of(problem: PlanningProblem) -> "_Known":
        layers = problem.num_layers
        finest = Partition((1,) * (layers - 1), 1, (1,) * (layers - 1))
        # A longest stage of d takes at least M d.
        slowest_s = problem.exact_s(Candidate(finest, 1)) / problem.num_micro_batches
        greedy = greedy_partitions(problem, slowest_s)
        fullest = greedy_partition(problem, float("inf"))
        return _Known(fullest, (finest, fullest, *greedy))


def _anything_that_fits(
    problem: PlanningProblem, known: _Known, rounds_choices: Sequence[int]
) -> Candidate | None:
    """With limits so tight that no search could start: the seeds in all rounds, however slow."""
    best: Candidate | None = None
    for rounds in rounds_choices:
        for seed in known.seeds:
            if problem.fits_limits(candidate := Candidate(seed, rounds)):
                best = problem.better(best, candidate)
    return best


class _Search:
    """The best partitions so far with one number of rounds, best first, and the best shapes among them."""

    def __init__(self, problem: PlanningProblem, rounds: int, known: _Known) -> None:
        self.problem, self.rounds = problem, rounds
        self.random = np.random.default_rng(SEED)
        self.rows, self.step_s = rows_of([]), np.zeros(0)
        self.shapes: CandidateShapes | None = None
        self.shape_s = np.zeros(0)
        self.allowed = self._shape_range(known.fullest)
        number = SHAPES[problem.update] * min(1.0, FULL_SHAPES_LAYERS / problem.num_layers)
        number = max(FEWEST, number if rounds == 1 else number / 8)
        shapes = random_shapes(problem, self.random, round(number), self.allowed)
        if problem.update == "async":
            shapes = shapes.followed_by(even_shapes(problem, self.allowed))
        # In short rounds it would only take long to find the finer partitions slow.
        seeds = [part for part in known.seeds if part.num_stages <= self.allowed.most_stages]
        self._add_shapes(shapes, rows_of(seeds or [known.seeds[0], known.fullest]))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def best_s(self) -> float:
        return float(self.step_s[0])

    @property
    def longest(self) -> int:
        """Stages of the partition that has most."""
        return int(self.rows.counts.shape[1])

    def _shape_range(self, fullest: Partition) -> ShapeRange:
        """What memory allows, and how many stages are worth a trial."""
        layers, most = self.problem.num_layers, 2 * self.problem.num_layers - 1
        if self.rounds > 1 and not _fills(self.problem, self.rounds):
            most = max(3, min(most, MOST_TURNS_OF_SHORT_ROUNDS * self.problem.num_devices))
        if self.problem.update == "async":
            # Nothing is to be filled or drained, so more stages than memory asks for save nothing.
            most = min(most, max(4 * self.problem.num_devices, 3 * fullest.num_stages))
        return ShapeRange(
            num_layers=layers,
            fewest_forward=max(1, len(fullest.forward)),
            fewest_backward=max(1, len(fullest.backward)),
            most_fused=min(fullest.fused, layers - 1),
            most_stages=most,
        )

    def best(self, known: Candidate | None) -> Candidate | None:
        """The best by exact step time, no worse than `known`. Estimates are never above the exact times."""
        for row, estimate_s in enumerate(self.step_s.tolist()):
            if known is not None and estimate_s >= self.problem.rank_s(known) * (1 - SAME_STEP):
                break
            known = self.problem.better(known, Candidate(self.rows.partition(row), self.rounds))
        return known

    def vary_shapes(self) -> None:
        """One generation of shapes near the best ones."""
        if self.shapes is not None:
            parents = self.shapes.take(self._parents(len(self.shape_s)))
            self._add_shapes(varied(parents, self.random, self.allowed))

    def move_layers(self) -> None:
        """One generation of partitions a few moves from the best ones."""
        parents = self.rows.take(self._parents(len(self)))
        rows = moved(parents, self.random, 2 * self.problem.num_layers - 1)
        self._keep(rows, self._estimates(rows))

    def _parents(self, number: int) -> Integers:
        """The better the rank, the more children; fewer where the partitions are long."""
        share = FULL_CHILDREN_STAGES[self.problem.update] / self.longest
        children = max(FEWEST, round(CHILDREN * min(1.0, share)))
        return (number * self.random.random(children) ** 2).astype(np.int64)

    def _add_shapes(self, shapes: CandidateShapes, others: PartitionBatch | None = None) -> None:
        rows = shaped_rows(self.problem, shapes)
        all_rows = rows if others is None else joined([rows, others])
        step_s = self._estimates(all_rows)
        self._keep(all_rows, step_s)
        shape_s = np.concatenate([step_s[: len(rows)], self.shape_s])
        if self.shapes is not None:
            shapes = shapes.followed_by(self.shapes)
        kept = _best_distinct(shape_s, shape_s.round(12).tolist())
        self.shapes, self.shape_s = (shapes.take(kept), shape_s[kept]) if len(kept) else (None, np.zeros(0))

    def _estimates(self, rows: PartitionBatch) -> Floats:
        """Step times [K], infinite where a row does not fit."""
        step_s = np.full(len(rows), np.inf)
        fitting = np.flatnonzero(self.problem.fits(rows, self.rounds))
        if len(fitting):
            step_s[fitting] = self.problem.estimate_s(rows.take(fitting), self.rounds)
        return step_s

    def _keep(self, rows: PartitionBatch, step_s: Floats) -> None:
        step_s = np.concatenate([step_s, self.step_s])
        rows = joined([rows, self.rows])
        sizes = rows.num_stages.tolist()
        keys = [
            (fused, counts.tobytes())
            for fused, counts in zip(rows.fused_at.tolist(), rows.counts, strict=True)
        ]
        kept = _best_distinct(step_s, keys, sizes)
        rows = rows.take(kept)
        longest = int(rows.num_stages.max(initial=0))
        self.rows, self.step_s = PartitionBatch(rows.counts[:, :longest], rows.fused_at), step_s[kept]


def _best_distinct(step_s: Floats, keys: Sequence[object], sizes: Sequence[int] = ()) -> Integers:
    """Indices of the elite, best first: finite, no two with one key, not too many of one size."""
    seen: set[object] = set()
    per_size: dict[int, int] = {}
    kept: list[int] = []
    for index in np.argsort(step_s, kind="stable").tolist():
        if len(kept) == ELITES or not np.isfinite(step_s[index]):
            break
        size = sizes[index] if sizes else len(kept)
        if keys[index] in seen or per_size.get(size, 0) == ELITES_PER_SIZE:
            continue
        seen.add(keys[index])
        per_size[size] = per_size.get(size, 0) + 1
        kept.append(index)
    return np.array(kept, dtype=np.int64)
