"""The pool's bytes for a plan of one run, as the planner limits them and `BufferReservation` reserves them.

The search asks for hundreds of partitions, so counts that differ in little are made from arrays. `host_buffers.py`
says what is counted, and why.

Shapes: S stages of a pass.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchround.pipeline.costs import Costs
from torchround.pipeline.host_buffers import (
    LOSS_BYTES,
    HeldPass,
    held_cuts,
    most_buffers,
    whole_pages,
    windows,
)
from torchround.pipeline.partition import KeptNames, Partition, Stage, StageKind, split_evenly


@dataclass(frozen=True)
class HostBatch:
    """The micro-batches of a step, as the pool holds them.

    - `sizes`: for each micro-batch an index into the next two fields.
    - `output_bytes`: for each size the output of each layer.
    - `integer_bytes`: for each size the integers of a micro-batch; None counts boundaries alone, to the byte.
    - `frozen_layers`: the layers at the start of the model that no update changes. Stages of these may begin
      before the previous pass is finished.
    - `validates`: whether passes without gradients come between steps, over batches of the same shape.
    - `keepable_bytes`: for each size and layer, the bytes of each part of the layer that it can keep, by name, as they
      are packed on their way. None are known if this is empty.
    """

    sizes: tuple[int, ...]
    output_bytes: tuple[tuple[int, ...], ...]
    integer_bytes: tuple[int, ...] | None = None
    frozen_layers: int = 0
    validates: bool = False
    keepable_bytes: tuple[tuple[Mapping[str, int], ...], ...] = ()

    def kept_bytes(self, kept: KeptNames, layer: int, size: int) -> int:
        """Return what the activations that a layer keeps take of the pool, for a micro-batch of a size."""
        if not kept or not self.keepable_bytes:
            return 0
        nbytes = sum(self.keepable_bytes[size][layer].get(name, 0) for name in kept[layer])
        return nbytes if self.integer_bytes is None else whole_pages(nbytes)

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
        # In `bounded` a stage waits for its own layers alone, and the first one for all if no layer is stale. Otherwise
        # all stages are counted as if they could run beside the previous pass: its orders are among those of `async`.
        self._overlaps = update == "async" or (update == "bounded" and stale_layers > 0)
        self._stale_layers = stale_layers
        # If all inner boundaries of a size are alike, a buffer is as good as another, and numbers are enough.
        self._is_even = all(len(set(outputs[:-1])) <= 1 for outputs in batch.output_bytes)
        self._weights: dict[int, Counter[int]] = {}
        for size in range(len(batch.output_bytes)):
            self._weights.setdefault(batch.buffer_bytes(1, size), Counter())[size] = 1
        self._tables: dict[tuple[int, int, int, int, int, bool], _WindowTable] = {}
        self._below: dict[tuple[KeptNames, int], dict[int, np.ndarray]] = {}

    def boundary_bytes(self, partition: Partition, rounds: int, kept: KeptNames = ()) -> int:
        """Compute what the boundaries and the kept activations of a plan take of the pool, in bytes.

        `kept` names what each layer keeps; it is empty if no layer keeps anything.
        """
        pairs = self.pairs(partition, rounds, keeping_layers(kept))
        if self._is_even and not any(kept):
            return self._even_bytes(partition, rounds, pairs)
        if any(kept):
            return self._bytes_by_size(pairs, kept)
        most: Counter[int] = Counter()
        for before, this in pairs:
            most |= most_buffers([before, this], self._num_devices, self.batch.buffer_bytes)
        return sum(nbytes * number for nbytes, number in most.items())

    def nbytes(self, partition: Partition, rounds: int, kept: KeptNames = ()) -> int:
        """Compute all that the pool needs for a plan, in bytes; `kept` is as in `boundary_bytes`."""
        return self.boundary_bytes(partition, rounds, kept) + self.batch.integers_and_losses_bytes()

    def pairs(
        self, partition: Partition, rounds: int, kept: frozenset[int] = frozenset()
    ) -> list[tuple[HeldPass, HeldPass]]:
        """List the pairs of consecutive passes that a run has: steps, and validations if there are any."""
        stages = partition.stages()
        forward = stages[: len(partition.forward) + 1]
        frozen = sum(stage.stop <= self.batch.frozen_layers for stage in forward)
        train = HeldPass(stages, self.batch.in_rounds(rounds), 0, kept, self._stale_layers)
        after_update, at_once = replace(train, ahead=frozen), replace(train, ahead=len(stages))
        pairs = [(train, at_once if self._overlaps else after_update)]
        if self.batch.validates:
            whole = self.batch.in_rounds(1)
            evaluated = tuple(Stage(StageKind.FORWARD, stage.start, stage.stop) for stage in forward)
            held = HeldPass(evaluated, whole, 0)
            # An evaluation reads the newest weights. It changes none, so that what follows it need not wait.
            # In `bounded` it reads stale layers of the version before, which are there already.
            ahead = len(evaluated) if self._stale_layers else frozen
            pairs += [(train, HeldPass(evaluated, whole, ahead)), (held, at_once)]
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

    def _bytes_by_size(self, pairs: Sequence[tuple[HeldPass, HeldPass]], kept: KeptNames) -> int:
        """Compute `boundary_bytes` for each size of buffer on its own: as exact as `most_buffers`, many times as fast."""
        most: Counter[int] = Counter()
        known: dict[tuple[Stage, ...], dict[int, dict[int, np.ndarray]]] = {}
        for before, this in pairs:
            for of_pass in (before, this):
                if of_pass.stages not in known:
                    known[of_pass.stages] = self._held(of_pass, kept)
            held = known[before.stages], known[this.stages]
            table = self._table(before, this)
            for nbytes in {*held[0], *held[1]} - {0}:
                counts = [of_pass.get(nbytes, {}) for of_pass in held]
                most[nbytes] = max(most[nbytes], table.most_of(counts))
        return sum(nbytes * number for nbytes, number in most.items())

    def _held(self, of_pass: HeldPass, kept: KeptNames) -> dict[int, dict[int, np.ndarray]]:
        """Count what a micro-batch holds after 0 to S stages, `[S + 1]`: by the bytes of a buffer, then by its size."""
        found: dict[int, dict[int, np.ndarray]] = {}
        cuts = held_cuts(of_pass.stages, self._stale_layers)
        # The layers below this one have been run and still need what they keep.
        ends = [
            0,
            *(stage.start if stage.kind is StageKind.BACKWARD else stage.stop for stage in of_pass.stages),
        ]
        backward = [stage for stage in of_pass.stages if stage.kind is StageKind.BACKWARD]
        split = max((stage.stop for stage in backward), default=0)
        below = np.minimum(np.array(ends), split)
        for size in {size for part in of_pass.rounds for size in part}:
            counts = [Counter(self.batch.buffer_bytes(cut, size) for cut in after) for after in cuts]
            for nbytes in {nbytes for after in counts for nbytes in after}:
                found.setdefault(nbytes, {})[size] = np.array([after[nbytes] for after in counts])
            if split:
                for nbytes, before_layer in self._kept_below(kept, size).items():
                    of_size = found.setdefault(nbytes, {})
                    of_size[size] = of_size.get(size, 0) + before_layer[below]
        return found

    def _kept_below(self, kept: KeptNames, size: int) -> dict[int, np.ndarray]:
        """Count the layers before each one that keep so many bytes of a micro-batch, `[L + 1]`."""
        key = kept, size
        if key not in self._below:
            nbytes = np.array([self.batch.kept_bytes(kept, layer, size) for layer in range(len(kept))])
            self._below[key] = {
                each: np.concatenate([[0], np.cumsum(nbytes == each)]) for each in set(nbytes.tolist()) - {0}
            }
        return self._below[key]

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
            (number, *entry) for number, window in enumerate(windows(passes, num_devices)) for entry in window
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

    def most_of(self, held: Sequence[Mapping[int, "np.ndarray"]]) -> int:
        """Count the most buffers of one size in bytes.

        For each pass, `held` gives the buffers of a micro-batch of each size after 0 to S stages, `[S + 1]`.
        """
        window, index, round_index, fewest, furthest = self._entries
        counts = np.zeros(len(window), dtype=np.int64)
        for number, by_size in enumerate(held):
            mine = index == number
            for size, of_pass in by_size.items():
                micro_batches = np.array([part.get(size, 0) for part in self._rounds[number]])
                most = _range_maxima(of_pass)[fewest[mine], furthest[mine]]
                counts[mine] += most * micro_batches[round_index[mine]]
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
    """Compute the bytes of boundaries and kept activations if all micro-batches have the length that the costs are for."""
    batch = boundaries_of(costs, num_micro_batches)
    pool = PoolCount(batch, num_devices, update, stale_layers)
    return pool.boundary_bytes(partition, rounds, costs.kept)


def boundaries_of(costs: Costs, num_micro_batches: int) -> HostBatch:
    """Return a batch whose micro-batches all have the length that the costs are for, without its integers."""
    outputs = tuple(layer.boundary_bytes for layer in costs.layers)
    return HostBatch((0,) * num_micro_batches, (outputs,), keepable_bytes=(keepable_of(costs),))


def keepable_of(costs: Costs) -> tuple[Mapping[str, int], ...]:
    """Return for each layer the bytes of the parts that it can keep, as in `HostBatch`."""
    return tuple({part.name: part.nbytes for part in layer.keepable} for layer in costs.layers)


def keeping_layers(kept: KeptNames) -> frozenset[int]:
    """Return the layers that keep anything."""
    return frozenset(layer for layer, names in enumerate(kept) if names)
