"""The pool of host buffers: how many of which size the passes of a run hold at once, at most.

A micro-batch holds the boundaries that are kept for its backward stages, the one that is on its way, and the
kept activations of its layers, from a layer's forward stage to its backward stage. For each stage slot that may be the
first unfinished one, this module counts how far each round can be by then. The count holds for any speeds of the devices,
so the pool is never too small; in small cases, tried exhaustively by a test, it is exact. The engine reserves by this
count (`pass_buffers`), and plans are limited by it (`pool_count.py`), so neither can be larger than the other.

Shapes: N devices, S stages of a pass, L layers.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchround.pipeline.partition import Stage, StageKind

# By bytes and by size of micro-batch, the buffers that it holds after 0 to S stages.
BuffersAfter = dict[int, dict[int, NDArray[np.int64]]]
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


def held_after(held: HeldPass) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return what a micro-batch holds on the host after 0 to S stages, by layer: `[S + 1, L + 1]` each.

    First the layers whose input, or the gradient of whose input, is held; then those whose kept activations are.
    """
    stages = held.stages
    num_layers = max(stage.stop for stage in stages)
    is_cut, keeps, waiting, holding = np.zeros((4, num_layers + 1), dtype=np.bool_)
    is_cut[list(kept_cuts(stages, held.stale_layers))] = True
    # A layer of the fused stage keeps nothing on the host, and neither does a pass without backward stages.
    for stage in stages:
        if stage.kind is StageKind.BACKWARD:
            keeps[[layer for layer in held.kept if stage.start <= layer < stage.stop]] = True
    inputs, activations = np.zeros((2, len(stages) + 1, num_layers + 1), dtype=np.bool_)
    for done, stage in enumerate(stages, 1):
        layers, after = slice(stage.start, stage.stop), slice(stage.start + 1, stage.stop + 1)
        if stage.kind is StageKind.FORWARD:
            # Inputs of later backward stages are kept as soon as the forward has made them.
            waiting[after] |= is_cut[after]
            holding[layers] |= keeps[layers]
        else:
            # A stage brings all of a micro-batch's kept activations up before it sends anything down.
            waiting[layers] = holding[layers] = False
        inputs[done], activations[done] = waiting, holding
        if stage is not stages[-1]:
            # The boundary on its way, unless it is kept anyway. The last stage hands nothing on.
            inputs[done, stage.stop if stage.kind is StageKind.FORWARD else stage.start] = True
    return inputs, activations


def most_buffers(
    passes: Sequence[HeldPass],
    num_devices: int,
    bytes_of: Callable[[int, int], int],
    kept_bytes_of: Callable[[int, int], int] = lambda layer, size: 0,
    table: "WindowTable | None" = None,
) -> Counter[int]:
    """Count the buffers, by their bytes, that consecutive passes hold at once at most.

    `bytes_of(cut, size)` gives the bytes of the input of layer `cut` for a micro-batch of a size, and
    `kept_bytes_of(layer, size)` the bytes of what that layer keeps. `table` is that of passes of the same shape.
    """
    table = table or WindowTable(passes, num_devices)
    after: list[BuffersAfter] = []
    for held in passes:
        # Two steps of a run hold the same.
        same = [
            done
            for done, other in zip(after, passes, strict=False)
            if replace(other, ahead=held.ahead) == held
        ]
        after.append(same[0] if same else buffers_after(held, bytes_of, kept_bytes_of))
    return Counter({nbytes: table.most(after, nbytes) for nbytes in set().union(*after)})


def buffers_after(
    held: HeldPass, bytes_of: Callable[[int, int], int], kept_bytes_of: Callable[[int, int], int]
) -> BuffersAfter:
    """Count the buffers that a micro-batch holds after 0 to S stages, `[S + 1]`: by their bytes, then by its size."""
    found: BuffersAfter = {}
    for is_held, layer_bytes in zip(held_after(held), (bytes_of, kept_bytes_of), strict=True):
        layers = np.flatnonzero(is_held.any(axis=0))
        counts = is_held[:, layers].astype(np.int64)
        for size in {size for part in held.rounds for size in part}:
            nbytes = np.array([layer_bytes(layer, size) for layer in layers.tolist()], dtype=np.int64)
            for each in set(nbytes.tolist()):
                of_size = found.setdefault(each, {})
                of_size[size] = of_size.get(size, 0) + counts @ (nbytes == each)
    return found


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


class WindowTable:
    """The windows of passes as arrays. Passes of as many stages and rounds share it, whatever they hold."""

    def __init__(self, passes: Sequence[HeldPass], num_devices: int) -> None:
        entries = [(n, *entry) for n, window in enumerate(windows(passes, num_devices)) for entry in window]
        self._rounds = [held.rounds for held in passes]
        # Columns: window, pass, round, fewest, furthest.
        self._entries = np.array(entries).T
        self._of_pass = [np.flatnonzero(self._entries[1] == number) for number in range(len(passes))]

    def most(self, after: Sequence[BuffersAfter], nbytes: int) -> int:
        """Count the most buffers of so many bytes; `after` is what `buffers_after` gives for each pass."""
        window, _, round_index, fewest, furthest = self._entries
        counts = np.zeros(len(window), dtype=np.int64)
        maxima: dict[int, NDArray[Any]] = {}
        for of_pass, mine, rounds in zip(after, self._of_pass, self._rounds, strict=True):
            for size, held in of_pass.get(nbytes, {}).items():
                micro_batches = np.array([part.get(size, 0) for part in rounds])
                if id(held) not in maxima:
                    maxima[id(held)] = _range_maxima(held)
                most = maxima[id(held)][fewest[mine], furthest[mine]]
                counts[mine] += most * micro_batches[round_index[mine]]
        return int(np.bincount(window, counts).max())


def _range_maxima(values: NDArray[Any]) -> NDArray[Any]:
    """Tabulate the largest value between two positions, both included; rows are the first position."""
    rows = np.where(np.arange(len(values)) >= np.arange(len(values))[:, None], values, 0)
    return np.asarray(np.maximum.accumulate(rows, axis=1))


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
