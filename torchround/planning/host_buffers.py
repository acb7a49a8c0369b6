"""The pool of host buffers: how many of which size the passes of a run hold at once, at most.

A micro-batch holds the boundaries that are kept for its backward stages, the one that is on its way, and the
kept activations of its layers, from a layer's forward stage to its backward stage. For each stage slot that may be the
first unfinished one, this module counts how far each round can be by then. The count holds for any speeds of the devices,
so the pool is never too small; in small cases, tried exhaustively by a test, it is exact. The engine reserves by
`most_buffers`, and plans are limited by it (`HostBatch`), so neither can be larger than the other.

Shapes: N devices, S stages of a pass.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

from torchround.planning.costs import Costs
from torchround.planning.partition import (
    KeptNames,
    Partition,
    Stage,
    StageKind,
    evaluation_stages,
    split_evenly,
)
from torchround.planning.update_modes import mode_of

PAGE_BYTES = 4096  # a buffer of the pool starts and ends at a page
LOSS_BYTES = 4  # the loss of a micro-batch

# A micro-batch's size, as the caller chooses: an index, or its shape.
Size = Any
Rounds = tuple[tuple[Size, ...], ...]  # of a pass
# How many micro-batches have a range of progress. A range is (pass, size, fewest, furthest): the stages that they have
# finished at least, and begun at most.
Window = frozenset[tuple[tuple[int, Size, int, int], int]]


@dataclass(frozen=True)
class HeldPass:
    """The stages of a pass, and its rounds by the sizes of their micro-batches, for counting its buffers.

    - `ahead`: how many of its stages may begin before the previous pass is finished.
    - `stale_layers`: layers at the start of the model whose inputs are all kept for their backward (`bounded`).
    """

    stages: tuple[Stage, ...]
    rounds: Rounds
    ahead: int = 0
    stale_layers: int = 0


def restarted_layers(stage: Stage, stale_layers: int) -> range:
    """Return layers inside a backward stage that restart at their forward's input, as the layer below has changed since."""
    restarts = stage.kind is StageKind.BACKWARD
    return range(stage.start + 1, min(stage.stop, stale_layers + 1) if restarts else 0)


def forward_inputs(stages: Sequence[Stage]) -> frozenset[int]:
    """Find the layers at which a forward or fused stage takes over from the previous stage."""
    starts = (stage.start for stage in stages if stage.kind is not StageKind.BACKWARD)
    return frozenset(start for start in starts if start > 0)


def kept_cuts(stages: Sequence[Stage], stale_layers: int = 0) -> frozenset[int]:
    """Return the layers whose input is kept for a backward stage or a restart; the fused stage reads its input at once."""
    backward = [stage for stage in stages if stage.kind is StageKind.BACKWARD]
    restarts = (restarted_layers(stage, stale_layers) for stage in backward)
    return frozenset(stage.start for stage in backward).union(*restarts) - {0}


# The first pass that holds the same in the same stages, their number, the rounds, and how many of the stages may begin
# before the previous pass is finished.
Shape = tuple[int, int, Rounds, int]


def windows(shapes: tuple[Shape, ...], num_devices: int) -> frozenset[Window]:
    """Find how far the micro-batches of consecutive passes can be, for each slot that may be the first unfinished one.

    A slot begins after the previous slot of its device has ended and the previous stage has begun; it ends
    after both have ended. A round's first stage has no previous stage, so a device may run ahead with the
    first stages of many rounds.
    """
    sizes = [[Counter(part) for part in rounds] for _, _, rounds, _ in shapes]
    slots = [
        (number, part, stage)
        for number, (_, num_stages, rounds, _) in enumerate(shapes)
        for part in range(len(rounds))
        for stage in range(num_stages)
    ]
    found = set()
    for first, (number, part, finished) in enumerate(slots):
        furthest = {(number, part): finished + 1}
        begun, ended = [True], [False]  # from slot `first` on
        for slot in range(first + 1, len(slots)):
            other, its_part, stage = slots[slot]
            begins = (
                (other == number or stage < shapes[other][3])
                and (slot - num_devices < first or ended[slot - num_devices - first])
                and (not stage or begun[-1])
            )
            ended.append(begins and (not stage or ended[-1]))
            begun.append(begins)
            if begins:
                furthest[other, its_part] = stage + 1
            elif not any(begun[-num_devices:]):
                # A slot needs its device's slot N before it or the stage before it, so no later one can begin.
                break
        window: Counter[tuple[int, Size, int, int]] = Counter()
        for (other, its_part), most in furthest.items():
            fewest = finished if (other, its_part) == (number, part) else 0
            for size, count in sizes[other][its_part].items():
                window[shapes[other][0], size, fewest, most] += count
        found.add(frozenset(window.items()))
    return frozenset(found)


def most_buffers(
    passes: Sequence[HeldPass],
    num_devices: int,
    boundary_bytes: Callable[[int, Size], int],
    kept_bytes: Callable[[int, Size], int] = lambda layer, size: 0,
    windows_of: Callable[[tuple[Shape, ...], int], frozenset[Window]] = windows,
) -> Counter[int]:
    """Count the buffers for activations, by their bytes, that consecutive passes hold at once at most.

    `boundary_bytes(cut, size)` gives the bytes of the input of layer `cut` for a micro-batch of a size, and
    `kept_bytes(layer, size)` the bytes of what that layer keeps. `windows_of` remembers the answers of `windows`.
    """
    stages = [held.stages for held in passes]
    shapes = tuple((stages.index(held.stages), len(held.stages), held.rounds, held.ahead) for held in passes)
    found = windows_of(shapes, num_devices)
    ranges = {each for window in found for each, _ in window}
    held_by = {
        (number, size): held_after(passes[number], size, boundary_bytes, kept_bytes)
        for number, size in {(number, size) for number, size, _, _ in ranges}
    }
    needed: Counter[int] = Counter()
    for nbytes in set().union(*held_by.values()):
        most = {
            (number, size, fewest, furthest): max(counts[fewest : furthest + 1])
            for number, size, fewest, furthest in ranges
            if (counts := held_by[number, size].get(nbytes))
        }
        needed[nbytes] = max(sum(count * most.get(each, 0) for each, count in window) for window in found)
    return needed


def held_after(
    held: HeldPass,
    size: Size,
    boundary_bytes: Callable[[int, Size], int],
    kept_bytes: Callable[[int, Size], int],
) -> dict[int, list[int]]:
    """Count the buffers that a micro-batch of a size holds after 0 to S stages, by their bytes."""
    stages, cuts = held.stages, kept_cuts(held.stages, held.stale_layers)
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    for index, stage in enumerate(stages):
        of_layer = forward if stage.kind is StageKind.FORWARD else backward
        of_layer.update(dict.fromkeys(range(stage.start, stage.stop), index))
    # For each buffer its bytes, and the numbers of stages after which it is first and last held. A stage brings all of a
    # micro-batch's kept activations up before it sends anything down.
    spans = [(boundary_bytes(cut, size), forward[cut - 1] + 1, backward[cut]) for cut in cuts]
    # A layer of the fused stage keeps nothing on the host, and neither does a pass without backward stages.
    spans += [
        (kept_bytes(layer, size), index + 1, backward[layer])
        for layer, index in forward.items()
        if layer in backward
    ]
    # The boundary on its way, unless it is kept anyway. The last stage hands nothing on.
    for done, stage in enumerate(stages[:-1], 1):
        if stage.kind is not StageKind.FORWARD:
            spans.append((boundary_bytes(stage.start, size), done, done))
        elif stage.stop not in cuts:
            spans.append((boundary_bytes(stage.stop, size), done, done))
    changes: dict[int, list[int]] = {}
    for nbytes, first, last in spans:
        if nbytes:
            of_bytes = changes.setdefault(nbytes, [0] * (len(stages) + 2))
            of_bytes[first] += 1
            of_bytes[last + 1] -= 1
    return {nbytes: list(accumulate(of_bytes)) for nbytes, of_bytes in changes.items()}


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class HostBatch:
    """The micro-batches of a run's steps, as the pool holds them.

    - `sizes`: for each micro-batch an index into the next two fields.
    - `costs`: for each size the costs of the layers, with what they can keep.
    - `integer_bytes`: for each size the integers of a micro-batch; None counts activations alone, to the byte.
    - `frozen_layers`: the layers at the start of the model that no update changes. Stages of these may begin
      before the previous pass is finished.
    - `validates`: whether passes without gradients come between steps, over batches of the same shape.
    """

    sizes: tuple[int, ...]
    costs: tuple[Costs, ...]
    integer_bytes: tuple[int, ...] | None = None
    frozen_layers: int = 0
    validates: bool = False

    def boundary_bytes(
        self,
        partition: Partition,
        rounds: int,
        num_devices: int,
        update: str,
        stale_layers: int = 0,
        kept: KeptNames = (),
    ) -> int:
        """Compute what boundaries and kept activations take of the pool, in bytes. `kept` names what layers keep."""
        most: Counter[int] = Counter()
        for pair in self._pairs(partition, rounds, update, stale_layers):
            most |= most_buffers(
                pair,
                num_devices,
                lambda cut, size: self._taken(self.costs[size].layers[cut - 1].boundary_bytes),
                lambda layer, size: self.kept_bytes(kept, layer, size),
                self._windows,
            )
        return sum(nbytes * number for nbytes, number in most.items())

    def kept_bytes(self, kept: KeptNames, layer: int, size: int) -> int:
        names = kept[layer] if kept else ()
        parts = self.costs[size].layers[layer].keepable if names else ()
        return self._taken(sum(part.nbytes for part in parts if part.name in names))

    def integers_and_losses_bytes(self) -> int:
        """Compute what the integers and losses of two passes take of the pool: those are the same in each plan."""
        if self.integer_bytes is None:
            return 0
        return 2 * sum(whole_pages(self.integer_bytes[size]) + whole_pages(LOSS_BYTES) for size in self.sizes)

    def _taken(self, nbytes: int) -> int:
        return nbytes if self.integer_bytes is None else whole_pages(nbytes)

    @cached_property
    def _windows(self) -> Callable[[tuple[Shape, ...], int], frozenset[Window]]:
        # The search asks for hundreds of partitions, and those of as many stages have the same windows.
        return cache(windows)

    def _pairs(
        self, partition: Partition, rounds: int, update: str, stale_layers: int
    ) -> list[tuple[HeldPass, HeldPass]]:
        """List the pairs of consecutive passes that a run has: steps, and validations if there are any."""
        # With updates by layer, a stage waits for its own layers alone, and the first one for all if no layer is stale.
        # Otherwise all stages are counted as if they could run beside the previous pass, as with two versions.
        overlaps = mode_of(update).overlaps(stale_layers)
        parts = split_evenly(len(self.sizes), rounds)
        in_rounds = tuple(tuple(self.sizes[index] for index in part) for part in parts)
        evaluated = evaluation_stages(partition)
        frozen = sum(stage.stop <= self.frozen_layers for stage in evaluated)
        train = HeldPass(partition.stages(), in_rounds, stale_layers=stale_layers)
        at_once = replace(train, ahead=partition.num_stages)
        pairs = [(train, at_once if overlaps else replace(train, ahead=frozen))]
        if self.validates:
            # An evaluation reads the newest weights. It changes none, so that what follows it need not wait.
            # In `bounded` it reads stale layers of the version before, which are there already.
            ahead = len(evaluated) if stale_layers else frozen
            held = HeldPass(evaluated, (self.sizes,))
            pairs += [(train, replace(held, ahead=ahead)), (held, at_once)]
            pairs += [(held, replace(held, ahead=len(evaluated)))]
        return pairs
