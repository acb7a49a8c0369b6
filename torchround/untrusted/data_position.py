"""Checks of a saved data position, before a loader goes to it.

A checkpoint may come from an untrusted sender, who can also make its checksums match. These checks let through only
what the packers and the reader could have saved, for whichever documents.
"""

from collections.abc import Mapping, Sequence
from typing import Any

MOST = 2**62  # upper bound of every counter
COUNTERS = ("epoch", "used", "drawn", "bad")


def check_data_position(
    position: Any,
    first_cursors: Sequence[Sequence[int]],
    vocab_size: int,
    ignored_label: int,
    whole_document_tokens: int | None,
) -> None:
    """Raise `ValueError` unless the packer in use and the reader could have saved `position`.

    `first_cursors`: the cursor at which each source begins. `whole_document_tokens`: the sequence length if the run
    packs whole documents, None if it packs contiguously. A cursor past the last document is not found here, but by
    the source when the loader goes there.
    """
    try:
        _check_reader(position["reader"], first_cursors)
        if whole_document_tokens is None:
            _check_contiguous(position, vocab_size)
        else:
            _check_group(position, first_cursors, vocab_size, ignored_label, whole_document_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"invalid data position in the checkpoint: {type(error).__name__}: {error}"
        ) from error


def _check_contiguous(position: Mapping[str, Any], vocab_size: int) -> None:
    """Check a position of `ContiguousPacker`. Any number of tokens may wait: the sequence length may have changed."""
    tokens = position["tokens"]
    _check_numbers("tokens", tokens, vocab_size)
    if "learn" in position:
        _check_numbers("learn", position["learn"], 2)
        _require(len(position["learn"]) == len(tokens), "learn", position["learn"])
    _require(position.keys() <= {"reader", "tokens", "learn"}, "position", list(position))


def _check_group(
    position: Mapping[str, Any],
    first_cursors: Sequence[Sequence[int]],
    vocab_size: int,
    ignored_label: int,
    most_tokens: int,
) -> None:
    """Check a position of `BestFitPacker`, in which no document is longer than `most_tokens`."""
    for name in ("left", "group", "long"):
        _check_numbers(name, [position[name]])
    for tokens, labels, part in position["waiting"]:
        _check_numbers("tokens", tokens, vocab_size)
        _check_numbers("labels", [label for label in labels if label != ignored_label], vocab_size)
        _require(len(tokens) == len(labels), "waiting", (len(tokens), len(labels)))
        _require(0 < len(tokens) <= most_tokens, "waiting", f"{len(tokens)} tokens of a document")
        _check_part_id(part)
    for part in (*position["without"], *position["gone"]):
        _check_part_id(part)
    if position["until"] is not None:
        _require(len(position["until"]) == len(first_cursors), "until", position["until"])
        _check_numbers("until", position["until"])
    _check_numbers("long", [position["so_far"]["long"]])
    _check_reader(position["so_far"]["reader"], first_cursors)


def _check_reader(reader: Mapping[str, Any], first_cursors: Sequence[Sequence[int]]) -> None:
    sources, number = reader["sources"], reader["source"]
    _require(len(sources) == len(first_cursors), "sources", len(sources))
    for progress, first_cursor in zip(sources, first_cursors, strict=True):
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
