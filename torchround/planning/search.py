"""The search for a plan: even cuts as starts, then simulated annealing on the exact step time.

A step's time hardly changes with most moves of a layer, and the number of stages decides how good a plan can get. So
the search walks over plans that are a little slower, at first up to a few per cent. The random numbers have fixed seeds
and the effort is counted, not timed, so the same problem always gets the same plan.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, pairwise, product
from math import ceil
from operator import add, itemgetter
from random import Random

from torchround.planning.partition import Partition
from torchround.planning.planning_problem import Candidate, PlanningProblem
from torchround.planning.update_modes import FLUSH_EFFORT

# Step times closer than this share count as equal; among equals the plan with fewer rounds and stages wins.
SAME_STEP = 1e-9
# Plans whose step is longer than the fastest one's by at most this share count as fast as it.
AS_FAST = 0.01
# All plans are tried up to this many partitions x rounds: 7 layers have 1366 partitions.
MOST_EXHAUSTIVE = 1500
# What annealing costs at most for one number of rounds, in timed stages, if activations may be kept; otherwise it is a fact
# of the mode. A steady state takes about STEADY_STEPS steps,
# a move a third of a step and MOVE_COST, a bound half a step and MOVE_COST, a count of device memory COUNT_STEPS steps.
KEPT_EFFORT = 40_000
STEADY_STEPS, COUNT_STEPS, MOVE_COST = 3, 2, 5
# Plans that annealing starts from, with different numbers of stages, and levels: half of the walks reach the next one.
STARTS, LEVELS = 6, 4
# The share by which a plan may be slower than the one before at first, by whether steps overlap. It falls with this power of the effort left.
WARMTH, COOLING = {False: 0.03, True: 0.01}, 3
# The share of moves that cut all stages anew, and of the others, those from the slowest device to the fastest.
RECUT, DIRECTED = {False: 0.08, True: 0.25}, 0.5
# A number of rounds whose best start is slower than the best known plan by this factor is not searched further.
MOST_GAIN = 1.25
# Starts are timed until their bound is slower than the best one by this factor.
MOST_SLOWER = 1.02
# Starts have about this many sizes of the fused stage, and of each a few numbers of forward and of backward stages,
# whose stages are as long as these shares of the fused one.
FUSED_SIZES, NUMBERS, SHARES = 32, 6, {False: (0.25, 1.2), True: (0.5, 1.15)}
# Plans of which the host memory is counted to choose the least.
MOST_COUNTED = 20


class Search:
    """The plans that a search has met, for one problem."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        # The rank of each candidate that fits, and infinity for one that does not.
        self.met: dict[Candidate, float] = {}
        self.bounds: dict[Candidate, float] = {}
        self.spent = 0

    def bound(self, candidate: Candidate) -> float:
        if candidate not in self.bounds:
            self.spent += MOVE_COST + candidate.rounds * candidate.partition.num_stages // 2
            self.bounds[candidate] = self.problem.least_rank_s(candidate)
        return self.bounds[candidate]

    def rank(self, candidate: Candidate, most: float = float("inf")) -> float:
        """Return the rank of a candidate that fits; infinity if it does not or is above `most`."""
        if candidate not in self.met:
            if self.bound(candidate) > most:
                return float("inf")
            problem, stages = self.problem, candidate.partition.num_stages
            self.spent += candidate.rounds * stages * (STEADY_STEPS if problem.overlaps else 1)
            # Memory takes longer to count than a step, so a plan that is too slow anyway does without.
            if (rank_s := problem.rank_s(candidate)) > most:
                return float("inf")
            if problem.limits.device_bytes is not None:
                self.spent += COUNT_STEPS * stages
            self.met[candidate] = rank_s if problem.fits_limits(candidate) else float("inf")
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
        starts = sorted((self.starts(rounds) for rounds in rounds_choices), key=lambda found: found[0][0])
        for index, found in enumerate(starts):
            if found[0][0] <= min(self.met.values()) * MOST_GAIN:
                self.anneal([candidate for _, candidate in found], 1 / (index + 1))

    def starts(self, rounds: int, kept: int = 0) -> list[tuple[float, Candidate]]:
        """Return the best of the starts for one number of rounds, with their ranks, all of different numbers of stages."""
        problem = self.problem
        partitions = dict.fromkeys(chain(coarse_partitions(problem, rounds), even_partitions(problem)))
        candidates = [Candidate(partition, rounds, kept) for partition in partitions]
        found: dict[int, tuple[float, Candidate]] = {}
        best = float("inf")
        for candidate in sorted(candidates, key=self.bound):
            most = best * (MOST_SLOWER if len(found) >= 2 else MOST_GAIN)
            if self.bound(candidate) > most:
                break
            rank_s, stages = self.rank(candidate, most), candidate.partition.num_stages
            best = min(best, rank_s)
            if rank_s < found.get(stages, (float("inf"),))[0] * (1 - SAME_STEP):
                found[stages] = rank_s, candidate
        if not found:
            # A walk may still come within the limits, from where little memory is needed.
            return [(float("inf"), candidates[0])]
        # Rounded, so that equal times in another order of additions are in the same order here.
        return sorted(found.values(), key=lambda start: float(f"{start[0]:.9g}"))[:STARTS]

    def _with_better_numbers(self, rank_s: float, found: Candidate) -> tuple[float, Candidate]:
        """Change the fused stage and the numbers of stages by one each while that gives a faster plan of even stages."""
        while found.partition.forward:
            partition = found.partition
            shape = len(partition.forward), partition.fused, len(partition.backward)
            for change in ((0, 0, 1), (0, 0, -1), (1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0)):
                other = replace(found, partition=even_partition(self.problem, *map(add, shape, change)))
                if (other_s := self.rank(other, rank_s)) < rank_s * (1 - SAME_STEP):
                    rank_s, found = other_s, other
                    break
            else:
                break
        return rank_s, found

    def anneal(self, starts: Sequence[Candidate], share: float = 1.0) -> None:
        """Walk from all starts, then on from the better half of what they found, and so on, with this share of the effort."""
        problem, overlaps = self.problem, self.problem.overlaps
        enough_s, random = least_step_s(problem) * (1 + SAME_STEP), Random(0)
        walks = [(self.rank(start), start) for start in dict.fromkeys(starts)]
        walks = [walk for walk in walks if walk[0] < float("inf")] or walks[:1]
        if overlaps:
            walks = [self._with_better_numbers(*walk) for walk in walks]
        # Fewer micro-batches than devices leave idle time in any mode.
        few = problem.num_micro_batches < problem.num_devices
        effort = KEPT_EFFORT if problem.items else FLUSH_EFFORT if few else problem.mode.search_effort
        for level in range(LEVELS):
            quota = share * effort / LEVELS / len(walks)
            for index, (found_s, found) in enumerate(walks):
                now, now_s, before, device_s = found, found_s, self.spent, problem.device_s(found)
                while (spent := self.spent - before) < quota and found_s > enough_s:
                    self.spent += MOVE_COST + now.partition.num_stages // 3
                    left = 1 - (level + spent / quota) / LEVELS
                    most_s = now_s + found_s * (WARMTH[overlaps] * left**COOLING + SAME_STEP)
                    other = moved(problem, now, random, device_s)
                    if (other_s := self.rank(other, most_s)) <= most_s:
                        now, now_s, device_s = other, other_s, problem.device_s(other)
                        if now_s < found_s * (1 - SAME_STEP):
                            found_s, found = now_s, now
                walks[index] = found_s, found
            walks = sorted(dict.fromkeys(walks), key=itemgetter(0))[: -(-len(walks) // 2)]

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
    """Find the plan of least host memory among those that fit and are `as_fast` as the fastest; None if none fits."""
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
    work_s = min(sums.work_s(fused) for fused in range(1, most + 1))
    return problem.num_micro_batches * work_s / problem.num_devices


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
    """Yield partitions of even stages that are about as long as their fused stage, or down to a third of that."""
    sums, layers = problem.sums_of(0), problem.num_layers
    forward_s, most = sums.forward_s, min(largest_fused(problem), problem.num_layers - 1)
    both_s, fewest = sums.both_s, fewest_stages(problem, forward_s)
    for fused in range(1, most + 1, max(1, -(-most // FUSED_SIZES))):
        split = layers - fused
        fused_s = max(forward_s[-1] - forward_s[split] + sums.backward_s[-1] - sums.backward_s[split], 1e-300)
        numbers = (
            _numbers(sums_s[split] / fused_s, split, least, SHARES[problem.overlaps])
            for sums_s, least in zip((forward_s, both_s), fewest, strict=True)
        )
        for forward, backward in product(*numbers):
            yield even_partition(problem, forward, fused, backward)


def even_partition(problem: PlanningProblem, forward: int, fused: int, backward: int) -> Partition:
    """Cut the layers into about equally long stages of each direction, as near to these numbers as can be."""
    sums, fused = problem.sums_of(0), min(max(fused, 1), problem.num_layers - 1)
    split = problem.num_layers - fused
    forward, backward = (min(max(number, 1), split) for number in (forward, backward))
    return Partition(cut(sums.forward_s, split, forward), fused, cut(sums.both_s, split, backward)[::-1])


def _numbers(fused_stages: float, split: int, least: int, shares: tuple[float, float]) -> list[int]:
    """List numbers of stages for so many layers, which take as long as `fused_stages` fused stages and need `least`."""
    low, high = (min(max(least, ceil(fused_stages / share)), split) for share in reversed(shares))
    # Stages of few layers are even for few numbers of stages.
    even = {-(-split // size) for size in range(1, NUMBERS)}
    return sorted({*range(low, high + 1, -(-(high - low + 1) // NUMBERS)), *(even & {*range(low, high + 1)})})


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


def moved(
    problem: PlanningProblem, candidate: Candidate, random: Random, device_s: Sequence[float]
) -> Candidate:
    """Return a copy with one to a few random moves; `device_s` are the candidate's bounds by device.

    A move cuts a stage in two, joins two stages, changes the fused stage, or takes single layers from one stage to
    another of the same direction. It may also keep more or less.
    """
    partition, kept = candidate.partition, candidate.kept
    forward, fused, backward = list(partition.forward), partition.fused, list(partition.backward)
    if problem.items and random.random() < 0.3:
        place = problem.amounts.index(kept) + random.choice((-4, -1, 1, 4))
        kept = problem.amounts[min(max(place, 0), len(problem.amounts) - 1)]
    if not forward or (kept != candidate.kept and random.random() < 0.5):
        return Candidate(partition, candidate.rounds, kept)
    kind, chosen = random.random(), _direction(forward, backward, random)
    index = random.randrange(len(chosen))
    if kind < RECUT[problem.overlaps]:
        # Even stages, one more or less of each kind or as many as before.
        numbers = (
            len(stages) + round(random.gauss(0, 1 + 0.1 * len(stages))) for stages in (forward, backward)
        )
        forward_number, backward_number = numbers
        anew = even_partition(problem, forward_number, fused + random.choice((-1, 0, 0, 1)), backward_number)
        forward, fused, backward = list(anew.forward), anew.fused, list(anew.backward)
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
    if kind >= RECUT[problem.overlaps]:
        _take_layers(forward, backward, random, device_s, least=0 if kind < 0.65 else 1)
    # Stages that start small fill the devices sooner, and stages that end small drain them sooner. So of equal layers
    # only such plans are tried, which are far fewer.
    if problem.sorts_stages:
        forward.sort()
        backward.sort(reverse=True)
    return Candidate(Partition(tuple(forward), fused, tuple(backward)), candidate.rounds, kept)


def _direction(forward: list[int], backward: list[int], random: Random) -> list[int]:
    return forward if random.random() * (len(forward) + len(backward)) < len(forward) else backward


def _take_layers(
    forward: list[int], backward: list[int], random: Random, device_s: Sequence[float], least: int
) -> None:
    """Take a layer from a stage of the slowest device to one of the fastest, or `least` to 3 layers between any stages."""
    if len(device_s) > 1 and random.random() < DIRECTED:
        stages = _direction(forward, backward, random)
        place, devices = 0 if stages is forward else len(forward) + 1, len(device_s)
        slowest, fastest = device_s.index(max(device_s)), device_s.index(min(device_s))
        sources, targets = (
            range((device - place) % devices, len(stages), devices) for device in (slowest, fastest)
        )
        moves = [(stages, random.choice(sources), random.choice(targets))] if sources and targets else []
    else:
        chosen = [_direction(forward, backward, random) for _ in range(random.randrange(least, 4))]
        moves = [(stages, random.randrange(len(stages)), random.randrange(len(stages))) for stages in chosen]
    for stages, source, target in moves:
        if stages[source] > 1:
            stages[source] -= 1
            stages[target] += 1


def _smaller(problem: PlanningProblem, candidate: Candidate) -> Iterator[Candidate]:
    """Yield candidates in which two neighbouring backward stages are one, and those that keep less."""
    for index in range(len(candidate.partition.backward) - 1):
        yield replace(candidate, partition=candidate.partition.joined(index))
    for kept in problem.amounts[: problem.amounts.index(candidate.kept)]:
        yield replace(candidate, kept=kept)
