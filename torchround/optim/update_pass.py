"""The plain update of one segment: chunk by chunk, decode state, apply the rule, encode, write. The reference.

It works for every rule, state format and kind of weights. The compiled pass gives the same bits (`kernel.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from torchround.optim.formats import StateFormat
from torchround.optim.optimizer import UpdateRule, rounded_numbers
from torchround.optim.split_weights import join, split

# Elements per chunk; a chunk's eight fp32 temporaries (8 MiB) stay in the cache. Measured on 2 cores (AMD
# EPYC, 2 x 1 MiB L2, 32 MiB L3) with the root as 1 / rsqrt, Mparam/s by chunk: 16 Ki 217, 64 Ki 321, 256 Ki
# 350, 1 Mi 211 on one thread; 172, 302, 536, 548 on two. A multiple of every format's block.
CHUNK_ELEMENTS = 256 * 1024


@dataclass
class UpdateBuffers:
    """The buffers of one segment, all 1-D. Those with one element per weight are of equal length.

    - `weight`: fp32, or None for split weights, which are `current` (bf16) and `residual` (int16).
    - `current`: the newest device weights; None unless they are split.
    - `written`: the device weights that the update writes, of any floating dtype. It may be `current`, or `weight` itself.
    - `parts`: the state's buffers by the names of `StatePart`.
    - `gradient`: any floating dtype, only read; `predict_` needs none. `direction`: the second input of a rule that `uses_direction`.
    """

    rule: UpdateRule
    format: StateFormat
    weight: Tensor | None
    residual: Tensor | None
    current: Tensor | None
    written: Tensor
    parts: Mapping[str, Tensor]
    gradient: Tensor | None
    direction: Tensor | None = None

    @property
    def numel(self) -> int:
        return self.written.numel()

    def weights(self, start: int, stop: int) -> Tensor:
        """Read the fp32 weights of a chunk: a view, or joined from their halves."""
        if self.weight is not None:
            return self.weight[start:stop]
        assert self.current is not None and self.residual is not None, "split weights have both halves"
        return join(self.current[start:stop], self.residual[start:stop])

    def values(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(self.format.read(value, self.parts, start, stop) for value in self.rule.values)


# Does a whole update in place, or raises before it has touched anything. The numbers are `UpdateRule.numbers`, in fp32.
UpdateKernel = Callable[[UpdateBuffers, tuple[Tensor, ...]], None]

# The buffers' ranges that a chunk writes, each with its new content.
Writes = list[tuple[Tensor, Tensor]]


@dataclass
class UpdateProgress:
    """The progress of an update of one segment, so that an interrupted one can be finished.

    Elements `[0, done)` hold the new values, the rest the old ones. An exception may also interrupt the
    copies that commit a chunk. The chunk's new content is kept here, and the next call copies all of it again.
    """

    done: int = 0
    computed: tuple[int, Writes] | None = None
    """Where the chunk begins that was computed last, and its new content."""


def update_(
    buffers: UpdateBuffers,
    *,
    lr: float,
    update: int,
    gradient_scale: float | Tensor = 1.0,
    progress: UpdateProgress | None = None,
    kernel: UpdateKernel | None = None,
    predicts: bool = False,
) -> None:
    """Update weights, state and device weights of a segment in place.

    The gradient is first multiplied by `gradient_scale` in fp32 (clip factor, 1 / loss scale). `update` counts from 1.
    With `predicts`, the device weights are the new weights moved by `UpdateRule.next_step` of the state as it is kept,
    rounded once; the weights are not split then.

    After an exception, calling again with the same arguments and the same `progress` finishes the update with the same
    bits; until then every chunk is either updated or untouched, except one whose commit itself was interrupted. Each
    update takes a fresh `progress`. Raises `ValueError` before touching anything if the buffers do not fit together.

    `kernel`, compiled for these buffers and this `predicts`, updates the whole segment at once with the same bits. It
    is not used to finish an interrupted update.
    """
    _check(buffers, update, predicts)
    progress = progress if progress is not None else UpdateProgress()
    numbers = rounded_numbers(buffers.rule.numbers(lr, update, float(gradient_scale)))
    if kernel is not None and progress.computed is None and not progress.done and buffers.numel:
        kernel(buffers, numbers)
        progress.done = buffers.numel
    while progress.done < buffers.numel:
        start = progress.done
        stop = min(start + CHUNK_ELEMENTS, buffers.numel)
        # The content of an interrupted chunk is reused: its old values may be half overwritten.
        if progress.computed is None or progress.computed[0] != start:
            progress.computed = start, _new_content(buffers, start, stop, numbers, predicts)
        commit_(progress.computed[1])
        progress.done = stop


def predict_(buffers: UpdateBuffers, *, lr: float, update: int) -> None:
    """Write the device weights that `update_` with `predicts` wrote, bit for bit, from the state that it left."""
    numbers = rounded_numbers(buffers.rule.numbers(lr, update, 1.0))
    for start in range(0, buffers.numel, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, buffers.numel)
        step = buffers.rule.next_step(buffers.values(start, stop), numbers)
        buffers.written[start:stop].copy_(step.add_(buffers.weights(start, stop)))


def look_ahead_(buffers: UpdateBuffers, gradient_scale: float) -> None:
    """Write the look-ahead of each element, rounded to the dtype of `direction`, into `direction`. Changes nothing else."""
    assert buffers.direction is not None and buffers.gradient is not None, "a look-ahead needs both"
    numbers = rounded_numbers(buffers.rule.numbers(0.0, 1, gradient_scale))
    for start in range(0, buffers.numel, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, buffers.numel)
        gradient = buffers.gradient[start:stop].float()
        look_ahead = buffers.rule.look_ahead(buffers.values(start, stop), gradient, numbers)
        buffers.direction[start:stop].copy_(look_ahead)


def commit_(writes: Writes) -> None:
    """Copy a chunk's new content into its places. Can be repeated."""
    for target, source in writes:
        target.copy_(source)


def _new_content(
    buffers: UpdateBuffers, start: int, stop: int, numbers: tuple[Tensor, ...], predicts: bool
) -> Writes:
    """Compute what the update writes into elements `[start, stop)`."""
    rule, state = buffers.rule, buffers.format
    assert buffers.gradient is not None, "checked"
    direction = buffers.direction[start:stop].float() if buffers.direction is not None else None
    gradient = buffers.gradient[start:stop].float()
    old = buffers.weights(start, stop), buffers.values(start, stop)
    weight, values = rule.new_values(*old, gradient, numbers, direction)
    writes: Writes = []
    kept_values = []
    for value, numbers_of_value in zip(rule.values, values, strict=True):
        kept = state.encode(value, numbers_of_value)
        writes += zip(state.ranges(value, buffers.parts, start, stop), kept, strict=True)
        if predicts:
            kept_values.append(state.decode(value, kept))
    written = buffers.written[start:stop]
    if buffers.weight is None:
        assert buffers.residual is not None, "split weights have a residual"
        upper, residual = split(weight)
        return [*writes, (written, upper), (buffers.residual[start:stop], residual)]
    # The step comes from the values as they are kept, so that `predict_` can repeat it.
    for_devices = rule.next_step(tuple(kept_values), numbers).add_(weight) if predicts else weight
    return [*writes, (buffers.weight[start:stop], weight), (written, for_devices)]


def _check(buffers: UpdateBuffers, update: int, predicts: bool) -> None:
    assert update >= 1, "updates count from 1"
    rule, halves = buffers.rule, (buffers.residual, buffers.current)
    flat = [buffers.written, buffers.gradient, *(halves if buffers.weight is None else (buffers.weight,))]
    flat += [buffers.direction] if rule.uses_direction else []
    parts = [part for value in rule.values for part in buffers.format.parts(value)]
    sizes = [(tensor, buffers.numel) for tensor in flat]
    sizes += [(buffers.parts.get(part.name), part.numel(buffers.numel)) for part in parts]
    # Compiled code would write beyond the end of a shorter buffer.
    if any(tensor is None or tensor.shape != (numel,) for tensor, numel in sizes):
        raise ValueError(f"a buffer of {buffers.numel} weights is missing, or of another length")
    weight, written = buffers.weight, buffers.written
    if predicts and buffers.numel and (weight is None or weight.data_ptr() == written.data_ptr()):
        raise ValueError("a prediction needs fp32 weights beside the device weights that it writes")
