"""Signals that ask a run to stop: the handler only sets a flag, which the loop reads between steps."""

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Within the block, SIGTERM and SIGINT ask for a stop after the step; a second one stops at once."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it; 0 where nobody asked."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    def __enter__(self) -> "StopRequest":  # noqa: PYI034  (typing.Self needs Python 3.11)
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        self._restore()  # the second signal gets its default: nobody has to wait for a long step

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
