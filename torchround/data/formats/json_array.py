"""Finds where each element of a JSON array begins, without holding the file in memory."""

import json
import re
from array import array
from typing import BinaryIO

import numpy as np

from torchround.data.document_types import TokenIds
from torchround.planning.memory import size_text
from torchround.untrusted.data_limits import MOST_LINE_BYTES
from torchround.untrusted.progress import Progress

SCAN_BYTES = 1 << 20
VISIBLE = re.compile(r"[^ \t\r\n]")


def json_array_starts(file: BinaryIO) -> TokenIds:
    """Return the bytes `[n + 1]` at which the n elements of an array begin, and at which the last one ends.

    Between two elements there is a comma. If the file is damaged, all that follows the damage is the last element, which
    then is no valid JSON.
    """
    scan, starts = _ArrayScan(file), array("q")
    scan.skip_to("[")
    separator = scan.byte - 1
    if scan.visible() == "]":
        return _as_offsets(starts, scan)
    while True:
        if not scan.visible():
            starts.append(separator)  # the file ends here: its last comma or bracket is the damaged record
            break
        starts.append(scan.byte)
        if not scan.skip_value():
            break
        after = scan.visible()
        if after == "]":
            end = scan.byte
            scan.skip()
            if scan.visible():
                starts.append(
                    end
                )  # more follows the array: from its bracket on, it is a record that is no JSON
                break
            starts.append(end)
            return np.frombuffer(starts, dtype=np.int64)
        if after != ",":
            break
        separator = scan.byte
        scan.skip()
    return _as_offsets(starts, scan)


def _as_offsets(starts: "array[int]", scan: "_ArrayScan") -> TokenIds:
    starts.append(scan.end())
    return np.frombuffer(starts, dtype=np.int64)


class _ArrayScan:
    """A place in a file of JSON, which is read in growing blocks.

    The bytes are decoded as Latin 1, so that a character is a byte. JSON's own characters are ASCII, and letters inside
    strings do not matter here.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = json.JSONDecoder().raw_decode
        self._text, self._at = "", 0
        self._base = 0  # the byte of the file at which `_text` begins
        self._progress = Progress(f"indexing {file.name}", text=size_text)

    @property
    def byte(self) -> int:
        """Byte of the file at which the scan is."""
        return self._base + self._at

    def skip(self) -> None:
        """Step over one character."""
        self._at += 1

    def skip_to(self, character: str) -> None:
        """Step over everything up to `character`, and over the character."""
        while (found := self._text.find(character, self._at)) < 0 and self._more():
            pass
        self._at = found + 1 if found >= 0 else len(self._text)

    def visible(self) -> str:
        """Step over white space. Return the character after it, or an empty string at the end of the file."""
        while (match := VISIBLE.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._more():
                return ""
        self._at = match.start()
        return match[0]

    def skip_value(self) -> bool:
        """Step over a value. Return False, without a step, if there is no whole value."""
        while True:
            try:
                _, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError):
                end = len(self._text)
            # A value that ends with the block may be cut: 12 of 123.
            if end < len(self._text):
                self._at = end
                return True
            if len(self._text) - self._at > MOST_LINE_BYTES or not self._more():
                return False

    def end(self) -> int:
        """Return the size of the file."""
        return self._file.seek(0, 2)

    def _more(self) -> bool:
        """Read on, at least as much as is still needed. Return False at the end of the file."""
        kept = self._text[self._at :]
        # Twice as much each time: a long value is parsed again from its beginning, a few times and not once per block.
        data = self._file.read(max(SCAN_BYTES, len(kept)))
        self._progress.advance(len(data))
        self._base += self._at
        self._text, self._at = kept + data.decode("latin-1"), 0
        return bool(data)
