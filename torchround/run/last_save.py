"""The save that a run cannot do without: its last one. A full disk makes it wait for space before it gives up."""

import logging
import time
from collections.abc import Callable

from torchround.checkpoint import NoSpaceError

logger = logging.getLogger(__name__)

RETRY_S = 30
MOST_WAIT_S = 12 * 3600
# After a signal somebody waits for the run's end, and a scheduler kills it soon.
MOST_WAIT_AFTER_SIGNAL_S = 10 * 60


def save_with_patience(
    save: Callable[[], object],
    stop_requested: Callable[[], bool],
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Call `save` until the disk has room for it. Between two tries `RETRY_S` seconds pass.

    Raises what `save` raises, if it is not `NoSpaceError`, and `NoSpaceError` after `MOST_WAIT_S` seconds or once a
    signal asks for the end. If a signal has asked before, the wait is `MOST_WAIT_AFTER_SIGNAL_S` at most.
    """
    waited_s = 0
    was_requested = stop_requested()
    most_s = MOST_WAIT_AFTER_SIGNAL_S if was_requested else MOST_WAIT_S
    while True:
        try:
            save()
        except NoSpaceError as error:
            if waited_s >= most_s:
                raise
            if waited_s == 0:
                logger.warning(
                    "%s. This save is the run's last one, so it waits for space: free some, and it is tried again every "
                    "%d s, for %d min at most; a signal gives it up",
                    error,
                    RETRY_S,
                    most_s // 60,
                )
            for _ in range(RETRY_S):
                # Seconds one by one: a handler of signals that returns does not end a sleep.
                sleep(1)
                if stop_requested() and not was_requested:
                    raise
            waited_s += RETRY_S
        else:
            return
