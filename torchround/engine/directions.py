"""Look-aheads and directions on the host: what the optimizer thread hands to devices, and takes back, in each step.

An optimizer such as Muon sends a look-ahead of each matrix to a device, as soon as the matrix's gradient is whole. The
directions come back in the same memory before the update begins. Neither waits for the norm of the whole gradient.
"""

from torchround.engine.board import Observer
from torchround.engine.direction_jobs import LandedDirection, directed_bundles
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.optim.update_pass import look_ahead_


class Directions:
    """The look-aheads and directions of a store's bundles. Only the optimizer's thread calls this.

    `landed` are the directions of the newest step whose directions were waited for.
    """

    def __init__(self, store: HostStore, ordering: Ordering, observer: Observer) -> None:
        self.landed: tuple[LandedDirection, ...] = ()
        self._store = store
        self._ordering = ordering
        self._observer = observer
        self._bundles = directed_bundles(store)

    def look_ahead(self, bundle: Bundle, step: int) -> None:
        """Write the look-aheads of a bundle whose gradient is whole, and let a device take them. Changes no state."""
        if bundle not in self._bundles:
            return
        scale = self.scale(step)
        for segment in bundle.segments:
            if segment.direction is None:
                continue
            assert bundle.gradient is not None, f"bundle {bundle.index} has no gradient buffer"
            reads = [bundle.gradient, *segment.parts.values()]
            self._observer.touched(reads=reads, writes=[segment.direction])
            look_ahead_(bundle.update_buffers(segment, bundle.version(step + 1), step), scale)
        self._ordering.look_ahead_written(bundle.index, step)

    def scale(self, step: int) -> float:
        """Return the factor on gradients of parameters with directions. It undoes the loss scale, and clips nothing."""
        return 1.0 / self._store.loss_scaling.scale_of(step)

    def wait(self, step: int) -> None:
        """Wait until all directions of a step have landed: before its update begins, which cannot stop half-way.

        A skipped step waits too, because the next look-aheads come into the same memory.
        """
        self.landed = tuple(self._ordering.before_direction_read(b.index, step) for b in self._bundles)
