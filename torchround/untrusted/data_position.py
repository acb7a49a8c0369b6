"""Checks of a saved data position, before a loader goes to it.

A checkpoint may come from an untrusted sender, who can also make its checksums match. These checks let through only
what the packers and the reader could have saved, for whichever documents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST = 2**62  # upper bound of every counter
COUNTERS = ("epoch", "used", "drawn", "bad")
# Documents of a group may have grown since it was saved, if their files have changed. This is how much is believed.
MOST_GROWTH = 16


@dataclass(frozen=True)
class PositionLimits:
    """Facts of the run's data that bound a valid position.

    `first_cursors`: the cursor at which each source begins. `whole_document_tokens`: the sequence length if the run
    packs whole documents, None if it packs contiguously. `shuffle_window`: sequences per shuffled window, or 0.
    """

    first_cursors: Sequence[Sequence[int]]
    vocab_size: int
    ignored_label: int
    whole_document_tokens: int | None
    shuffle_window: int


def check_data_position(position: Any, limits: PositionLimits) -> None:
    """Raise `ValueError` unless the packer in use and the reader could have saved `position`.

    A cursor past the last document is not found here, but by the source when the loader goes there.
    """
    try:
        packing = position
        if limits.shuffle_window:
            packing = position["packing"]
            _check_window(position, limits)
        _check_reader(packing["reader"], limits)
        if limits.whole_document_tokens is None:
            _check_contiguous(packing, limits.vocab_size)
        else:
            _check_group(packing, limits, limits.whole_document_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"invalid data position in the checkpoint: {error}") from error


def _check_window(position: Mapping[str, Any], limits: PositionLimits) -> None:
    """Check the part of a position that `SequenceShuffler` adds."""
    # Positions of earlier versions have no number of sequences.
    names = position.keys() | {"sequences"}
    _require(names == {"packing", "window", "taken", "sequences", "so_far"}, "position", list(position))
    _check_numbers("window", [position["window"]])
    # A state is saved at the start of the next window instead of the end of a full one.
    _check_numbers("taken", [position["taken"]], limits.shuffle_window)
    _check_numbers("sequences", [position.get("sequences", 0)], limits.shuffle_window + 1)
    _check_so_far(position["so_far"], limits)


def check_group_growth(excess_tokens: int, group_tokens: int, until: Sequence[int]) -> None:
    """Raise `ValueError` if the group of a saved position exceeds `group_tokens` by far more than files can have grown.

    A forged position could let a group reach to any document, and so fill the memory.
    """
    if excess_tokens > MOST_GROWTH * group_tokens:
        raise ValueError(
            f"the saved data position has a group of documents end at {list(until)}, by which there are over "
            f"{MOST_GROWTH} times as many tokens as a group holds: it was altered, or the files are others"
        )


def _check_contiguous(position: Mapping[str, Any], vocab_size: int) -> None:
    """Check a position of `ContiguousPacker`. Any number of tokens may wait: the sequence length may have changed."""
    tokens = position["tokens"]
    _check_numbers("tokens", tokens, vocab_size)
    if "learn" in position:
        _check_numbers("learn", position["learn"], 2)
        _require(len(position["learn"]) == len(tokens), "learn", position["learn"])
    _require(position.keys() <= {"reader", "tokens", "learn"}, "position", list(position))


def _check_group(position: Mapping[str, Any], limits: PositionLimits, most_tokens: int) -> None:
    """Check a position of `BestFitPacker`, in which no document is longer than `most_tokens`."""
    for name in ("left", "group", "long"):
        _check_numbers(name, [position[name]])
    for tokens, labels, part in position["waiting"]:
        learnt = [label for label in labels if label != limits.ignored_label]
        _check_numbers("tokens", tokens, limits.vocab_size)
        _check_numbers("labels", learnt, limits.vocab_size)
        _require(len(tokens) == len(labels), "waiting", (len(tokens), len(labels)))
        _require(0 < len(tokens) <= most_tokens, "waiting", f"{len(tokens)} tokens of a document")
        _check_part_id(part)
    for part in (*position["without"], *position["gone"]):
        _check_part_id(part)
    if position["until"] is not None:
        _require(len(position["until"]) == len(limits.first_cursors), "until", position["until"])
        _check_numbers("until", position["until"])
    _check_so_far(position["so_far"], limits)


def _check_so_far(so_far: Mapping[str, Any], limits: PositionLimits) -> None:
    _check_numbers("long", [so_far["long"]])
    _check_reader(so_far["reader"], limits)


def _check_reader(reader: Mapping[str, Any], limits: PositionLimits) -> None:
    sources, number = reader["sources"], reader["source"]
    _require(len(sources) == len(limits.first_cursors), "sources", len(sources))
    for progress, first_cursor in zip(sources, limits.first_cursors, strict=True):
        _require(progress.keys() == {"place", *COUNTERS}, "sources", list(progress))
        _require(len(progress["place"]) == len(first_cursor), "place", progress["place"])
        _check_numbers("place", progress["place"])
        _check_numbers("sources", [progress[name] for name in COUNTERS])
    _check_numbers("source", [] if number is None else [number], len(sources))
    _check_numbers("offset", [reader["offset"]])


def _check_part_id(part: Sequence[Any]) -> None:
    """Check the three numbers that name a part of a document: its source, its document, its index."""
    _require(len(part) == 3, "name", part)
    _check_numbers("name", part)


def _check_numbers(name: str, values: Sequence[Any], end: int = MOST) -> None:
    _require(isinstance(values, (list, tuple)), name, values)
    for value in values:
        # `type` and not `isinstance`: a bool is an int to Python, but not in a saved position.
        _require(type(value) is int and 0 <= value < end, name, value)


def _require(is_so: bool, name: str, value: object) -> None:
    if not is_so:
        raise ValueError(f"{name} is {str(value)[:100]}")
