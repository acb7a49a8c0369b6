"""The choice of what to keep: the most seconds saved per byte first, as much as the host, the devices and the link allow.

Keeping makes backward stages shorter, so the cuts change with it. The choice and the search for cuts alternate: a
plan that keeps nothing says how much is worth keeping, a search finds the cuts for that, and the choice is made once
more on these. More rounds keep fewer micro-batches alive, so each number of rounds has a choice of its own.

Shapes: L layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import KeptNames
from torchround.pipeline.search.partition_batch import Candidate
from torchround.pipeline.search.planning_problem import SAME_STEP, PlanningProblem
from torchround.pipeline.search.random_search import find_plan

# Amounts that are tried on one partition, from nothing to everything.
AMOUNTS = 32
# Numbers of rounds that get a search with kept activations, the most promising first.
MOST_ROUNDS = 3
# Shares of the amount that are searched if memory allows no more: with a little less, many more cuts fit.
SHARES = (1.0, 0.85, 0.6)
# Parts whose seconds per byte differ by less than this share count as equal: measured times of equal layers differ.
ALIKE = 0.1
# Multiples of this number modulo 1 are spread evenly, however many there are.
GOLDEN = (sqrt(5) - 1) / 2


@dataclass(frozen=True)
class KeptItem:
    """Parts of one layer that are kept together or not at all."""

    layer: int
    names: tuple[str, ...]
    nbytes: int
    seconds: float

    @property
    def gain(self) -> float:
        """Seconds saved per byte."""
        return self.seconds / max(self.nbytes, 1)


@dataclass(frozen=True)
class Choice:
    """A plan with what it keeps: the first `amount` items of the order of gain."""

    problem: PlanningProblem
    candidate: Candidate
    amount: int

    @property
    def step_s(self) -> float:
        return self.problem.exact_s(self.candidate)

    @property
    def host_bytes(self) -> int:
        return self.problem.host_bytes(self.candidate)


class KeptChoice:
    """The choice for one problem, which keeps nothing yet.

    `as_fast` is the share by which a step may be longer than the shortest one if that takes less host memory.
    """

    def __init__(self, problem: PlanningProblem, as_fast: float) -> None:
        self._problem, self._as_fast = problem, as_fast
        self._items = items_by_gain(problem.costs, problem.stale_layers or 0)
        self._problems: dict[int, PlanningProblem] = {0: problem}

    def improve(
        self, found: Candidate, rounds_choices: Sequence[int]
    ) -> tuple[PlanningProblem, Candidate] | None:
        """Return a plan that keeps something and is clearly faster than `found`, with its problem; None if there is none.

        Of the plans that are fast, the one of least host memory is taken, and that is `found` if it is among them.
        """
        if not self._items:
            return None
        choices = [Choice(self._problem, found, 0)]
        for rounds, amount in self._promising(found, rounds_choices):
            more = min(len(self._items), amount + len(self._items) // AMOUNTS + 1)
            is_tight = not self._fits(more, Candidate(found.partition, rounds), counts_devices=False)
            for share in SHARES if is_tight else SHARES[:1]:
                choices += self._searched(rounds, max(1, int(share * amount)))
        is_fast = self._is_fast(choices)
        fast = [self._with_less(choice, is_fast) for choice in choices if is_fast(choice)]
        best = min(fast, key=lambda choice: (choice.host_bytes, choice.step_s))
        return None if best.amount == 0 else (best.problem, best.candidate)

    def on(self, candidate: Candidate) -> PlanningProblem:
        """Return the problem that keeps what is best for a given partition, which fits without keeping anything."""
        if not self._items:
            return self._problem
        choices = [
            Choice(self._keeping(amount), candidate, amount) for amount in self._fitting_amounts(candidate)
        ]
        is_fast = self._is_fast(choices)
        return next(choice.problem for choice in choices if is_fast(choice))

    def _is_fast(self, choices: Sequence[Choice]) -> Callable[[Choice], bool]:
        """Return whether a choice is about as fast as the fastest of `choices`, the first of which keeps nothing.

        Keeping must not make a step longer, not even by the share that counts as fast. It is paid for with host memory, so
        a choice that needs more than the first one must save more than that share.
        """
        without, share = choices[0], 1 + max(self._as_fast, SAME_STEP)
        most_s = min(without.step_s, share * min(choice.step_s for choice in choices))
        clearly_s, host_bytes = without.step_s / share, without.host_bytes

        def is_fast(choice: Choice) -> bool:
            return choice.step_s <= (most_s if choice.host_bytes <= host_bytes else min(most_s, clearly_s))

        return is_fast

    def _searched(self, rounds: int, amount: int) -> Iterator[Choice]:
        """Search the cuts for an amount, choose the amount once more on them, and search again if that differs."""
        first = self._cut(rounds, amount)
        if first is not None:
            yield first
            better = self._best_amount(first.candidate)
            if abs(better - amount) > len(self._items) / AMOUNTS:
                yield Choice(self._keeping(better), first.candidate, better)
                second = self._cut(rounds, better)
                if second is not None:
                    yield second

    def _cut(self, rounds: int, amount: int) -> Choice | None:
        problem = self._keeping(amount)
        found = find_plan(problem, (rounds,), 0.0)
        return None if found is None else Choice(problem, found[0], amount)

    def _promising(self, found: Candidate, rounds_choices: Sequence[int]) -> list[tuple[int, int]]:
        """Return the numbers of rounds that may have the fastest plans, each with the amount to begin with.

        The rounds of `found` come first, then others by the time that the cuts of `found` would take if keeping made
        the devices' idle time neither longer nor shorter.
        """
        problem, scores = self._problem, []
        for rounds in rounds_choices:
            candidate = Candidate(found.partition, rounds)
            amount = self._best_amount(candidate, counts_devices=False)
            if amount:
                saved_s = problem.busy_s(candidate) - self._keeping(amount).busy_s(candidate)
                step_s = problem.exact_s(candidate) - saved_s / problem.num_devices
                scores.append((rounds != found.rounds, step_s, rounds, amount))
        return [(rounds, amount) for _, _, rounds, amount in sorted(scores)[:MOST_ROUNDS]]

    def _best_amount(self, candidate: Candidate, counts_devices: bool = True) -> int:
        """Return the amount with which the devices have least to do, waits for the link included.

        The cuts are not for that amount, so the step time says less than the devices' work does.
        """
        best, best_s = 0, float("inf")
        for amount in self._fitting_amounts(candidate, counts_devices):
            busy_s = self._keeping(amount).busy_s(candidate)
            if busy_s < best_s * (1 - SAME_STEP):
                best, best_s = amount, busy_s
        return best

    def _fitting_amounts(self, candidate: Candidate, counts_devices: bool = True) -> list[int]:
        """List amounts that fit, in ascending order and with 0."""
        number = len(self._items)
        amounts = sorted({round(number * part / AMOUNTS) for part in range(AMOUNTS + 1)})
        # More never needs less memory.
        low, high = 0, len(amounts)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._fits(amounts[middle], candidate, counts_devices)
            low, high = (middle, high) if fits else (low, middle)
        return amounts[: low + 1]

    def _fits(self, amount: int, candidate: Candidate, counts_devices: bool) -> bool:
        problem = self._keeping(amount)
        if counts_devices:
            return problem.fits_limits(candidate)
        limit = problem.limits.host_bytes
        return limit is None or problem.host_bytes(candidate) <= limit

    def _with_less(self, choice: Choice, is_fast: Callable[[Choice], bool]) -> Choice:
        """Keep as little as possible on the same cuts, so that the choice is still fast."""
        for amount in self._fitting_amounts(choice.candidate):
            if amount >= choice.amount:
                break
            less = Choice(self._keeping(amount), choice.candidate, amount)
            if is_fast(less):
                return less
        return choice

    def _keeping(self, amount: int) -> PlanningProblem:
        """Return the problem that keeps the first items."""
        if amount not in self._problems:
            kept = kept_names(self._problem.costs, self._items[:amount])
            self._problems[amount] = self._problem.keeping(kept)
        return self._problems[amount]


def items_by_gain(costs: Costs, first_layer: int = 0) -> list[KeptItem]:
    """List what layers from `first_layer` on can keep, the most seconds per byte first.

    Items of equal gain come in an order whose every beginning is spread evenly over the layers: a stage whose layers
    all keep something waits for the link before another one does.
    """
    kinds: dict[tuple[str, ...], list[KeptItem]] = {}
    for index, layer in enumerate(costs.layers[first_layer:], start=first_layer):
        parts = [part for part in layer.keepable if part.seconds > 0]
        together = [parts] if layer.keeps_whole else [[part] for part in parts]
        for group in together:
            names = tuple(part.name for part in group)
            nbytes, seconds = sum(part.nbytes for part in group), sum(part.seconds for part in group)
            if group:
                kinds.setdefault(names, []).append(KeptItem(index, names, nbytes, seconds))
    groups = [group for items in kinds.values() for group in _alike(items)]
    groups.sort(key=lambda group: -sum(item.gain for item in group) / len(group))
    return [
        group[place]
        for group in groups
        for place in sorted(range(len(group)), key=lambda place: (place + 1) * GOLDEN % 1)
    ]


def _alike(items: list[KeptItem]) -> list[list[KeptItem]]:
    """Cut items of one kind into groups of about equal gain, each in the order of its layers."""
    groups: list[list[KeptItem]] = []
    for item in sorted(items, key=lambda item: -item.gain):
        if groups and item.gain >= groups[-1][0].gain * (1 - ALIKE):
            groups[-1].append(item)
        else:
            groups.append([item])
    return [sorted(group, key=lambda item: item.layer) for group in groups]


def kept_names(costs: Costs, items: Sequence[KeptItem]) -> KeptNames:
    """Return the names by layer, in the order of each layer's parts."""
    chosen = {(item.layer, name) for item in items for name in item.names}
    return tuple(
        tuple(part.name for part in layer.keepable if (index, part.name) in chosen)
        for index, layer in enumerate(costs.layers)
    )
