"""The file `metrics.jsonl` of a run: one JSON object for each logged step, written whole and read with care."""

import json
import math
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from torchround.observe.record import StepRecord
from torchround.untrusted.regular_file import open_regular, replaced_whole

METRICS_FILE = "metrics.jsonl"
MOST_STEP = 2**53  # a float, and a number of JavaScript, is exact up to here
KEPT_LINES = 10_000  # of those that a failing disk has not taken, about 10 MB


class MetricsFile:
    """The writer of `metrics.jsonl`. A resumed run continues after step `after_step`: later lines go, with 0 all lines.

    `log` and `close` raise `OSError` if the disk fails. They leave no half line, and the next call writes what is missing.
    """

    def __init__(self, path: Path, after_step: int = 0) -> None:
        self.path = path
        self._after_step = after_step
        self._is_begun = False
        self._unwritten: deque[bytes] = deque(maxlen=KEPT_LINES)
        with suppress(OSError):  # the first record tries again and raises
            self._write()

    def log(self, record: StepRecord) -> None:
        """Append one line. It is in the file when this returns."""
        self._unwritten.append(json.dumps(record.as_dict(), allow_nan=False).encode() + b"\n")
        self._write()

    def close(self) -> None:
        """Write what is missing."""
        if self._unwritten:
            self._write()

    def _write(self) -> None:
        if not self._is_begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                _drop_after(self.path, self._after_step)
            self._is_begun = True
        with open(self.path, "ab", buffering=0, opener=_open_no_link) as file:
            end, left = file.seek(0, os.SEEK_END), b"".join(self._unwritten)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(end)
                raise
        self._unwritten.clear()


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _drop_after(path: Path, after_step: int) -> None:
    """Keep only the whole lines of steps up to `after_step`. Replaces the file at once or not at all."""

    def is_kept(line: bytes) -> bool:
        step = _parsed(line).get("step")
        return line.endswith(b"\n") and type(step) is int and step <= after_step

    with BufferedReader(open_regular(path)) as old:
        if all(map(is_kept, old)):
            return
        old.seek(0)
        with replaced_whole(path) as new:
            new.writelines(filter(is_kept, old))
            new.flush()
            os.fsync(new.fileno())


def read_records(folder: Path, last_bytes: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step and the record of each line of a run's metrics, or of the lines in its last bytes.

    Lines that were cut off, or that are no record of a step from 0 to below `MOST_STEP` are left out.
    Raises `OSError` if the folder has no metrics.
    """
    path = folder / METRICS_FILE
    try:
        opened = open_regular(path)
    except OSError as error:
        # The folder may come from a stranger: a pipe in the file's place has no name in its error.
        raise error if error.filename else OSError(f"{path}: {error}") from None
    with BufferedReader(opened) as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        for line in file:
            record = _parsed(line)
            step = record.get("step")
            if type(step) is int and 0 <= step < MOST_STEP:
                yield step, record


def finite_number(value: Any) -> float | None:
    """Read a value of a record as a float; None if it is not a number, or not a finite one."""
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # an integer of over 300 digits
        return None
    return number if math.isfinite(number) else None


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse the record of a line; an empty one for a line that was cut off when its process was killed."""
    try:
        record = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
