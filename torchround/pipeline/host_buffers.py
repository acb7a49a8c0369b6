"""The pool of host buffers: how many of which size the passes of a run hold at once, at most.

A micro-batch holds the boundaries that are kept for its backward stages, and the one that is on its way. For
each stage slot that may be the first unfinished one, this module counts how far each round can be by then.
The count holds for any speeds of the devices, so the pool is never too small; in small cases, tried
exhaustively by a test, it is exact. The engine reserves by this count (`pass_buffers`), and plans are limited
by it (`PoolCount`), so neither can be larger than the other.

Shapes: N devices, S stages of a pass.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import Partition, Stage, StageKind, split_evenly

PAGE_BYTES = 4096  # a buffer of the pool starts and ends at a page
LOSS_BYTES = 4  # the loss of a micro-batch


@dataclass(frozen=True)
class HeldPass:
    """The stages and rounds of a pass, for counting its boundaries.

    - `rounds`: for each round the number of micro-batches of each size. The caller chooses what a size stands
      for.
    - `ahead`: how many of its stages may begin before the previous pass is finished.
    - `stale_layers`: layers at the start of the model whose inputs are all kept for their backward (`bounded`).
    """

    stages: tuple[Stage, ...]
    rounds: tuple[Mapping[int, int], ...]
    ahead: int
    stale_layers: int = 0


def kept_cuts(stages: Sequence[Stage], stale_layers: int = 0) -> frozenset[int]:
    """Return the layers whose input is kept from forward to backward.

    A backward stage takes the input of its first layer. In `bounded` it also takes the input of each layer up to
    layer `stale_layers`: the forward has computed those inputs with older weights.
    """
    backward = [stage for stage in stages if stage.kind is StageKind.BACKWARD]
    split = max((stage.stop for stage in backward), default=0)
    starts = {stage.start for stage in backward}
    return frozenset(starts.union(range(1, min(stale_layers + 1, split)))) - {0}


def held_cuts(stages: Sequence[Stage], stale_layers: int = 0) -> list[list[int]]:
    """List the cuts that a micro-batch holds on the host after 0 to S stages.

    A cut is the index of the layer whose input, or the gradient of whose input, is held. `stale_layers` is as in
    `kept_cuts`.
    """
    kept = kept_cuts(stages, stale_layers)
    held: list[list[int]] = [[]]
    waiting: set[int] = set()
    for stage in stages:
        if stage.kind is StageKind.FORWARD:
            # Inputs of later backward stages are kept as soon as the forward has made them.
            waiting |= {cut for cut in kept if stage.start < cut <= stage.stop}
            under_way = stage.stop
        else:
            waiting.difference_update(range(stage.start, stage.stop))
            under_way = stage.start
        # A boundary that is kept anyway needs no second buffer on its way; the last stage hands nothing on.
        is_new = under_way not in waiting and stage is not stages[-1]
        held.append(sorted([*waiting, *([under_way] if is_new else [])]))
    return held


def most_buffers(
    passes: Sequence[HeldPass], num_devices: int, bytes_of: Callable[[int, int], int]
) -> Counter[int]:
    """Count the buffers, by their bytes, that consecutive passes hold at once at most.

    `bytes_of(cut, size)` gives the bytes of the input of layer `cut` for a micro-batch of a size.
    """
    most: Counter[int] = Counter()
    tables = [_buffers_after(held, bytes_of) for held in passes]
    for window in _windows(passes, num_devices):
        needed: Counter[int] = Counter()
        for index, round_index, fewest, furthest in window:
            for size, number in passes[index].rounds[round_index].items():
                for nbytes, buffers in _most(tables[index][size], fewest, furthest).items():
                    needed[nbytes] += number * buffers
        most |= needed
    return most


def pass_buffers(
    before: HeldPass,
    this: HeldPass,
    num_devices: int,
    boundary_bytes: Callable[[int, int], int],
    integer_bytes: Callable[[int], int],
) -> Counter[int]:
    """Count all pool buffers, by their bytes, of two passes that may be under way together.

    `boundary_bytes(cut, size)` is as in `most_buffers`; `integer_bytes(size)` gives the bytes of the tokens,
    labels, positions and document ids of a micro-batch.
    """
    needed = most_buffers([before, this], num_devices, boundary_bytes)
    # One buffer for each micro-batch's integers and loss: all of a pass are on the host at once.
    for held in (before, this):
        for sizes in held.rounds:
            for size, number in sizes.items():
                needed[integer_bytes(size)] += number
                needed[LOSS_BYTES] += number
    return needed


def in_whole_pages(buffers: Mapping[int, int]) -> Counter[int]:
    """Count the buffers by what each takes of the pool, which is whole pages."""
    pages: Counter[int] = Counter()
    for nbytes, number in buffers.items():
        pages[whole_pages(nbytes)] += number
    return pages


def whole_pages(nbytes: int) -> int:
    """Round bytes up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class HostBatch:
    """The micro-batches of a step, as the pool holds them.

    - `sizes`: for each micro-batch an index into the next two fields.
    - `output_bytes`: for each size the output of each layer.
    - `integer_bytes`: for each size the integers of a micro-batch; None counts boundaries alone, to the byte.
    - `frozen_layers`: the layers at the start of the model that no update changes. Stages of these may begin
      before the previous pass is finished.
    - `validates`: whether passes without gradients come between steps, over batches of the same shape.
    """

    sizes: tuple[int, ...]
    output_bytes: tuple[tuple[int, ...], ...]
    integer_bytes: tuple[int, ...] | None = None
    frozen_layers: int = 0
    validates: bool = False

    def integers_and_losses_bytes(self) -> int:
        """Compute what the integers and losses of two passes take of the pool: those are the same in each plan."""
        if self.integer_bytes is None:
            return 0
        return 2 * sum(whole_pages(self.integer_bytes[size]) + whole_pages(LOSS_BYTES) for size in self.sizes)

    def buffer_bytes(self, cut: int, size: int) -> int:
        """Return what the input of layer `cut` takes of the pool, for a micro-batch of a size."""
        nbytes = self.output_bytes[size][cut - 1]
        return nbytes if self.integer_bytes is None else whole_pages(nbytes)

    def in_rounds(self, rounds: int) -> tuple[Counter[int], ...]:
        """Count the micro-batches of each size in each round."""
        parts = split_evenly(len(self.sizes), rounds)
        return tuple(Counter(self.sizes[index] for index in part) for part in parts)


class PoolCount:
    """The bytes that the pool needs for a plan of one run, as `BufferReservation` reserves them."""

    def __init__(self, batch: HostBatch, num_devices: int, update: str, stale_layers: int = 0) -> None:
        self.batch = batch
        self._num_devices = num_devices
        # In `bounded` a stage waits for its own layers alone. All stages are counted as if they could run beside the
        # previous pass: its order is one of the orders of `async`.
        self._overlaps = update != "sync"
        self._stale_layers = stale_layers
        # If all inner boundaries of a size are alike, a buffer is as good as another, and numbers are enough.
        self._is_even = all(len(set(outputs[:-1])) <= 1 for outputs in batch.output_bytes)
        self._weights: dict[int, Counter[int]] = {}
        for size in range(len(batch.output_bytes)):
            self._weights.setdefault(batch.buffer_bytes(1, size), Counter())[size] = 1
        self._tables: dict[tuple[int, int, int, int, int, bool], _WindowTable] = {}

    def boundary_bytes(self, partition: Partition, rounds: int) -> int:
        """Compute what the boundaries of a plan take of the pool, in bytes."""
        pairs = self._pairs(partition, rounds)
        if self._is_even:
            return self._even_bytes(partition, rounds, pairs)
        most: Counter[int] = Counter()
        for before, this in pairs:
            most |= most_buffers([before, this], self._num_devices, self.batch.buffer_bytes)
        return sum(nbytes * number for nbytes, number in most.items())

    def nbytes(self, partition: Partition, rounds: int) -> int:
        """Compute all that the pool needs for a plan, in bytes."""
        return self.boundary_bytes(partition, rounds) + self.batch.integers_and_losses_bytes()

    def _pairs(self, partition: Partition, rounds: int) -> list[tuple[HeldPass, HeldPass]]:
        """List the pairs of consecutive passes that a run has: steps, and validations if there are any."""
        stages = partition.stages()
        forward = stages[: len(partition.forward) + 1]
        frozen = sum(stage.stop <= self.batch.frozen_layers for stage in forward)
        train = HeldPass(stages, self.batch.in_rounds(rounds), 0, self._stale_layers)
        after_update, at_once = replace(train, ahead=frozen), replace(train, ahead=len(stages))
        pairs = [(train, at_once if self._overlaps else after_update)]
        if self.batch.validates:
            whole = self.batch.in_rounds(1)
            evaluated = tuple(Stage(StageKind.FORWARD, stage.start, stage.stop) for stage in forward)
            held = HeldPass(evaluated, whole, 0)
            # An evaluation reads the newest weights. It changes none, so that what follows it need not wait.
            pairs += [(train, HeldPass(evaluated, whole, frozen)), (held, at_once)]
            pairs += [(held, HeldPass(evaluated, whole, len(evaluated)))]
        return pairs

    def _even_bytes(
        self, partition: Partition, rounds: int, pairs: Sequence[tuple[HeldPass, HeldPass]]
    ) -> int:
        """Compute `boundary_bytes` from numbers of boundaries: many times as fast, for the search."""
        held = {
            stages: np.array([len(cuts) for cuts in held_cuts(stages, self._stale_layers)])
            for stages in {stages for pair in pairs for stages in (pair[0].stages, pair[1].stages)}
        }
        total = 0
        for nbytes, sizes in self._weights.items():
            most = 0
            for before, this in pairs:
                most = max(
                    most, self._table(before, this).most((held[before.stages], held[this.stages]), sizes)
                )
            total += nbytes * most
        return total

    def _table(self, before: HeldPass, this: HeldPass) -> "_WindowTable":
        """Return the table of a pair of passes: partitions of as many stages share it."""
        shape = (len(before.stages), len(this.stages), len(before.rounds), len(this.rounds))
        key = (*shape, this.ahead, before.stages[-1].kind is StageKind.FORWARD)
        if key not in self._tables:
            self._tables[key] = _WindowTable((before, this), self._num_devices)
        return self._tables[key]


class _WindowTable:
    """The windows of two passes as arrays, one entry for each round of each window."""

    def __init__(self, passes: tuple[HeldPass, HeldPass], num_devices: int) -> None:
        entries = [
            (number, *entry)
            for number, window in enumerate(_windows(passes, num_devices))
            for entry in window
        ]
        self._rounds = [held.rounds for held in passes]
        # Rows: window, pass, round, fewest, furthest. Windows of one shape come several times in a row.
        self._entries = np.array(entries).T

    def most(self, held: tuple["np.ndarray", "np.ndarray"], sizes: Mapping[int, int]) -> int:
        """Count the most boundaries of these sizes; `held` [S + 1] are a micro-batch's after 0 to S stages."""
        window, index, round_index, fewest, furthest = self._entries
        counts = np.zeros(len(window), dtype=np.int64)
        for number, of_pass in enumerate(held):
            mine = index == number
            most = _range_maxima(of_pass)
            micro_batches = np.array(
                [sum(count for size, count in part.items() if size in sizes) for part in self._rounds[number]]
            )
            counts[mine] = most[fewest[mine], furthest[mine]] * micro_batches[round_index[mine]]
        return int(np.bincount(window, counts).max())


def _range_maxima(values: "np.ndarray") -> "np.ndarray":
    """Tabulate the largest value between two positions, both included; rows are the first position."""
    rows = np.where(np.arange(len(values)) >= np.arange(len(values))[:, None], values, 0)
    return np.asarray(np.maximum.accumulate(rows, axis=1))


def boundary_pool_bytes(
    partition: Partition,
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    rounds: int,
    update: str,
    stale_layers: int = 0,
) -> int:
    """Compute the bytes of the boundaries of a plan if all micro-batches have the length that the costs are for."""
    batch = boundaries_of(costs, num_micro_batches)
    return PoolCount(batch, num_devices, update, stale_layers).boundary_bytes(partition, rounds)


def boundaries_of(costs: Costs, num_micro_batches: int) -> HostBatch:
    """Return a batch whose micro-batches all have the length that the costs are for, without its integers."""
    return HostBatch((0,) * num_micro_batches, (tuple(layer.boundary_bytes for layer in costs.layers),))


def _buffers_after(held: HeldPass, bytes_of: Callable[[int, int], int]) -> dict[int, list[Counter[int]]]:
    """Count the buffers, by their bytes, that a micro-batch of each size holds after 0 to S stages."""
    cuts = held_cuts(held.stages, held.stale_layers)
    sizes = {size for round_sizes in held.rounds for size in round_sizes}
    return {size: [Counter(bytes_of(cut, size) for cut in passed) for passed in cuts] for size in sizes}


def _most(buffers_after: Sequence[Counter[int]], fewest: int, furthest: int) -> Counter[int]:
    """Count the most buffers of each kind after at least `fewest` and at most `furthest` stages."""
    most: Counter[int] = Counter()
    for counts in buffers_after[fewest : furthest + 1]:
        most |= counts
    return most


def _windows(passes: Sequence[HeldPass], num_devices: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield the rounds that have begun, for each slot that may be the first unfinished one.

    A round is (pass, round, fewest, furthest): how many of its stages are finished at least, and begun at
    most.
    """
    slots = [
        (index, number, stage)
        for index, held in enumerate(passes)
        for number in range(len(held.rounds))
        for stage in range(len(held.stages))
    ]
    for position, (index, number, finished) in enumerate(slots):
        furthest = {(index, number): finished + 1}
        for slot in _reachable(passes, slots, position, num_devices):
            begun_index, begun_number, stage = slots[slot]
            furthest[begun_index, begun_number] = stage + 1
        yield [
            (*begun, finished if begun == (index, number) else 0, passed)
            for begun, passed in furthest.items()
        ]


def _reachable(
    passes: Sequence[HeldPass], slots: Sequence[tuple[int, int, int]], position: int, num_devices: int
) -> Iterator[int]:
    """Yield the slots after `position` that can begin before it has ended.

    A slot begins after the previous slot of its device has ended and the previous stage has begun; it ends
    after both have ended. A round's first stage has no previous stage, so a device may run ahead with the
    first stages of many rounds.
    """
    unended = {position}
    not_begun: set[int] = set()
    for slot in range(position + 1, len(slots)):
        index, _, stage = slots[slot]
        too_early = index != slots[position][0] and stage >= passes[index].ahead
        if too_early or slot - num_devices in unended or (stage and slot - 1 in not_begun):
            not_begun.add(slot)
            # A slot needs its device's slot N before it or the stage
            # before it; if N in a row cannot begin, no later one can.
            if all(slot - back in not_begun for back in range(num_devices)):
                return
        else:
            yield slot
        if slot in not_begun or (stage and slot - 1 in unended):
            unended.add(slot)
