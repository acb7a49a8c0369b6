"""The forms in which checkpoints hold weights and optimizer state, and the ways from one to another.

    weights      weights/<p> F32                        residual/<p> I16 beside weights/<p> BF16 (split)
    each value   exp_avg/<p> F32 (exact)                exp_avg/<p> I8 or U8 beside exp_avg_scale/<p> BF16 (compact)
    older        master_1_old/<p> in the training dtype

A run reads any form into what its own store keeps. Split weights and fp32 weights hold the same bits. A value that
becomes compact, or was compact, is rounded to 8 bits. Older device weights are rounded to the run's dtype. All conversions work piece by piece: at most a value's scales
wait in memory, which are one byte for each 64 elements of a parameter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from torchround.checkpoint import Conversion, Layout, Receiver
from torchround.engine.store.bundles import OLDER_WEIGHTS, RESIDUAL, WEIGHTS
from torchround.engine.store.host_store import HostStore
from torchround.optim.formats import EXACT, FORMATS, StateFormat, StateValue
from torchround.optim.split_weights import join, split

# Elements that are converted at once when a tensor's second part has come. Whole blocks of every format.
_CHUNK_ELEMENTS = 2**20


class SavedForms:
    """A converter of checkpoints for a store that keeps `values` in `own` format."""

    def __init__(self, values: Iterable[StateValue], own: StateFormat) -> None:
        self._values = {value.name: value for value in values}
        self._own = own

    @classmethod
    def of(cls, store: HostStore) -> "SavedForms":
        """Return the converter for a store, the same one on every machine of a run."""
        values = (v for bundle in store.trained for segment in bundle.segments for v in segment.rule.values)
        return cls(values, store.optimizer.format)

    def conversions(self, stored: Layout, wanted: Layout) -> Sequence[Conversion]:
        """Return the conversions of tensors whose values are stored whole, in another form than the wanted one."""
        return list(self._conversions(stored, wanted))

    def rounding_text(self, converted: Iterable[str]) -> str | None:
        """Say what the conversion into `converted` tensors loses, None if they keep every bit."""
        names = [name for name in self._values if any(key.startswith(f"{name}/") for key in converted)]
        if not names:
            return None
        kept = f"the optimizer's state ({', '.join(names)})"
        if self._own is EXACT:
            return f"{kept} continues in float32 from values that were rounded to 8 bits"
        return f'{kept} is rounded to 8 bits (optimizer.state = "{self._own.name}"), which cannot be undone'

    def _conversions(self, stored: Layout, wanted: Layout) -> Iterator[Conversion]:
        for name, (wanted_dtype, shape) in wanted.items():
            kind, _, parameter = name.partition("/")
            if kind == WEIGHTS:
                whole: Layout = {name: (torch.float32, shape)}
                halves: Layout = {
                    name: (torch.bfloat16, shape),
                    f"{RESIDUAL}/{parameter}": (torch.int16, shape),
                }
                if _holds(stored, whole) and _holds(wanted, halves):
                    yield Conversion(whole, halves, _splitting)
                elif _holds(stored, halves) and _holds(wanted, whole):
                    yield Conversion(halves, whole, _joining)
            elif kind.startswith(OLDER_WEIGHTS):
                dtype = stored[name][0] if name in stored else wanted_dtype
                older: Layout = {name: (dtype, shape)}
                if dtype != wanted_dtype and dtype.is_floating_point and _holds(stored, older):
                    yield Conversion(older, {name: (wanted_dtype, shape)}, _casting)
            elif kind in self._values:
                yield from self._of_value(self._values[kind], parameter, shape, stored, wanted)

    def _of_value(
        self, value: StateValue, parameter: str, shape: tuple[int, ...], stored: Layout, wanted: Layout
    ) -> Iterator[Conversion]:
        own = value_layout(value, self._own, parameter, shape)
        for other in FORMATS.values():
            form = value_layout(value, other, parameter, shape)
            if other is self._own or not (_holds(stored, form) and _holds(wanted, own)):
                continue
            if other is EXACT:
                yield Conversion(form, own, _Encoding(value, self._own, parameter).receivers)
            elif self._own is EXACT:
                yield Conversion(form, own, _Decoding(value, other, parameter).receivers)


def value_layout(value: StateValue, state: StateFormat, parameter: str, shape: tuple[int, ...]) -> Layout:
    """Return the tensors of a parameter's value in a checkpoint. Parts with one element for several are flat."""
    numel = torch.Size(shape).numel()
    return {
        f"{part.name}/{parameter}": (part.dtype, shape if part.block == 1 else (part.numel(numel),))
        for part in state.parts(value)
    }


def _holds(layout: Layout, form: Layout) -> bool:
    return form.items() <= layout.items()


def _splitting(wanted: Mapping[str, Tensor]) -> Mapping[str, Receiver]:
    """Return the receiver of fp32 weights that are kept split."""
    [name] = [name for name in wanted if name.startswith(f"{WEIGHTS}/")]
    device_weight, residual = (tensor.view(-1) for tensor in _weights_first(wanted))

    def take(start: int, elements: Tensor) -> None:
        stop = start + len(elements)
        for target, half in zip((device_weight, residual), split(elements), strict=True):
            target[start:stop] = half

    return {name: take}


def _casting(wanted: Mapping[str, Tensor]) -> Mapping[str, Receiver]:
    """Return the receiver of device weights of another dtype."""
    [(name, tensor)] = wanted.items()
    flat = tensor.view(-1)

    def take(start: int, elements: Tensor) -> None:
        flat[start : start + len(elements)] = elements

    return {name: take}


def _joining(wanted: Mapping[str, Tensor]) -> Mapping[str, Receiver]:
    """Return the receivers of split weights that are kept in fp32. The halves come in either order.

    The half that comes first waits in the fp32 tensor itself, as an integer.
    """
    [(name, tensor)] = wanted.items()
    waiting = tensor.view(-1).view(torch.int32)
    begun: list[str] = []

    def receiver(kind: str) -> Receiver:
        def take(start: int, elements: Tensor) -> None:
            if not begun:
                begun.append(kind)
            there = waiting[start : start + len(elements)]
            bits = elements.view(torch.int16)
            if begun[0] == kind:
                there.copy_(bits)
                return
            other = there.to(torch.int16)
            upper, residual = (bits, other) if kind == WEIGHTS else (other, bits)
            there.copy_(join(upper.view(torch.bfloat16), residual).view(torch.int32))

        return take

    parameter = name.partition("/")[2]
    return {f"{kind}/{parameter}": receiver(kind) for kind in (WEIGHTS, RESIDUAL)}


def _weights_first(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensors[name] for name in sorted(tensors, key=lambda name: not name.startswith(f"{WEIGHTS}/"))]


class _Encoding:
    """The way of one parameter's value from fp32 into another format."""

    def __init__(self, value: StateValue, state: StateFormat, parameter: str) -> None:
        self._value = value
        self._state = state
        self._parameter = parameter

    def receivers(self, wanted: Mapping[str, Tensor]) -> Mapping[str, Receiver]:
        """Return the receiver of the fp32 numbers."""
        parts = {name.partition("/")[0]: tensor.view(-1) for name, tensor in wanted.items()}

        def take(start: int, elements: Tensor) -> None:
            self._state.write(self._value, parts, start, elements)

        return {f"{self._value.name}/{self._parameter}": take}


class _Decoding:
    """The way of one parameter's value from another format into fp32."""

    def __init__(self, value: StateValue, state: StateFormat, parameter: str) -> None:
        self._value = value
        self._state = state
        self._parameter = parameter

    def receivers(self, wanted: Mapping[str, Tensor]) -> Mapping[str, Receiver]:
        """Return the receivers of the parts, which come in any order.

        Codes wait in the fp32 tensor itself, as numbers, and scales in memory of their own, until all parts are there.
        """
        [tensor] = wanted.values()
        numbers = tensor.view(-1)
        kept = {
            part.name: numbers
            if part.block == 1
            else torch.empty(part.numel(numbers.numel()), dtype=part.dtype)
            for part in self._state.parts(self._value)
        }
        left = [sum(waiting.numel() for waiting in kept.values())]

        def receiver(waiting: Tensor) -> Receiver:
            def take(start: int, elements: Tensor) -> None:
                waiting[start : start + len(elements)] = elements
                left[0] -= len(elements)
                if left[0] == 0:
                    self._decode(numbers, kept)

            return take

        return {f"{name}/{self._parameter}": receiver(waiting) for name, waiting in kept.items()}

    def _decode(self, numbers: Tensor, kept: Mapping[str, Tensor]) -> None:
        """Replace codes by the numbers that they stand for."""
        parts = self._state.parts(self._value)
        for start in range(0, numbers.numel(), _CHUNK_ELEMENTS):
            chunk = numbers[start : start + _CHUNK_ELEMENTS]
            stop = start + chunk.numel()
            pieces = {
                part.name: chunk.to(part.dtype)
                if part.block == 1
                else kept[part.name][start // part.block : part.numel(stop)]
                for part in parts
            }
            chunk.copy_(self._state.read(self._value, pieces, 0, chunk.numel()))
