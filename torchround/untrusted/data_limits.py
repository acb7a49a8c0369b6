"""Limits on what a data or vocabulary file may cost: lines without end, archives that unpack to anything, absurd ids."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

MOST_LINE_BYTES = 1 << 27  # a record takes several times its size in memory
MOST_BLANK_LINES = 100_000  # in a row: a small archive can unpack to any number of them
MOST_TOKEN_ID = 2**24  # sixty times the largest vocabulary of a released model
TOO_LONG = f"longer than {MOST_LINE_BYTES >> 20} MiB; cut such texts into records"


def read_bounded_line(file: BinaryIO) -> bytes:
    """Read one line of a file, its end included. Raises `ValueError` past `MOST_LINE_BYTES`."""
    line = file.readline(MOST_LINE_BYTES + 1)
    if len(line) > MOST_LINE_BYTES:
        raise ValueError(TOO_LONG)
    return line


def split_bounded_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Split unpacked chunks into lines without their ends. A last line without an end counts too.

    Raises `ValueError` for a line past `MOST_LINE_BYTES`, and for more than `MOST_BLANK_LINES` blank lines in a row.
    """
    rest: list[bytes] = []
    num_bytes = num_blank = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        num_bytes += len(first)
        # Checked per chunk, before the parts are joined: joining is what would take the memory.
        if num_bytes > MOST_LINE_BYTES:
            raise ValueError(f"it is {TOO_LONG}")
        for line in others:
            num_blank = 0 if num_bytes else num_blank + 1
            if num_blank > MOST_BLANK_LINES:
                raise ValueError(f"more than {MOST_BLANK_LINES:,} blank lines in a row")
            yield b"".join(rest)
            rest, num_bytes = [line], len(line)
    if last := b"".join(rest):
        yield last


def check_token_ids(ids: Sequence[Any]) -> None:
    """Raise `ValueError` unless all `ids` of a vocabulary are distinct integers from 0 to `MOST_TOKEN_ID`.

    tiktoken aborts the process on ids of other kinds, and confuses two tokens of the same id.
    """
    invalid = [number for number in ids if type(number) is not int or not 0 <= number <= MOST_TOKEN_ID]
    if invalid:
        raise ValueError(f"{invalid[0]!r} is not a token id; legal: 0 to {MOST_TOKEN_ID}")
    # Counted in one pass: a search for each id would take minutes in a large forged vocabulary.
    repeated = next((number for number, count in Counter(ids).items() if count > 1), None)
    if repeated is not None:
        raise ValueError(f"several tokens have the id {repeated}")
