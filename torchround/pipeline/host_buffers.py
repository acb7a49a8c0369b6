"""The pool of host buffers: how many of which size the passes of a run hold at once, at most.

A micro-batch holds the boundaries that are kept for its backward stages, the one that is on its way, and the
kept activations of its layers, from a layer's forward stage to its backward stage. For each stage slot that may be the first unfinished one, this module counts how far each round can be by then.
The count holds for any speeds of the devices, so the pool is never too small; in small cases, tried
exhaustively by a test, it is exact. The engine reserves by this count (`pass_buffers`), and plans are limited
by it (`pool_count.py`), so neither can be larger than the other.

Shapes: N devices, S stages of a pass.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchround.pipeline.partition import Stage, StageKind

PAGE_BYTES = 4096  # a buffer of the pool starts and ends at a page
LOSS_BYTES = 4  # the loss of a micro-batch


@dataclass(frozen=True)
class HeldPass:
    """The stages and rounds of a pass, for counting its boundaries.

    - `rounds`: for each round the number of micro-batches of each size. The caller chooses what a size stands
      for.
    - `ahead`: how many of its stages may begin before the previous pass is finished.
    - `kept`: the layers that keep activations. A layer without a backward stage of its own keeps none.
    - `stale_layers`: layers at the start of the model whose inputs are all kept for their backward (`bounded`).
    """

    stages: tuple[Stage, ...]
    rounds: tuple[Mapping[int, int], ...]
    ahead: int
    kept: frozenset[int] = frozenset()
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


def held_kept(stages: Sequence[Stage], kept: Collection[int]) -> list[list[int]]:
    """List the layers whose kept activations a micro-batch holds on the host after 0 to S stages.

    `kept` are the layers that keep any. Those of the fused stage need none, and a pass without backward stages keeps
    none at all.
    """
    again = {
        layer
        for stage in stages
        if stage.kind is StageKind.BACKWARD
        for layer in range(stage.start, stage.stop)
    }
    held: list[list[int]] = [[]]
    waiting: set[int] = set()
    for stage in stages:
        layers = again & set(kept) & set(range(stage.start, stage.stop))
        # A stage brings all of a micro-batch's kept activations up before it sends anything down.
        waiting = waiting | layers if stage.kind is StageKind.FORWARD else waiting - layers
        held.append(sorted(waiting))
    return held


def most_buffers(
    passes: Sequence[HeldPass],
    num_devices: int,
    bytes_of: Callable[[int, int], int],
    kept_bytes_of: Callable[[int, int], int] = lambda layer, size: 0,
) -> Counter[int]:
    """Count the buffers, by their bytes, that consecutive passes hold at once at most.

    `bytes_of(cut, size)` gives the bytes of the input of layer `cut` for a micro-batch of a size, and
    `kept_bytes_of(layer, size)` the bytes of what that layer keeps.
    """
    most: Counter[int] = Counter()
    tables = [buffers_after(held, bytes_of, kept_bytes_of) for held in passes]
    for window in windows(passes, num_devices):
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
    kept_bytes: Callable[[int, int], int] = lambda layer, size: 0,
) -> Counter[int]:
    """Count all pool buffers, by their bytes, of two passes that may be under way together.

    `boundary_bytes(cut, size)` and `kept_bytes(layer, size)` are as in `most_buffers`; `integer_bytes(size)`
    gives the bytes of the tokens, labels, positions and document ids of a micro-batch.
    """
    needed = most_buffers([before, this], num_devices, boundary_bytes, kept_bytes)
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


def buffers_after(
    held: HeldPass, bytes_of: Callable[[int, int], int], kept_bytes_of: Callable[[int, int], int]
) -> dict[int, list[Counter[int]]]:
    """Count the buffers, by their bytes, that a micro-batch of each size holds after 0 to S stages."""
    passed = list(
        zip(held_cuts(held.stages, held.stale_layers), held_kept(held.stages, held.kept), strict=True)
    )
    sizes = {size for round_sizes in held.rounds for size in round_sizes}
    return {
        size: [
            Counter(bytes_of(cut, size) for cut in cuts)
            + Counter(kept_bytes_of(layer, size) for layer in layers)
            for cuts, layers in passed
        ]
        for size in sizes
    }


def _most(after: Sequence[Counter[int]], fewest: int, furthest: int) -> Counter[int]:
    """Count the most buffers of each kind after at least `fewest` and at most `furthest` stages."""
    most: Counter[int] = Counter()
    for counts in after[fewest : furthest + 1]:
        most |= counts
    return most


def windows(passes: Sequence[HeldPass], num_devices: int) -> Iterator[list[tuple[int, int, int, int]]]:
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
