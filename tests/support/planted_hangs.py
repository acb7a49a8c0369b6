"""Hangs that are planted: what blocks does so until a test is over, and no watchdog looks before it blocks."""

import threading
from collections.abc import Iterator

import pytest

from torchround.engine.watch.watchdog import Watchdog


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the fault has happened, and somebody waits: the watchdog looks from then on."""
    event, look = threading.Event(), Watchdog._look

    def from_then_on(self: Watchdog) -> None:
        if event.is_set():
            look(self)

    monkeypatch.setattr(Watchdog, "_look", from_then_on)
    return event


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """Set at the end of a test: whatever it made block goes on, and ends."""
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("torchround"):
            thread.join(20)
