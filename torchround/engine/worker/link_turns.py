"""LinkTurns of devices that share a link to the host: their chunks of weights go up one after the other.

A turn adds waits between streams and nothing else, so results cannot depend on it. It cannot hang either: a chunk
waits only for events that are recorded already, so on the devices everything waits for what was enqueued before it,
and no thread waits for another one's turn. Whoever is late, slow or dead in the middle of its turn holds nobody up.

Threads run far ahead of their devices. In the order in which chunks are enqueued, one of the next micro-batch would
therefore wait for the last one of a stage. The order is that of the stage slots instead (`pipeline/shared_links.py`,
`Waves`): a chunk waits for the others' chunks of its own window and of those before it, as far as they are enqueued.
Of two chunks of one window, whichever is enqueued second waits.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchround.engine.device import Device, Event, Stream

# Chunks of a device that are remembered: more than a thread is ahead of the others. One that is forgotten is not
# waited for.
REMEMBERED = 256


class LinkTurns:
    """Orders the weight uploads of each group of devices. A device outside all groups takes no turns."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._others = {
            device: [other for other in group if other != device] for group in groups for device in group
        }
        self._taken: dict[int, deque[tuple[int, Event]]] = {
            device: deque(maxlen=REMEMBERED) for device in self._others
        }
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, index: int, device: Device, window: int) -> Iterator[None]:
        """What device `index` enqueues for uploading weights within the block is its turn at `window`."""
        if index not in self._others:
            yield
            return
        for event in self._before(index, window):
            device.wait(Stream.WEIGHT_UPLOAD, event)
        yield
        event = device.record(Stream.WEIGHT_UPLOAD)
        with self._lock:
            self._taken[index].append((window, event))

    def _before(self, index: int, window: int) -> list[Event]:
        """Of each other device of the group, the end of its last turn up to `window`."""
        with self._lock:
            return [
                event
                for other in self._others[index]
                for event in [_last_up_to(window, self._taken[other])]
                if event is not None
            ]


def _last_up_to(window: int, taken: deque[tuple[int, Event]]) -> Event | None:
    return next((event for turn, event in reversed(taken) if turn <= window), None)
