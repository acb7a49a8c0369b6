"""The search for the fastest plan: every candidate for small models, seeds and random search for large ones.

A large model is searched in three passes, all ranked by the simulated step time: the paper's greedy packings
and random shapes for each number of rounds, variations of the best shapes, random moves of single layers. The
random numbers have fixed seeds and the effort is counted, not timed, so the same problem always gets the same
plan.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from torchround.pipeline.partition import Partition
from torchround.pipeline.search.candidate_shapes import (
    CandidateShapes,
    ShapeRange,
    even_shapes,
    random_shapes,
    shaped_partitions,
    varied,
)
from torchround.pipeline.search.least_host import AS_FAST, LeastHost
from torchround.pipeline.search.lower_bound import largest_fused, least_work_s
from torchround.pipeline.search.partition_batch import (
    Candidate,
    Floats,
    Integers,
    PartitionBatch,
    batch_of,
    joined,
    moved,
)
from torchround.pipeline.search.planning_problem import SAME_STEP, PlanningProblem
from torchround.pipeline.search.systematic_search import (
    coarse_partitions,
    greedy_partition,
    greedy_partitions,
    num_partitions,
    search_all,
)

# All plans are tried up to this many partitions x rounds: 8 layers and 8 micro-batches have 43696.
MOST_EXHAUSTIVE = 50_000
# Seeds of the searches for each number of rounds. Step times found with eight seeds on the published models
# differ by up to 4 %. In `sync` a second search makes up for most of that: 23368 in place of 23623 ms for
# Qwen3-32B within 24 GiB. A single search had found a plan of 23384 ms that needs 15 GiB, but without the
# limit. Most `async` plans have no idle time to save.
#
# With each seed: whether its search takes stages only up to the size that fits next to stages as large. Otherwise
# it takes those that fit next to small ones. That range holds faster plans, and more plans that do not fit.
SEEDS = {"sync": ((2, True), (5, False)), "async": ((2, False),)}
# An `async` step that waits for its weights, not for a device, gets longer when an update takes longer than
# the costs say. So among steps of about the same length the search prefers the one with less idle time.
IDLE_WEIGHT = {"sync": 0.0, "async": 0.5}
# Shapes tried first, for up to so many layers, and children of a generation,
# for up to so many stages. Larger models get fewer, so that a search takes tens
# of milliseconds. The steady state of `async` takes N + 2 times the arithmetic.
SHAPES, FULL_SHAPES_LAYERS = {"sync": 384, "async": 96}, 40
CHILDREN, FULL_CHILDREN_STAGES = 192, {"sync": 80, "async": 24}
FEWEST = 48
# Partitions kept from one generation to the next, and how many of them may have the same number of stages.
ELITES, ELITES_PER_SIZE = 32, 6
# What the generations for one number of rounds may cost, in stage slots of the
# longest partition. Each generation also costs as much as FIXED_COST slots. The
# first SHAPES_SHARE of the budget is for shapes, the rest for single layers.
BUDGET, FIXED_COST, SHAPES_SHARE = {"sync": 1600, "async": 1000}, 60, 0.6
# Generations shorten the first best step by up to 1.23 times (240 searches on the published models). A number
# of rounds that starts further behind is not refined. Every other one is: refining the best start alone once
# chose two rounds for GPT-OSS-20B within 24 GiB (7371 ms), although one round takes 7324 ms.
MOST_GAIN = 1.25
# Rounds of fewer micro-batches than devices are searched up to this many stages per device.
MOST_TURNS_OF_SHORT_ROUNDS = 2


def find_plan(
    problem: PlanningProblem, rounds_choices: Sequence[int], as_fast: float = AS_FAST
) -> tuple[Candidate, float | None] | None:
    """Return the plan of least host memory among the plans within the limits that are `as_fast` as the fastest.

    The second value is the step time of the fastest one if no plan can be faster than that, otherwise None.
    Returns None if no plan that fits is found.
    """
    if is_small(problem.num_layers, len(rounds_choices)):
        found = search_all(problem, rounds_choices, as_fast)
        return None if found is None else (found[1], problem.exact_s(found[0]))
    problem.idle_weight = IDLE_WEIGHT[problem.overlap]
    met = {rounds: LeastHost(problem, rounds) for rounds in rounds_choices}
    best = _search_large(problem, rounds_choices, met)
    if best is None:
        return None
    fastest, is_proven = best
    chosen = met[fastest.rounds].choose(fastest, as_fast)
    return chosen, problem.exact_s(fastest) if is_proven else None


def is_small(num_layers: int, num_rounds_choices: int) -> bool:
    """Check whether all candidates can be tried."""
    return num_partitions(num_layers) * num_rounds_choices <= MOST_EXHAUSTIVE


def _search_large(
    problem: PlanningProblem, rounds_choices: Sequence[int], met: Mapping[int, LeastHost]
) -> tuple[Candidate, bool] | None:
    """Return the fastest candidate found, and whether no other one can be faster; `met` notes all that are met."""
    best = _best_whole(problem, rounds_choices)
    least_s = least_work_s(problem, largest_fused(problem)) / problem.num_devices
    enough_s = least_s * (1 + SAME_STEP)
    if best is not None and problem.rank_s(best) <= enough_s:
        return best, True
    seeds = _seeds(problem)
    even, widest = (
        greedy_partition(problem, float("inf"), limits) for limits in (problem.even, problem.widest)
    )
    promising = _promising(problem, widest, rounds_choices)
    starts = [
        _Search(problem, met[rounds], rounds, even if is_even else widest, seeds, seed)
        for seed, is_even in SEEDS[problem.overlap]
        for rounds in promising
    ]
    starts = sorted((start for start in starts if len(start)), key=lambda start: start.best_s)
    if not starts:
        best = best or _anything_that_fits(problem, seeds, rounds_choices)
        return (best, False) if best else None
    for start in starts:
        if best is not None and start.best_s > problem.rank_s(best) * MOST_GAIN:
            break
        start.refine(enough_s)
        best = start.best(best)
        if best is not None and problem.rank_s(best) <= enough_s:
            break
    assert best is not None, "a search that has started holds a partition that fits"
    return best, problem.exact_s(best) <= enough_s


def _promising(problem: PlanningProblem, fullest: Partition, rounds_choices: Sequence[int]) -> Sequence[int]:
    """Select the numbers of rounds that are worth a search.

    Rounds of fewer micro-batches than devices cannot fill the devices unless all stages of a round, or of
    several rounds, run at once. They are worth a search only if memory allows partitions of few stages.
    """
    few = fullest.num_stages <= MOST_TURNS_OF_SHORT_ROUNDS * problem.num_devices
    filling = [rounds for rounds in rounds_choices if _fills(problem, rounds)]
    return rounds_choices if few or not filling else filling


def _fills(problem: PlanningProblem, rounds: int) -> bool:
    """Check whether each round has at least as many micro-batches as there are devices."""
    return rounds * problem.num_devices <= problem.num_micro_batches


def _best_whole(problem: PlanningProblem, rounds_choices: Sequence[int]) -> Candidate | None:
    """Try all layers in one stage: no recomputation, no hop, and rounds spread over the devices."""
    best: Candidate | None = None
    whole = Partition((), problem.num_layers, ())
    for rounds in rounds_choices:
        if problem.fits(batch_of([whole]), rounds)[0]:
            best = problem.better(best, Candidate(whole, rounds))
    return best


def _seeds(problem: PlanningProblem) -> list[Partition]:
    """List what each search starts from: the finest partition, the one of the fullest even stages, greedy packings."""
    layers = problem.num_layers
    finest = Partition((1,) * (layers - 1), 1, (1,) * (layers - 1))
    # M micro-batches take at least M times the longest stage,
    # so a longer one cannot beat the finest partition.
    slowest_s = problem.exact_s(Candidate(finest, 1)) / problem.num_micro_batches
    fullest = greedy_partition(problem, float("inf"))
    return [finest, fullest, *greedy_partitions(problem, slowest_s)]


def _anything_that_fits(
    problem: PlanningProblem, seeds: Sequence[Partition], rounds_choices: Sequence[int]
) -> Candidate | None:
    """Try the seeds and coarse plans in all numbers of rounds, however slow: limits are so tight that no search could start."""
    best: Candidate | None = None
    for rounds in rounds_choices:
        for seed in [*seeds, *coarse_partitions(problem, rounds)]:
            if problem.fits_limits(candidate := Candidate(seed, rounds)):
                best = problem.better(best, candidate)
    return best


class _Search:
    """The search with one number of rounds: the best partitions so far, best first, and the best shapes."""

    def __init__(
        self,
        problem: PlanningProblem,
        met: LeastHost,
        rounds: int,
        fullest: Partition,
        seeds: Sequence[Partition],
        random_seed: int,
    ) -> None:
        self.problem, self.met, self.rounds = problem, met, rounds
        self.random = np.random.default_rng(random_seed)
        self.batch, self.step_s = batch_of([]), np.zeros(0)
        self.shapes: CandidateShapes | None = None
        self.shape_s = np.zeros(0)
        self.allowed = self._shape_range(fullest)
        number = SHAPES[problem.overlap] * min(1.0, FULL_SHAPES_LAYERS / problem.num_layers)
        number = max(FEWEST, number if rounds == 1 else number / 8)
        shapes = random_shapes(problem, self.random, round(number), self.allowed)
        if problem.overlap == "async":
            shapes = shapes.followed_by(even_shapes(problem, self.allowed))
        # In short rounds the finer partitions are slow, and timing them takes long.
        short = [part for part in seeds if part.num_stages <= self.allowed.most_stages]
        self._add_shapes(shapes, batch_of(short or seeds[:2]))

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def best_s(self) -> float:
        return float(self.step_s[0])

    @property
    def longest(self) -> int:
        """Stages of the longest partition kept."""
        return int(self.batch.counts.shape[1])

    def _shape_range(self, fullest: Partition) -> ShapeRange:
        """Compute the range that memory allows, up to the number of stages that is worth a trial."""
        layers, most = self.problem.num_layers, 2 * self.problem.num_layers - 1
        if self.rounds > 1 and not _fills(self.problem, self.rounds):
            most = max(3, min(most, MOST_TURNS_OF_SHORT_ROUNDS * self.problem.num_devices))
        if self.problem.overlap == "async":
            # Async steps neither fill nor drain, so more stages than memory asks for save nothing.
            most = min(most, max(4 * self.problem.num_devices, 3 * fullest.num_stages))
        return ShapeRange(
            num_layers=layers,
            fewest_forward=max(1, len(fullest.forward)),
            fewest_backward=max(1, len(fullest.backward)),
            most_fused=min(fullest.fused, layers - max(1, self.problem.stale_layers or 0)),
            most_stages=most,
        )

    def best(self, known: Candidate | None) -> Candidate | None:
        """Return the best candidate by exact step time, or `known` if that is better.

        Estimates are never above the exact times, so the first estimate above the best exact time ends the
        search.
        """
        for row, estimate_s in enumerate(self.step_s.tolist()):
            if known is not None and estimate_s >= self.problem.rank_s(known) * (1 - SAME_STEP):
                break
            known = self.problem.better(known, Candidate(self.batch.partition(row), self.rounds))
        return known

    def refine(self, enough_s: float) -> None:
        """Spend the budget on generations near the best partitions; stop early once one takes `enough_s`."""
        spent, budget = 0, BUDGET[self.problem.overlap]
        while spent < budget and self.best_s > enough_s:
            spent += FIXED_COST + self.rounds * self.longest
            if spent < SHAPES_SHARE * budget:
                self.vary_shapes()
            else:
                self.move_layers()

    def vary_shapes(self) -> None:
        """Add one generation of shapes near the best ones."""
        if self.shapes is not None:
            parents = self.shapes.take(self._parents(len(self.shape_s)))
            self._add_shapes(varied(parents, self.random, self.allowed))

    def move_layers(self) -> None:
        """Add one generation of partitions a few moves from the best ones."""
        parents = self.batch.take(self._parents(len(self)))
        batch = moved(parents, self.random, 2 * self.problem.num_layers - 1)
        self._keep(batch, self._estimates(batch))

    def _parents(self, number: int) -> Integers:
        """Draw the parents' indices: better ranks get more children, long partitions fewer."""
        share = FULL_CHILDREN_STAGES[self.problem.overlap] / self.longest
        children = max(FEWEST, round(CHILDREN * min(1.0, share)))
        return (number * self.random.random(children) ** 2).astype(np.int64)

    def _add_shapes(self, shapes: CandidateShapes, others: PartitionBatch | None = None) -> None:
        """Rank the partitions of these shapes, and others beside them; keep the best partitions and shapes."""
        shaped = shaped_partitions(self.problem, shapes)
        batch = shaped if others is None else joined([shaped, others])
        step_s = self._estimates(batch)
        self._keep(batch, step_s)
        shape_s = np.concatenate([step_s[: len(shaped)], self.shape_s])
        if self.shapes is not None:
            shapes = shapes.followed_by(self.shapes)
        kept = _best_distinct(shape_s, shape_s.round(12).tolist())
        self.shapes, self.shape_s = (shapes.take(kept), shape_s[kept]) if len(kept) else (None, np.zeros(0))

    def _estimates(self, batch: PartitionBatch) -> Floats:
        """Estimate step times [K]; a partition that does not fit gets infinity."""
        step_s = np.full(len(batch), np.inf)
        fitting = np.flatnonzero(self.problem.fits(batch, self.rounds))
        if len(fitting):
            step_s[fitting] = self.problem.estimate_s(batch.take(fitting), self.rounds)
        self.met.add(batch, step_s)
        return step_s

    def _keep(self, batch: PartitionBatch, step_s: Floats) -> None:
        """Add these partitions to those kept, then drop all but the elite."""
        step_s = np.concatenate([step_s, self.step_s])
        batch = joined([batch, self.batch])
        sizes = batch.num_stages.tolist()
        keys = [
            (fused, counts.tobytes())
            for fused, counts in zip(batch.fused_at.tolist(), batch.counts, strict=True)
        ]
        kept = _best_distinct(step_s, keys, sizes)
        batch = batch.take(kept)
        longest = int(batch.num_stages.max(initial=0))
        self.batch, self.step_s = PartitionBatch(batch.counts[:, :longest], batch.fused_at), step_s[kept]


def _best_distinct(step_s: Floats, keys: Sequence[object], sizes: Sequence[int] = ()) -> Integers:
    """Return the indices of the elite, best first: finite, one per key, and not too many of one size."""
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
