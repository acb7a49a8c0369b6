"""Planted hangs: a blocked thread stays so until the test is over, and no watchdog looks before it blocks."""

import threading
from collections.abc import Iterator

import pytest

from torchround.engine.watch.watchdog import Watchdog


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make an event that a test sets once the fault has happened and a thread waits. The watchdog looks from then on."""
    event, look = threading.Event(), Watchdog._look

    def from_then_on(self: Watchdog) -> None:
        if event.is_set():
            look(self)

    monkeypatch.setattr(Watchdog, "_look", from_then_on)
    return event


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Yield an event that is set at the end of a test, so that the threads it blocked continue and end."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("torchround"):
            thread.join(20)
