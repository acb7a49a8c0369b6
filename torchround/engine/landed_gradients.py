"""Gradients on the host: where a step's parts land, their sum in fp32, and its norm."""

import math
from collections.abc import Iterator, Mapping

from torchround.engine.board import Observer
from torchround.engine.direction_jobs import directed_parameters
from torchround.engine.exchange.landings import Landings
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer
from torchround.engine.store.host_store import HostStore
from torchround.optim import clip_scale, layer_max_norm, sum_of_squares
from torchround.planning.machine_shares import StepShare


class LandedGradients:
    """The gradients of a step as they land. Only the optimizer's thread calls this.

    `waited_s` is the time spent waiting for other machines, which only a subclass does.
    """

    def __init__(self, store: HostStore, ordering: Ordering, landings: Landings, observer: Observer) -> None:
        self._store = store
        self._ordering = ordering
        self._landings = landings
        self._observer = observer
        self.waited_s = 0.0

    def wait(self, bundle: Bundle, step: int, parts: range) -> list[HostBuffer | None]:
        """Wait until these parts have landed. Returns the buffers that hold them, None for the bundle's own gradient."""
        return [self._ordering.before_gradient_read(bundle.index, step, part) for part in parts]

    def are_last(self, bundle: Bundle, share: StepShare, parts: range) -> bool:
        """Tell whether these parts are the last of all that are dispatched."""
        return parts.stop == share.total_rounds * len(bundle.layers)

    def add(self, bundle: Bundle, step: int, parts: range, landings: list[HostBuffer | None]) -> None:
        """Add landed parts to the bundle's gradient, unless it has landed there as a whole."""
        if bundle.adds_up:
            self._add_up(bundle, step, parts, landings)

    def landing_order(self, share: StepShare) -> Iterator[tuple[Bundle, range]]:
        """Yield bundles with the parts of their gradient that one round makes, in the order in which they land.

        Rounds land one after the other, and the deepest layers of each round first.
        """
        for round_index in share.rounds:
            for bundle in reversed(self._store.trained):
                uses = len(bundle.layers)
                yield bundle, range(round_index * uses, (round_index + 1) * uses)

    def _add_up(self, bundle: Bundle, step: int, parts: range, landings: list[HostBuffer | None]) -> None:
        """Add parts to the sum in fp32 and give their buffers back.

        The order is fixed, so that the sum does not depend on which part lands first.
        """
        assert bundle.gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        for part, buffer in zip(parts, landings, strict=True):
            assert buffer is not None, f"part {part} of bundle {bundle.index} landed in no buffer"
            landed = buffer.memory.view(self._store.gradient_dtype)
            self._observer.touched(reads=[buffer.memory], writes=[bundle.gradient])
            if part == 0:
                bundle.gradient.copy_(landed)  # what the buffer held before is the previous step's
            else:
                bundle.gradient.add_(landed)
            # The buffer is back before the device that waits for it is woken, which may take this very one.
            self._landings.give(buffer, busy=[])
            self._ordering.part_consumed(bundle.index, step, part)

    def squares(self, bundle: Bundle) -> dict[int, float]:
        """Return the squared norms of a whole gradient, as `StepSums.squares` has them.

        They are added parameter by parameter, so that they do not depend on the layout.
        """
        gradient = bundle.gradient
        assert gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        self._observer.touched(reads=[gradient], writes=())
        directed = {parameter.name for parameter in directed_parameters(bundle)}
        parts: dict[int, list[float]] = {bundle.index: []}
        for parameter in bundle.parameters:
            key = unclipped(bundle.index) if parameter.name in directed else bundle.index
            parts.setdefault(key, []).append(float(sum_of_squares(parameter.view(gradient).reshape(-1))))
        return {key: math.fsum(found) for key, found in parts.items()}


def clipped_norm(squares: Mapping[int, float]) -> float:
    """Return the norm of all clipped parameters."""
    return math.sqrt(math.fsum(square for key, square in squares.items() if key >= 0))


def unclipped(index: int) -> int:
    """Return the key, among squared norms by bundle, of the bundle's parameters that are not clipped."""
    return -1 - index


class Clipping:
    """The factor on each bundle's gradient: by the norm of the whole gradient, or, with "layer", by the bundle's own."""

    def __init__(self, store: HostStore, max_norm: float, clip: str) -> None:
        sizes = {bundle.index: _clipped_numel(bundle) for bundle in store.trained}
        self._by_layer = clip == "layer"
        self._max_norms = {
            index: layer_max_norm(max_norm, size, sum(sizes.values())) if self._by_layer else max_norm
            for index, size in sizes.items()
            if size
        }

    def factor(self, bundle: Bundle, norm: float, squares: float, loss_scale: float = 1.0) -> float:
        """Return the factor that clips the bundle's gradient and undoes the loss scale.

        `norm` is that of all clipped parameters, without the loss scale, `squares` the bundle's own part of its square
        with it.
        """
        clipped = math.sqrt(squares) / loss_scale if self._by_layer else norm
        max_norm = self._max_norms.get(bundle.index, 0.0)  # none if no parameter of the bundle is clipped
        return clip_scale(clipped, max_norm) / loss_scale


def _clipped_numel(bundle: Bundle) -> int:
    """Count the elements that are clipped. Orthogonalisation takes a matrix of any scale, so those are not."""
    directed = sum(parameter.shape.numel() for parameter in directed_parameters(bundle))
    return sum(parameter.shape.numel() for parameter in bundle.parameters) - directed
