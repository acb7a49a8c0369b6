"""The console's lines of a run, one for each logged step, and times as text."""

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple, TextIO

from torchround.observe.record import StepRecord
from torchround.planning.memory import GIB, size_text
from torchround.untrusted.terminal import escape_unprintable

_ETA_LINES = 20  # newest lines that the ETA takes the time per step from
SEPARATOR = "  "
TIME_WIDTH = 10  # of the time of day and the separator after it
# A machine is named if its own work takes so many times as long as that of the fastest one.
SLOW_MACHINE = 1.1


class ConsoleReport:
    """The console's lines, one for each record, on `stream` (default: standard output).

    A line has the parts that fit the terminal's width; `metrics.jsonl` has all figures. `now` gives the local time.
    """

    def __init__(
        self,
        total_steps: int,
        resumed_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.total_steps = total_steps
        self._now = now
        self._stream = stream if stream is not None else sys.stdout
        self._clock = clock
        self._seen = deque([(resumed_step, clock())], maxlen=_ETA_LINES)

    def log(self, record: StepRecord) -> None:
        self._seen.append((record.step, self._clock()))
        parts = line_parts(record, self.total_steps, self._left_s(record))
        # Asked for each line, because the window of a terminal may have another size by then.
        width = shutil.get_terminal_size().columns - TIME_WIDTH
        texts = [f"{self._now():%H:%M:%S}", *(part.text for part in fitting(parts, width))]
        print(SEPARATOR.join(texts), file=self._stream)
        for sample in record.samples:
            # The continuation behind a mark, each line indented below the step's.
            text = escape_unprintable(f"{sample.prompt}»{sample.text}")
            print(text.replace("\n", "\n" + " " * TIME_WIDTH), file=self._stream)
        self._stream.flush()

    def close(self) -> None: ...  # the caller owns the stream

    def _left_s(self, record: StepRecord) -> float:
        """Estimate the seconds until the last step at the recent pace, which includes validations and saves."""
        (first_step, first_s), (last_step, last_s) = self._seen[0], self._seen[-1]
        steps = last_step - first_step
        step_s = (last_s - first_s) / steps if steps > 0 else record.step_s
        return max(self.total_steps - record.step, 0) * step_s


class LinePart(NamedTuple):
    """A part of a console line. In a narrow line the parts with the highest `rank` are left out; 0 always stays."""

    rank: int
    text: str


def line_parts(record: StepRecord, total_steps: int, left_s: float) -> list[LinePart]:
    """Write the parts of a line, in the order they are printed, without the time of day.

    MFU, device memory, validation loss and skipped steps appear only if there are any.
    """
    parts = [
        LinePart(0, f"step {record.step:>{len(str(total_steps))}}/{total_steps}"),
        LinePart(0, f"loss {record.loss:.4f}"),
    ]
    if record.validation_loss is not None:
        parts.append(LinePart(0, f"validation loss {record.validation_loss:.4f}"))
    if record.skipped_steps:
        parts.append(LinePart(1, f"skipped {record.skipped_steps}"))
    parts += [
        LinePart(4, f"lr {record.lr:.2e}"),
        LinePart(5, f"grad norm {record.grad_norm:.3f}"),
        LinePart(2, f"{record.tokens_per_s:,.0f} tokens/s"),
    ]
    if record.mfu is not None:
        parts.append(LinePart(6, f"MFU {100 * record.mfu:.1f} %"))
    if record.device_peak_gib is not None:
        # Beside a plan, the same word for less would look like a mistake.
        counted = "device buffers" if record.has_virtual_devices else "device"
        parts.append(LinePart(7, f"{counted} {size_text(round(record.device_peak_gib * GIB))}"))
    parts.append(LinePart(8, f"host {size_text(round(record.host_gib * GIB))}"))
    if (slowest := slowest_text(record)) is not None:
        parts.append(LinePart(2, slowest))
    parts.append(LinePart(3, f"ETA {duration(left_s, with_seconds=False)}"))
    return parts


def slowest_text(record: StepRecord) -> str | None:
    """Name the slowest machine if its own work takes notably longer than the fastest one's, otherwise return None."""
    if record.slowest is None:
        return None
    own_s = [machine.own_s for machine in record.machines]
    longest_s, shortest_s = max(own_s), min(own_s)
    if longest_s < SLOW_MACHINE * shortest_s or shortest_s <= 0:
        return None
    return f"{record.machines[record.slowest].name} slowest (+{100 * (longest_s / shortest_s - 1):.0f} %)"


def fitting(parts: Sequence[LinePart], width: int) -> list[LinePart]:
    """Choose the most important parts that fit into `width` characters, separators counted, in their order."""
    kept: list[LinePart] = []
    for part in sorted(parts, key=lambda part: part.rank):
        if part.rank and len(SEPARATOR.join(other.text for other in [*kept, part])) > width:
            break  # not the next smaller one instead: which parts a line has should not change from line to line
        kept.append(part)
    return [part for part in parts if part in kept]


def duration(seconds: float, with_seconds: bool = True) -> str:
    """Write seconds as text in the two largest units: `42 s`, `3 min 05 s` or `3 min`, `1 h 03 min`, `2 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60:02d} s" if with_seconds else "")
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
