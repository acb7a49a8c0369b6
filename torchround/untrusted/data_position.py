"""Whether a saved data position is one at all: a checkpoint may come from anybody, and its checksums from them too."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchround.data.document_types import Cursor
from torchround.data.errors import DataError
from torchround.layer import IGNORED_LABEL

MOST = 2**62  # of anything that is counted
COUNTS = ("epoch", "used", "drawn", "bad")


def check_data_position(
    position: Any, first_places: Sequence[Cursor], vocab_size: int, most_tokens: int | None
) -> None:
    """Raise `DataError` unless the packers and the reader could have left this, of whatever documents.

    `first_places`: where each source begins. A position of no document is found when it is gone to. `most_tokens`:
    those of a sequence where whole documents are packed (it is then what it was), None where they are not.
    """
    try:
        _check_reader(position["reader"], first_places)
        if most_tokens is None:
            _check_stream(position, vocab_size)
        else:
            _check_group(position, first_places, vocab_size, most_tokens)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the saved data position is none that a run could have left: {type(error).__name__}: {error}"
        ) from error


def _check_stream(position: Mapping[str, Any], vocab_size: int) -> None:
    """What `Packer` leaves. How many tokens wait is up to the sequence length there was."""
    tokens = position["tokens"]
    _check_numbers("tokens", tokens, vocab_size)
    if "learn" in position:
        _check_numbers("learn", position["learn"], 2)
        _require(len(position["learn"]) == len(tokens), "learn", position["learn"])
    _require(position.keys() <= {"reader", "tokens", "learn"}, "position", list(position))


def _check_group(
    position: Mapping[str, Any], first_places: Sequence[Cursor], vocab_size: int, most_tokens: int
) -> None:
    """What `BestFitPacker` leaves."""
    for name in ("left", "group", "long"):
        _check_numbers(name, [position[name]])
    for tokens, labels, name in position["waiting"]:
        _check_numbers("tokens", tokens, vocab_size)
        _check_numbers("labels", [label for label in labels if label != IGNORED_LABEL], vocab_size)
        _require(len(tokens) == len(labels), "waiting", (len(tokens), len(labels)))
        _require(0 < len(tokens) <= most_tokens, "waiting", f"{len(tokens)} tokens of a document")
        _check_name(name)
    for name in (*position["without"], *position["gone"]):
        _check_name(name)
    if position["until"] is not None:
        _require(len(position["until"]) == len(first_places), "until", position["until"])
        _check_numbers("until", position["until"])
    _check_numbers("long", [position["so_far"]["long"]])
    _check_reader(position["so_far"]["reader"], first_places)


def _check_reader(reader: Mapping[str, Any], first_places: Sequence[Cursor]) -> None:
    sources, number = reader["sources"], reader["source"]
    _require(len(sources) == len(first_places), "sources", len(sources))
    for progress, first_place in zip(sources, first_places, strict=True):
        _require(progress.keys() == {"place", *COUNTS}, "sources", list(progress))
        _require(len(progress["place"]) == len(first_place), "place", progress["place"])
        _check_numbers("place", progress["place"])
        _check_numbers("sources", [progress[name] for name in COUNTS])
    _check_numbers("source", [] if number is None else [number], len(sources))
    _check_numbers("offset", [reader["offset"]])


def _check_name(name: Sequence[Any]) -> None:
    """That of a document: its source, its number and its part."""
    _require(len(name) == 3, "name", name)
    _check_numbers("name", name)


def _check_numbers(name: str, values: Sequence[Any], end: int = MOST) -> None:
    _require(isinstance(values, (list, tuple)), name, values)
    for value in values:
        _require(type(value) is int and 0 <= value < end, name, value)


def _require(is_so: bool, name: str, value: object) -> None:
    if not is_so:
        raise ValueError(f"{name} is {str(value)[:100]}")
