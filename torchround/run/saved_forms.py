"""The forms in which checkpoints hold weights and optimizer state, and the ways from one to another.

    weights      weights/<p> F32                        residual/<p> I16 beside weights/<p> BF16 (split)
    each value   exp_avg/<p> F32 (exact)                exp_avg/<p> I8 or U8 beside exp_avg_scale/<p> BF16 (compact)
    older        master_1_old/<p> in the training dtype

A run reads any form into what its own store keeps. Split weights and fp32 weights hold the same bits. A value that
becomes compact, or was compact, is rounded to 8 bits. Older device weights are rounded to the run's dtype.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from torchround.checkpoint import Conversion, Layout
from torchround.engine.store.bundles import OLDER_WEIGHTS, RESIDUAL, WEIGHTS
from torchround.engine.store.host_store import HostStore
from torchround.optim.formats import EXACT, FORMATS, StateFormat, StateValue
from torchround.optim.split_weights import join, split

# Elements that are converted at once. Whole blocks of every format.
_CHUNK_ELEMENTS = 2**20

Parts = Mapping[str, Tensor]
"""The flat tensors of one parameter, by the part of their names before the slash."""


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

    def rounding_text(self, converted: Iterable[str]) -> str | None:
        """Say what the conversion into `converted` tensors loses, None if they keep every bit."""
        names = [name for name in self._values if any(key.startswith(f"{name}/") for key in converted)]
        if not names:
            return None
        kept = f"the optimizer's state ({', '.join(names)})"
        if self._own is EXACT:
            return f"{kept} continues in float32 from values that were rounded to 8 bits"
        return f'{kept} is rounded to 8 bits (optimizer.state = "{self._own.name}"), which cannot be undone'

    def conversions(self, stored: Layout, wanted: Layout) -> Iterator[Conversion]:
        """Yield the conversions of tensors whose values are stored whole, in another form than the wanted one."""
        for name, (wanted_dtype, shape) in wanted.items():
            kind, _, parameter = name.partition("/")
            if kind == WEIGHTS:
                whole: Layout = {name: (torch.float32, shape)}
                halves: Layout = {
                    name: (torch.bfloat16, shape),
                    f"{RESIDUAL}/{parameter}": (torch.int16, shape),
                }
                if _holds(stored, whole) and _holds(wanted, halves):
                    yield Conversion(whole, halves, _in_chunks(_split))
                elif _holds(stored, halves) and _holds(wanted, whole):
                    yield Conversion(halves, whole, _in_chunks(_join))
            elif kind.startswith(OLDER_WEIGHTS):
                dtype = stored[name][0] if name in stored else wanted_dtype
                older: Layout = {name: (dtype, shape)}
                if dtype != wanted_dtype and dtype.is_floating_point and _holds(stored, older):
                    yield Conversion(older, {name: (wanted_dtype, shape)}, _in_chunks(_cast))
            elif kind in self._values:
                value = self._values[kind]
                own = value_layout(value, self._own, parameter, shape)
                for other in FORMATS.values():
                    form = value_layout(value, other, parameter, shape)
                    if other is not self._own and _holds(stored, form) and _holds(wanted, own):
                        yield Conversion(form, own, _in_chunks(self._from(value, other)))

    def _from(self, value: StateValue, other: StateFormat) -> Callable[[Parts, Parts, int, int], None]:
        """Return what brings elements of a value from another format into the own one."""

        def move(stored: Parts, wanted: Parts, start: int, stop: int) -> None:
            self._own.write(value, wanted, start, other.read(value, stored, start, stop))

        return move


def value_layout(value: StateValue, state: StateFormat, parameter: str, shape: tuple[int, ...]) -> Layout:
    """Return the tensors of a parameter's value in a checkpoint. Parts with one element for several are flat."""
    numel = torch.Size(shape).numel()
    return {
        f"{part.name}/{parameter}": (part.dtype, shape if part.block == 1 else (part.numel(numel),))
        for part in state.parts(value)
    }


def _holds(layout: Layout, form: Layout) -> bool:
    return form.items() <= layout.items()


def _in_chunks(
    move: Callable[[Parts, Parts, int, int], None],
) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]:
    """Return a conversion that calls `move(stored, wanted, start, stop)` for one range of elements after the other."""

    def convert(stored: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        source, target = (
            {name.partition("/")[0]: tensor.view(-1) for name, tensor in tensors.items()}
            for tensors in (stored, wanted)
        )
        numel = max(tensor.numel() for tensor in source.values())
        for start in range(0, numel, _CHUNK_ELEMENTS):
            move(source, target, start, min(start + _CHUNK_ELEMENTS, numel))

    return convert


def _split(stored: Parts, wanted: Parts, start: int, stop: int) -> None:
    upper, residual = split(stored[WEIGHTS][start:stop])
    wanted[WEIGHTS][start:stop], wanted[RESIDUAL][start:stop] = upper, residual


def _join(stored: Parts, wanted: Parts, start: int, stop: int) -> None:
    wanted[WEIGHTS][start:stop] = join(stored[WEIGHTS][start:stop], stored[RESIDUAL][start:stop])


def _cast(stored: Parts, wanted: Parts, start: int, stop: int) -> None:
    for kind, tensor in stored.items():
        wanted[kind][start:stop] = tensor[start:stop]
