"""Gradients on the host: where a step's parts land, their sum in fp32, and its norm."""

import math
from collections.abc import Iterator

from torchround.engine.board import Observer
from torchround.engine.exchange.landings import Landings
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer
from torchround.engine.store.host_store import HostStore
from torchround.optim import clip_scale, layer_max_norm, sum_of_squares
from torchround.pipeline.machine_shares import StepShare


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

    def norm_squared(self, bundle: Bundle) -> float:
        """Return the squared norm, added parameter by parameter so that it does not depend on the layout."""
        gradient = bundle.gradient
        assert gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        self._observer.touched(reads=[gradient], writes=())
        return math.fsum(
            float(sum_of_squares(parameter.view(gradient).reshape(-1))) for parameter in bundle.parameters
        )


class Clipping:
    """The factor on each bundle's gradient: by the norm of the whole gradient, or, with "layer", by the bundle's own."""

    def __init__(self, store: HostStore, max_norm: float, clip: str) -> None:
        sizes = {
            bundle.index: sum(parameter.shape.numel() for parameter in bundle.parameters)
            for bundle in store.trained
        }
        self._by_layer = clip == "layer"
        self._max_norms = {
            index: layer_max_norm(max_norm, size, sum(sizes.values())) if self._by_layer else max_norm
            for index, size in sizes.items()
        }

    def factor(self, bundle: Bundle, norm: float, squares: float, loss_scale: float = 1.0) -> float:
        """Return the factor that clips the bundle's gradient and undoes the loss scale.

        `norm` is the whole gradient's, without the loss scale, `squares` the bundle's squared norm with it.
        """
        clipped = math.sqrt(squares) / loss_scale if self._by_layer else norm
        return clip_scale(clipped, self._max_norms[bundle.index]) / loss_scale
