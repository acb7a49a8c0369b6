"""The weights of a host store by name: their values, and memory to write them by.

Split weights are nowhere in memory as fp32 numbers. So a reader gets a fresh copy of one parameter at each access, and a
writer gets one parameter in fp32, which is split again when the writer is done with it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from torchround.engine.store.bundles import Bundle
from torchround.engine.store.segments import FlatParameter


class WeightValues(Mapping[str, Tensor]):
    """The values of all weights that a machine holds: fp32 if trained, otherwise in the store's dtype. For reading alone.

    Weights of other machines and those that stay in files are not among them. The mapping holds for the newest `version`,
    until the next update.
    """

    def __init__(self, bundles: Sequence[Bundle], version: int) -> None:
        self._version = version
        self._held = {
            parameter.name: (bundle, parameter)
            for bundle in bundles
            if not (bundle.mapped or bundle.is_remote)
            for parameter in bundle.parameters
        }

    def __getitem__(self, name: str) -> Tensor:
        bundle, parameter = self._held[name]
        return values_of(bundle, parameter, self._version)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def writable(self) -> Mapping[str, AbstractContextManager[Tensor]]:
        """Return, for each parameter, a block in which its values can be changed."""
        return {
            name: _written(bundle, parameter, self._version)
            for name, (bundle, parameter) in self._held.items()
        }


def values_of(bundle: Bundle, parameter: FlatParameter, version: int) -> Tensor:
    """Return a parameter's values: a fresh fp32 copy if the weights are split, otherwise a view."""
    return bundle.copy_weights(version, parameter.start, parameter.stop).view(parameter.shape)


@contextmanager
def _written(bundle: Bundle, parameter: FlatParameter, version: int) -> Iterator[Tensor]:
    """Yield a parameter's values, to be changed. Those of split weights are split at the end, if no exception ends it."""
    values = values_of(bundle, parameter, version)
    yield values
    if bundle.residual is not None:
        bundle.set_weights(values.view(-1), version, parameter.start)
