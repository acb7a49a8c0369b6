"""The search for a plan: even cuts as starts, then simulated annealing on the exact step time.

A step's time hardly changes with most moves of a layer, and the number of stages decides how good a plan can get. So
the search walks over plans that are a little slower, at first up to a few per cent. The random numbers have fixed seeds
and the effort is counted, not timed, so the same problem always gets the same plan.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, combinations, pairwise, product
from random import Random

from torchround.pipeline.partition import Partition
from torchround.pipeline.search.planning_problem import Candidate, PlanningProblem

# Step times closer than this share count as equal; among equals the plan with fewer rounds and stages wins.
SAME_STEP = 1e-9
# Plans whose step is longer than the fastest one's by at most this share count as fast as it.
AS_FAST = 0.01
# All plans are tried up to this many partitions x rounds: 7 layers have 1366 partitions.
MOST_EXHAUSTIVE = 1500
# What annealing may cost for one number of rounds, in stage slots. The steady state of a mode without a flush takes
# several steps; the other cost of a plan is about OTHER_SLOTS.
SLOTS, STEADY_STEPS, OTHER_SLOTS = {"sync": 100_000, "async": 60_000, "bounded": 60_000}, 8, 10
# Plans that annealing starts from, with different numbers of stages.
STARTS = 4
# The share by which a plan may be slower than the one before at first. It falls with this power of the effort left.
WARMTH, COOLING = {"sync": 0.03, "async": 0.02}, 3
# The share of moves that cut all stages of a direction anew, in each of the independent passes over the starts. Single
# passes get caught: with half the effort each, two are better than one. A step with a flush has hardly any even stages.
RECUT = {"sync": (0.0, 0.15), "async": (0.25, 0.25)}
# A number of rounds whose best start is slower than the best known plan by this factor is not searched further.
MOST_GAIN = 1.25
# Relative sizes of the fused stage and of the number of forward stages that starts have, and the growth of the number
# of stages beyond two turns of the devices.
FUSED_FACTORS, FORWARD_FACTORS, GROWTH = (0, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 2.3), (0.85, 1.0, 1.15), 1.15
# Plans of which the host memory is counted to choose the least.
MOST_COUNTED = 20


class Search:
    """The plans that a search has met, for one problem."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        # The rank of each candidate that fits, and infinity for one that does not.
        self.met: dict[Candidate, float] = {}
        self.spent = 0

    def rank(self, candidate: Candidate, most: float = float("inf")) -> float:
        """Return the rank of a candidate that fits; infinity if it does not or is above `most`."""
        if candidate not in self.met:
            self.spent += OTHER_SLOTS
            if self.problem.least_work_s(candidate) > most:
                return float("inf")
            slots = candidate.rounds * candidate.partition.num_stages
            self.spent += slots * (1 if self.problem.overlap == "sync" else STEADY_STEPS)
            # Memory takes as long to count as a step, so a plan that is too slow anyway does without.
            if (rank_s := self.problem.rank_s(candidate)) > most:
                return float("inf")
            fits = self.problem.fits_limits(candidate)
            self.met[candidate] = rank_s if fits else float("inf")
        return self.met[candidate]

    def best(self) -> Candidate | None:
        """Return the candidate of the lowest rank that fits; among equals the one of fewest rounds and stages."""
        least = min(self.met.values(), default=float("inf"))
        if least == float("inf"):
            return None
        as_good = [candidate for candidate, rank_s in self.met.items() if rank_s <= least * (1 + SAME_STEP)]
        return min(as_good, key=lambda candidate: (candidate.rounds, candidate.partition.num_stages))

    def run(self, rounds_choices: Sequence[int]) -> None:
        """Search plans of these numbers of rounds: all if there are few."""
        problem = self.problem
        if num_partitions(problem.num_layers) * len(rounds_choices) <= MOST_EXHAUSTIVE:
            problem.idle_weight = 0.0
            for rounds, partition in product(rounds_choices, all_partitions(problem.num_layers)):
                self.rank(Candidate(partition, rounds))
            return
        starts = [self.starts(rounds) for rounds in rounds_choices]
        for found in sorted(starts, key=lambda found: found[0][0]):
            if found[0][0] <= min(self.met.values()) * MOST_GAIN:
                self.anneal([candidate for _, candidate in found])

    def starts(self, rounds: int, kept: int = 0) -> list[tuple[float, Candidate]]:
        """Return the best of the starts for one number of rounds, with their ranks, all of different numbers of stages."""
        problem = self.problem
        coarse, before = coarse_partitions(problem, rounds), self.spent
        found: dict[int, tuple[float, Candidate]] = {}
        best = float("inf")
        for number, partition in enumerate(chain(coarse, even_partitions(problem))):
            # Hundreds of layers have starts of many stages, which come last.
            if number >= len(coarse) and self.spent - before > SLOTS[problem.update]:
                break
            candidate = Candidate(partition, rounds, kept)
            rank_s = self.rank(candidate, best * MOST_GAIN)
            best = min(best, rank_s)
            stages = partition.num_stages
            if stages not in found or rank_s < found[stages][0] * (1 - SAME_STEP):
                found[stages] = rank_s, candidate
        # Rounded, so that equal times in another order of additions are in the same order here.
        return sorted(found.values(), key=lambda start: float(f"{start[0]:.9g}"))[:STARTS]

    def anneal(self, starts: Sequence[Candidate]) -> None:
        """Walk from each start in turn, then once more from the best plan found; all that in independent passes."""
        problem, mode = self.problem, self.problem.overlap
        enough_s = least_step_s(problem) * (1 + SAME_STEP)
        best = min(starts, key=self.rank)
        for seed, recut in enumerate(RECUT[mode]):
            random, found = Random(seed), min(starts, key=self.rank)
            walks = [(start, 1.0, 0.5, 0.5 / len(starts)) for start in starts]
            for index in range(len(walks) + 1):
                start, warm, cool, part = walks[index] if index < len(walks) else (found, 0.5, 0.0, 0.5)
                now, now_s = start, self.rank(start)
                quota, before = part * SLOTS[problem.update] / len(RECUT[mode]), self.spent
                while (spent := self.spent - before) < quota and self.rank(best) > enough_s:
                    self.spent += 3
                    left = warm + (cool - warm) * spent / quota
                    most_s = now_s + self.rank(found) * (WARMTH[mode] * left**COOLING + SAME_STEP)
                    other = moved(problem, now, random, recut)
                    if (other_s := self.rank(other, most_s)) <= most_s:
                        now, now_s = other, other_s
                        if now_s < self.rank(found) * (1 - SAME_STEP):
                            found = now
            best = min(best, found, key=self.rank)

    def least_host(self, fastest: Candidate, is_fast: Callable[[Candidate], bool]) -> Candidate:
        """Return the plan of least host memory among those met that are fast and have as many rounds as `fastest`."""
        problem = self.problem
        fast = [
            candidate
            for candidate, rank_s in self.met.items()
            if rank_s < float("inf") and candidate.rounds == fastest.rounds and is_fast(candidate)
        ]
        fast = sorted(fast, key=self._host_estimate)[:MOST_COUNTED]
        best = min([fastest, *fast], key=problem.host_bytes)
        while True:
            # Counting takes longer than timing, so only the most promising are counted.
            joined = sorted(_smaller(problem, best), key=self._host_estimate)[:MOST_COUNTED]
            least = problem.host_bytes(best)
            smaller = (
                candidate
                for candidate in joined
                if self._host_estimate(candidate) < self._host_estimate(best)
                and is_fast(candidate)
                and problem.fits_limits(candidate)
                and problem.host_bytes(candidate) < least
            )
            if (found := next(smaller, None)) is None:
                return best
            best = found

    def _host_estimate(self, candidate: Candidate) -> int:
        """Estimate what a micro-batch keeps on the host."""
        outputs = self.problem.costs.values("boundary_bytes")
        starts = [stage.start for stage in candidate.partition.stages()[len(candidate.partition.forward) :]]
        kept = sum(item.nbytes for item in self.problem.items[: candidate.kept])
        return kept + sum(outputs[start - 1] for start in starts if start)


def find_plan(problem: PlanningProblem, rounds_choices: Sequence[int], as_fast: float) -> Candidate | None:
    """Return the plan of least host memory among the plans within the limits that are `as_fast` as the fastest.

    Returns None if no plan that fits is found.
    """
    search = Search(problem)
    search.run(rounds_choices)
    fastest = search.best()
    if fastest is None or not as_fast:
        return fastest
    most_s = problem.rank_s(fastest) * (1 + as_fast)
    return search.least_host(fastest, lambda candidate: problem.rank_s(candidate) <= most_s)


def least_step_s(problem: PlanningProblem) -> float:
    """Compute a step time that no plan can beat: the least work, spread evenly over the devices."""
    sums, most = problem.sums_of(problem.amounts[-1]), largest_fused(problem)
    return (
        problem.num_micro_batches
        * min(sums.work_s(fused) for fused in range(1, most + 1))
        / problem.num_devices
    )


def largest_fused(problem: PlanningProblem) -> int:
    """Return the most layers that memory allows in the fused stage."""
    low, high = 1, problem.num_layers
    while low < high:
        middle = (low + high + 1) // 2
        ones = (1,) * (problem.num_layers - middle)
        fits = problem.fits_device(Partition(ones, middle, ones), problem.num_micro_batches)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def num_partitions(num_layers: int) -> int:
    """Count the pairs of compositions of the layers before each possible fused stage: 1366 for 7 layers."""
    return 1 + sum(4 ** (split - 1) for split in range(1, num_layers))


def all_partitions(num_layers: int) -> Iterator[Partition]:
    """Yield every partition of the layers."""
    yield Partition((), num_layers, ())
    for split in range(1, num_layers):
        ways = [
            tuple(stop - start for start, stop in pairwise([0, *cuts, split]))
            for number in range(split)
            for cuts in combinations(range(1, split), number)
        ]
        for forward, backward in product(ways, ways):
            yield Partition(forward, num_layers - split, backward)


def even_partitions(problem: PlanningProblem) -> Iterator[Partition]:
    """Yield partitions of stages that are about equally long, the largest fused stages first."""
    sums, layers, devices = problem.sums_of(0), problem.num_layers, problem.num_devices
    forward_s, most = sums.forward_s, largest_fused(problem)
    fewest_forward, fewest_backward = fewest_stages(problem, forward_s)
    both_s = [again + back for again, back in zip(sums.recompute_s, sums.backward_s, strict=True)]
    shapes: dict[tuple[int, int, int], None] = {}
    stages = 3
    while stages < 2 * layers:
        for fused_factor, forward_factor in product(FUSED_FACTORS, FORWARD_FACTORS):
            seconds = fused_factor * (forward_s[-1] + both_s[-1]) / stages
            fused = layers - bisect_left(both_s, both_s[-1] - seconds)
            fused = min(max(1, fused), most, layers - 1)
            split = layers - fused
            share = forward_s[split] / max(forward_s[split] + both_s[split], 1e-300)
            forward = round((stages - 1) * share * forward_factor)
            forward = min(max(fewest_forward, forward, stages - 1 - split), split)
            backward = min(max(fewest_backward, stages - 1 - forward), split)
            shapes[fused, forward, backward] = None
        stages = stages + 1 if stages <= 2 * devices else round(stages * GROWTH) + 1
    for fused, forward, backward in sorted(shapes, reverse=True):
        halves = cut(forward_s, layers - fused, forward), cut(both_s, layers - fused, backward)[::-1]
        yield Partition(halves[0], fused, halves[1])


def fewest_stages(problem: PlanningProblem, sums_s: Sequence[float]) -> tuple[int, int]:
    """Count the even forward and backward stages that memory asks for at least, each beside the finest other ones."""
    split = problem.num_layers - 1
    ones = (1,) * split
    return (
        _fewest(problem, split, lambda number: Partition(cut(sums_s, split, number), 1, ones)),
        _fewest(problem, split, lambda number: Partition(ones, 1, cut(sums_s, split, number)[::-1])),
    )


def _fewest(problem: PlanningProblem, most: int, of: Callable[[int], Partition]) -> int:
    """Return the smallest number for which the partition fits a device, by halving; `most` if none is known to."""
    numbers, rounds = range(1, most), problem.num_micro_batches
    return 1 + bisect_left(numbers, True, key=lambda number: problem.fits_device(of(number), rounds))


def cut(sums_s: Sequence[float], split: int, stages: int) -> tuple[int, ...]:
    """Cut the layers `0 .. split` into stages of about equal seconds, at least one layer each."""
    ends = [0]
    for number in range(1, stages):
        wanted_s = sums_s[split] * number / stages
        end = bisect_left(sums_s, wanted_s, ends[-1], split)
        if end > ends[-1] and wanted_s - sums_s[end - 1] < sums_s[end] - wanted_s:
            end -= 1
        ends.append(min(max(end, ends[-1] + 1), split - (stages - number)))
    # Sorted, because stages that start small fill the devices sooner, and stages that end small drain them sooner.
    return tuple(sorted(stop - start for start, stop in pairwise([*ends, split])))


def coarse_partitions(problem: PlanningProblem, rounds: int) -> list[Partition]:
    """List partitions that need little host memory and fit a device, the finest one, which is last, in any case.

    Few backward stages keep few boundaries on the host, and few forward stages have few on their way. Both need room on a
    device.
    """
    layers = problem.num_layers
    ones = (1,) * (layers - 1)
    found = [Partition((), layers, ())] if problem.fits_device(Partition((), layers, ()), rounds) else []
    sums = problem.costs.running("activation_bytes")
    most = min(largest_fused(problem), layers - 1)
    for fused in sorted({most, (most + 1) // 2, 1} & set(range(1, layers)), reverse=True):
        split, finest = layers - fused, (1,) * (layers - fused)
        of_backward = partial(_coarse, sums, finest, fused)
        coarse = of_backward(_fewest(problem, split, of_backward))
        of_forward = partial(_coarser, sums, fused, coarse.backward)
        for partition in (of_forward(_fewest(problem, split, of_forward)), coarse):
            found += [partition] if problem.fits_device(partition, rounds) else []
    return [*dict.fromkeys(found), Partition(ones, 1, ones)]


def _coarse(sums: Sequence[float], forward: tuple[int, ...], fused: int, backward: int) -> Partition:
    return Partition(forward, fused, cut(sums, sum(forward), backward)[::-1])


def _coarser(sums: Sequence[float], fused: int, backward: tuple[int, ...], forward: int) -> Partition:
    return Partition(cut(sums, sum(backward), forward), fused, backward)


def moved(problem: PlanningProblem, candidate: Candidate, random: Random, recut: float) -> Candidate:
    """Return a copy with one to a few random moves.

    A move cuts a stage in two, joins two stages, changes the fused stage, or takes single layers from one stage to
    another of the same direction. It may also keep more or less.
    """
    partition, kept = candidate.partition, candidate.kept
    forward, fused, backward = list(partition.forward), partition.fused, list(partition.backward)
    if problem.items and random.random() < 0.3:
        place = problem.amounts.index(kept) + random.choice((-4, -1, 1, 4))
        kept = problem.amounts[min(max(place, 0), len(problem.amounts) - 1)]
    if not forward:
        return Candidate(partition, candidate.rounds, kept)

    def stages() -> list[int]:
        return forward if random.random() * (len(forward) + len(backward)) < len(forward) else backward

    kind = random.random()
    chosen = stages()
    index = random.randrange(len(chosen))
    if kind < recut:
        forward, fused, backward = _recut(problem, len(forward), fused, len(backward), random)
    elif kind < 0.4 and chosen[index] > 1:
        first = random.randrange(1, chosen[index])
        chosen[index : index + 1] = [first, chosen[index] - first]
    elif kind < 0.55 and index + 1 < len(chosen):
        chosen[index : index + 2] = [chosen[index] + chosen[index + 1]]
    elif kind < 0.65:
        change = random.choice((-1, 1))
        one, other = random.randrange(len(forward)), random.randrange(len(backward))
        if fused + change > 0 and forward[one] > change and backward[other] > change:
            fused += change
            forward[one] -= change
            backward[other] -= change
    for _ in range(random.randrange(0 if kind < 0.65 else 1, 1 if kind < recut else 4)):
        chosen = stages()
        source, target = random.randrange(len(chosen)), random.randrange(len(chosen))
        if chosen[source] > 1:
            chosen[source] -= 1
            chosen[target] += 1
    # Stages that start small fill the devices sooner, and stages that end small drain them sooner. So of equal layers
    # only such plans are tried, which are far fewer.
    if problem.sorts_stages:
        forward.sort()
        backward.sort(reverse=True)
    return Candidate(Partition(tuple(forward), fused, tuple(backward)), candidate.rounds, kept)


def _recut(
    problem: PlanningProblem, forward: int, fused: int, backward: int, random: Random
) -> tuple[list[int], int, list[int]]:
    """Cut the layers anew into even stages, one more or less of each kind or as many as before."""
    fused = min(max(fused + random.choice((-1, 0, 0, 1)), 1), problem.num_layers - 1)
    split, sums = problem.num_layers - fused, problem.sums_of(0)
    numbers = [
        min(max(number + round(random.gauss(0, 1 + 0.1 * number)), 1), split)
        for number in (forward, backward)
    ]
    both_s = [again + back for again, back in zip(sums.recompute_s, sums.backward_s, strict=True)]
    return (
        list(cut(sums.forward_s, split, numbers[0])),
        fused,
        list(cut(both_s, split, numbers[1])[::-1]),
    )


def _smaller(problem: PlanningProblem, candidate: Candidate) -> Iterator[Candidate]:
    """Yield candidates in which two neighbouring backward stages are one, and those that keep less."""
    partition = candidate.partition
    backward = partition.backward
    for index in range(len(backward) - 1):
        both = (*backward[:index], backward[index] + backward[index + 1], *backward[index + 2 :])
        joined = Partition(partition.forward, partition.fused, both)
        yield Candidate(joined, candidate.rounds, candidate.kept)
    for kept in problem.amounts[: problem.amounts.index(candidate.kept)]:
        yield Candidate(partition, candidate.rounds, kept)
