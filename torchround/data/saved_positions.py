"""The position of all streams of the data as a checkpoint holds it, and what changed files mean for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchround.data.errors import DataError
from torchround.data.packing import best_fit
from torchround.data.packing.batches import packing_state, progress_so_far, with_packing_state

StreamPosition = dict[str, Any] | None
ELSEWHERE = "elsewhere"
"""Stands in a position for a stream that another machine reads."""


def joined(positions: Sequence[Any]) -> Any:
    """Return the position of all streams, fit for JSON. A single stream's is the whole; None is the beginning."""
    if len(positions) == 1:
        return _plain(positions[0])
    if all(position is None for position in positions):
        return None
    return {"streams": [_plain(position) for position in positions]}


def split_position(position: Any, num_streams: int) -> list[StreamPosition]:
    """Return each stream's position. Raises `DataError` for a position of another number of streams."""
    if num_streams == 1 or position is None:
        return [position] * num_streams
    streams = position.get("streams") if isinstance(position, dict) else None
    if not isinstance(streams, list) or len(streams) != num_streams or position.keys() != {"streams"}:
        raise DataError(f"invalid data position in the checkpoint: it is not one of {num_streams} streams")
    for number, stream in enumerate(streams):
        if stream == ELSEWHERE:
            raise DataError(f"invalid data position in the checkpoint: stream {number} is missing")
    return list(streams)


def joined_positions(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a loader from the states of the same loader on all machines, which read different streams.

    Raises `DataError` if no machine has one of the streams.
    """
    first = states[0]
    of_streams = [state["position"]["streams"] for state in states if _has_streams(state["position"])]
    if not of_streams:
        return first
    beginning = [None] * len(of_streams[0])
    if len(of_streams) < len(states):
        of_streams.append(beginning)  # of a machine that reads all streams and has read nothing yet
    of_each = zip(*of_streams, strict=True)
    found = [next((each for each in streams if each != ELSEWHERE), ELSEWHERE) for streams in of_each]
    if ELSEWHERE in found:
        raise DataError(f"no machine has the position of data stream {found.index(ELSEWHERE)}")
    return {**first, "position": {"streams": found}}


def _has_streams(position: Any) -> bool:
    return isinstance(position, dict) and "streams" in position


def in_changed_files(position: StreamPosition) -> StreamPosition:
    """Adapt the position of a stream of whole documents to files in which records have changed."""
    if not position:
        return position
    return with_packing_state(position, best_fit.in_changed_files(packing_state(position)))


def what_a_change_costs(positions: Sequence[StreamPosition], were: Sequence[str], are: Sequence[str]) -> str:
    """Describe how many documents come again or not at all, if the files of some sources have changed."""
    begun = [position for position in positions if position is not None]
    if not begun:
        return "none of their documents was read yet"
    read = sum(
        source["used"]
        for position in begun
        for source, was, now in zip(progress_so_far(position)["reader"]["sources"], were, are, strict=True)
        if was != now
    )
    text = (
        "if records were changed in place, none is read twice or left out; if documents were added or removed, "
        f"at most the {read} that this pass has read come again, and about as many are left out"
    )
    gone = {
        (source, number)
        for position in begun
        for source, number, _ in packing_state(position).get("gone", ())
    }
    if gone:
        text += (
            f"; {len(gone)} documents of the group being packed are used, its other documents are packed anew"
        )
    if taken := sum(position.get("taken", 0) for position in begun):
        text += (
            f"; {taken} sequences of the window being shuffled are used; the window is packed anew, and "
            "as many of its new sequences are left out"
        )
    return text


def _plain(state: Any) -> Any:
    """Copy a nested state with lists in place of arrays."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state
