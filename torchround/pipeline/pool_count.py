"""The pool's bytes for a plan of one run, as the planner limits them and `BufferReservation` reserves them.

`host_buffers.py` says what is counted, and why.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torchround.pipeline.costs import Costs
from torchround.pipeline.host_buffers import LOSS_BYTES, HeldPass, WindowTable, most_buffers, whole_pages
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
        # The search asks for hundreds of partitions, and those of as many stages share a table.
        self._tables: dict[tuple[int, int, int, int, int, bool], WindowTable] = {}

    def boundary_bytes(self, partition: Partition, rounds: int, kept: KeptNames = ()) -> int:
        """Compute what the boundaries and the kept activations of a plan take of the pool, in bytes.

        `kept` names what each layer keeps; it is empty if no layer keeps anything.
        """
        most: Counter[int] = Counter()
        for before, this in self.pairs(partition, rounds, keeping_layers(kept)):
            most |= most_buffers(
                (before, this),
                self._num_devices,
                self.batch.buffer_bytes,
                lambda layer, size: self.batch.kept_bytes(kept, layer, size),
                self._table(before, this),
            )
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

    def _table(self, before: HeldPass, this: HeldPass) -> WindowTable:
        shape = (len(before.stages), len(this.stages), len(before.rounds), len(this.rounds))
        key = (*shape, this.ahead, before.stages[-1].kind is StageKind.FORWARD)
        if key not in self._tables:
            self._tables[key] = WindowTable((before, this), self._num_devices)
        return self._tables[key]


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
