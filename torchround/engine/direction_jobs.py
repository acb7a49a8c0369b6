"""Direction jobs: the turn of each device at the matrices of a step.

An optimizer such as Muon updates a matrix along a direction that devices compute. A direction job takes the bundles of
one device, in the order in which their gradients land (`program.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchround.engine.device import Event, Mark
from torchround.engine.errors import FaultLocation
from torchround.engine.store.bundles import Bundle, FlatParameter
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Access, Buffer


@dataclass(frozen=True)
class DirectionJob:
    """The bundles whose directions a device computes for a step, in this order.

    `accesses` are those to the look-aheads of each, `buffers` take the `LandedDirection` of each.
    """

    slot: int
    step: int
    bundles: tuple[Bundle, ...]
    accesses: tuple[Access, ...]
    buffers: tuple[Buffer, ...]

    def location(self, actor: str, names: Sequence[str], position: int | None) -> FaultLocation:
        """Describe the job of a device, `actor`, while it is at the bundle at `position`. `names` are the layers'."""
        bundles = self.bundles if position is None else self.bundles[position : position + 1]
        layers = tuple(names[layer] for bundle in bundles for layer in bundle.layers)
        return FaultLocation(actor, "orthogonalisation", layers) if layers else FaultLocation(actor)


@dataclass(frozen=True)
class LandedDirection:
    """A bundle's directions, which are on the host after `event`.

    `start` and `end` are marks of `device` around their computation. `layer` is the first that uses the bundle.
    """

    event: Event
    device: int
    layer: int
    start: Mark
    end: Mark


def directed_parameters(bundle: Bundle) -> list[FlatParameter]:
    """Return the parameters whose update needs a direction."""
    ranges = [(s.start, s.stop) for s in bundle.segments if s.rule.uses_direction]
    return [p for p in bundle.parameters if any(start <= p.start < stop for start, stop in ranges)]


def directed_bundles(store: HostStore) -> list[Bundle]:
    """Return this machine's bundles with such parameters, in the order in which their gradients land."""
    return [bundle for bundle in reversed(store.owned) if directed_parameters(bundle)]
