"""The console's line per logged step: coloured in a terminal, plain text in a log."""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from torchround.observe.record import StepRecord, perplexity
from torchround.pipeline.memory import GIB, size_text

# Logged lines over which the time per step is taken for the time that is left.
_ETA_LINES = 20

_STYLES = {"step": "bold", "loss": "bold green", "tokens/s": "cyan", "skipped": "bold red"}


class ConsoleReport:
    """Prints one line per record to `stream` (default: standard output)."""

    def __init__(
        self,
        total_steps: int,
        resumed_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self._stream = stream if stream is not None else sys.stdout
        self._print = _printer(self._stream)
        self._clock = clock
        self._seen = deque([(resumed_step, clock())], maxlen=_ETA_LINES)

    def log(self, record: StepRecord) -> None:
        """Print the record's line, at once."""
        self._seen.append((record.step, self._clock()))
        self._print(line_parts(record, self.total_steps, self._left_s(record)))
        self._stream.flush()

    def close(self) -> None:
        """Nothing to close; the stream is the caller's."""

    def _left_s(self, record: StepRecord) -> float:
        """Seconds to the last step at the recent pace, with all that was done besides training."""
        (first_step, first_s), (last_step, last_s) = self._seen[0], self._seen[-1]
        steps = last_step - first_step
        step_s = (last_s - first_s) / steps if steps > 0 else record.step_s
        return max(self.total_steps - record.step, 0) * step_s


def line_parts(record: StepRecord, total_steps: int, left_s: float) -> list[str]:
    """The parts of a line. MFU, device memory, validation loss and skipped steps only where there are any."""
    parts = [
        f"step {record.step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {record.loss:.4f}",
        f"grad norm {record.grad_norm:.3f}",
        f"lr {record.lr:.2e}",
        f"{record.tokens_per_s:,.0f} tokens/s",
    ]
    if record.mfu is not None:
        parts.append(f"MFU {100 * record.mfu:.1f} %")
    if record.device_peak_gib is not None:
        parts.append(f"device {size_text(round(record.device_peak_gib * GIB))}")
    parts.append(f"host {size_text(round(record.host_gib * GIB))}")
    if record.validation_loss is not None:
        parts.append(f"validation loss {record.validation_loss:.4f}")
        parts.append(f"perplexity {perplexity(record.validation_loss):.4g}")
    if record.skipped_steps:
        parts.append(f"skipped {record.skipped_steps}")
    parts.append(f"ETA {duration(left_s)}")
    return parts


def duration(seconds: float) -> str:
    """Seconds as the two largest units that say something: `42 s`, `3 min 05 s`, `1 h 03 min`, `2 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def _printer(stream: TextIO) -> Callable[[list[str]], None]:
    """What prints the parts of a line to `stream`: in colour if it is a terminal."""
    if not stream.isatty():
        return lambda parts: print(" | ".join(parts), file=stream)
    # Here, because importing rich draws from Python's random generator.
    from rich.console import Console
    from rich.text import Text

    # Never wrapped: it would break the columns.
    console = Console(file=stream, highlight=False, soft_wrap=True)
    return lambda parts: console.print(
        Text(" | ", style="dim").join(Text(part, style=_style(part)) for part in parts)
    )


def _style(part: str) -> str:
    return next((style for word, style in _STYLES.items() if word in part.split()), "")
