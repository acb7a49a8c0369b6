"""`metrics.jsonl`: one JSON object per logged step, going on after a resume without repeating a step.

The file is never left with a line that is not whole: what a failed write left is cut off, the line is kept until the
disk takes it, and what a killed process left is dropped when the file is opened again.
"""

import json
import os
from collections import deque
from contextlib import suppress
from pathlib import Path

from torchround.observe.record import StepRecord

KEPT_LINES = 10_000  # about 10 MB


class MetricsFile:
    """Appends records to `path`. Opening it drops the records after step `after_step`, where a run goes on.

    `after_step` is 0 for a run that starts anew: nothing of an earlier attempt stays. `log` and `close` raise
    `OSError` when the disk fails; the file can go on being used: the records so far stay, and what could not be
    written (the newest `KEPT_LINES` of it) is written with the next record, or on closing. A file that cannot even be
    opened is opened then.
    """

    def __init__(self, path: Path | str, after_step: int = 0) -> None:
        self.path = Path(path)
        self._after_step = after_step
        self._descriptor = -1
        self._end_bytes = 0
        self._unwritten: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._closed = False
        with suppress(OSError):  # tried again with the first record, and told then
            self._open()

    def log(self, record: StepRecord) -> None:
        """Append one line; it is in the file when this returns."""
        self._unwritten.append(json.dumps(record.as_dict(), allow_nan=False).encode() + b"\n")
        self._write()

    def close(self) -> None:
        """Close the file. Can be repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            self._write()
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _drop_after(self.path, self._after_step)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._end_bytes = os.fstat(descriptor).st_size
        self._descriptor = descriptor

    def _write(self) -> None:
        """All that is unwritten. A line that only fits in part is cut off again."""
        if self._descriptor < 0:
            self._open()
        try:
            self._write_lines()
        finally:
            self._cut_half_line()

    def _write_lines(self) -> None:
        self._cut_half_line()
        while self._unwritten:
            line, written = self._unwritten[0], 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            self._end_bytes += len(line)
            self._unwritten.popleft()

    def _cut_half_line(self) -> None:
        """Remove what a failed write may have left."""
        if os.fstat(self._descriptor).st_size > self._end_bytes:
            os.ftruncate(self._descriptor, self._end_bytes)


def _drop_after(path: Path, after_step: int) -> None:
    """Keep only the whole lines of steps up to `after_step`; the file is replaced in one go or not at all."""
    replacement = path.with_name(path.name + ".tmp")
    dropped = False
    with open(path, "rb") as old, open(replacement, "wb") as new:
        for line in old:
            step = _step_of(line)
            if step is not None and step <= after_step:
                new.write(line)
            else:
                dropped = True
        new.flush()
        os.fsync(new.fileno())
    if dropped:
        replacement.replace(path)
    else:
        replacement.unlink()


def _step_of(line: bytes) -> int | None:
    """The step of a whole line; `None` for half a line or something else."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
