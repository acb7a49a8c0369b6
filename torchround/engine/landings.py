"""Host memory that parts of gradients land in before they are added up or sent.

One machine takes a pool buffer for each part. Of several machines each would hold a whole round of gradients in that way,
because the network may be far behind the devices. They land in a ring instead: a window of fixed size in which each
bundle has its place. A part lands once the parts before it that had a share of that place are taken. Bundles that several
layers share are few, and their parts wait for each other at the owner, so each of their parts has a pool buffer.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import PART, Buffer
from torchround.planning.host_buffers import PAGE_BYTES, whole_pages
from torchround.planning.machine_shares import landing_window_bytes


class Landings:
    """The landing memory of one machine: the ring of one among several, and buffers of the pool."""

    def __init__(self, store: HostStore, pool: HostPool) -> None:
        self._store = store
        self._pool = pool
        self._parts: dict[tuple[int, int], tuple[Buffer, ...]] = {
            (bundle.index, use): (Buffer(PART, layers_of(store, bundle)),)
            for bundle in store.trained
            for use in range(len(bundle.layers))
        }
        self._places: dict[int, HostBuffer] = {}
        if store.ownership.num_machines > 1:
            self._make_ring()

    def _make_ring(self) -> None:
        # The deepest layers land first.
        single = [bundle for bundle in reversed(self._store.trained) if len(bundle.layers) == 1]
        if not single:
            return
        sizes = [whole_pages(self._bytes(bundle)) for bundle in single]
        window = landing_window_bytes(sizes) // PAGE_BYTES * PAGE_BYTES
        self._pool.reserve({window: 1})
        ring = self._pool.take(window)
        starts = ring_places(sizes, window)
        for bundle, start, pieces in zip(single, starts, shared_pieces(starts, sizes), strict=True):
            self._places[bundle.index] = self._pool.part_of(ring, start, self._bytes(bundle))
            # First one of its own, which tells the bundle's buffer from those of others.
            self._parts[bundle.index, 0] = (*self._parts[bundle.index, 0], *pieces)

    def buffers(self, bundle: Bundle, use: int) -> Sequence[Buffer]:
        """Return the memory in which the parts of a layer that uses the bundle land, for the program.

        A round's part has to be taken before that of the next round lands. This bounds the pool's buffers.
        """
        return self._parts[bundle.index, use]

    def needed(self) -> Counter[int]:
        """Count the pool buffers, by their bytes, that gradients need at once."""
        return Counter(
            self._bytes(bundle)
            for bundle in self._store.trained
            if bundle.adds_up and bundle.index not in self._places
            for _ in bundle.layers
        )

    def take(self, bundle: Bundle) -> HostBuffer:
        """Return the buffer for a part that is about to be downloaded."""
        return self._places.get(bundle.index) or self._pool.take(self._bytes(bundle))

    def give(self, bundle: Bundle, buffer: HostBuffer) -> None:
        """Give a part's buffer back, which no device reads."""
        if bundle.index not in self._places:
            self._pool.give(buffer, busy=[])

    def _bytes(self, bundle: Bundle) -> int:
        return bundle.numel * self._store.gradient_dtype.itemsize


def layers_of(store: HostStore, bundle: Bundle) -> str:
    """Return the names of the layers that use a bundle."""
    return ", ".join(store.layer_names[layer] for layer in bundle.layers)


def ring_places(sizes: Sequence[int], window: int) -> list[int]:
    """Return the start of each part's place in a ring of `window` bytes, one after the other, each in one piece."""
    starts, end = [], 0
    for size in sizes:
        start = end if end + size <= window else 0
        assert start + size <= window, f"a part of {size} bytes is larger than the window of {window}"
        starts.append(start)
        end = start + size
    return starts


def shared_pieces(starts: Sequence[int], sizes: Sequence[int]) -> list[list[Buffer]]:
    """Return the pieces of the ring that each place runs over: the memory between all starts and ends of places."""
    places = list(zip(starts, sizes, strict=True))
    ends = sorted({edge for start, size in places for edge in (start, start + size)})
    pieces = [Buffer(PART, "the landing window") for _ in ends]
    return [pieces[bisect_left(ends, start) : bisect_left(ends, start + size)] for start, size in places]
