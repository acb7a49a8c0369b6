"""The console line, in a log and in a real terminal."""

import io
import os
import re

import pytest

from tests.support.step_records import record
from torchround.observe.reporters import ConsoleReport, duration


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_in_a_log_is_plain_text_with_every_known_figure() -> None:
    stream, clock = io.StringIO(), Clock()
    report = ConsoleReport(1000, stream=stream, clock=clock)
    clock.now_s = 24.0
    report.log(record(12, mfu=0.4125, device_peaks_gib=(10.123, 9.0), skipped_steps=2, validation_loss=3.5))
    assert stream.getvalue() == (
        "step   12/1000 | loss 3.2500 | grad norm 0.875 | lr 3.00e-04 | 12,346 tokens/s | MFU 41.2 % | "
        "device 10.12 GiB | host 1.50 GiB | validation loss 3.5000 | perplexity 33.12 | skipped 2 | ETA 32 min 56 s\n"
    )


def test_unknown_figures_are_not_printed() -> None:
    stream = io.StringIO()
    ConsoleReport(10, stream=stream).log(record(1))
    line = stream.getvalue()
    assert "MFU" not in line and "device" not in line and "skipped" not in line and "None" not in line
    assert "host 1.50 GiB" in line


def test_little_memory_is_printed_in_a_smaller_unit() -> None:
    stream = io.StringIO()
    ConsoleReport(10, stream=stream).log(record(1, device_peaks_gib=(0.3 / 1024,)))
    assert "device 0.30 MiB | host 1.50 GiB" in stream.getvalue()


def test_a_terminal_gets_the_same_line_in_colour_and_unbroken() -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        ConsoleReport(1000, stream=terminal).log(
            record(12, mfu=0.4, device_peaks_gib=(1.0,), skipped_steps=1)
        )
        shown = os.read(ours, 10_000).decode()
    os.close(ours)
    plain = io.StringIO()
    ConsoleReport(1000, stream=plain).log(record(12, mfu=0.4, device_peaks_gib=(1.0,), skipped_steps=1))
    assert "\x1b[" in shown or os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    without_colour = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert without_colour.split("ETA")[0].strip() == plain.getvalue().split("ETA")[0].strip()
    assert without_colour.count("\n") == 1


def test_the_time_left_follows_the_recent_pace_and_counts_from_the_resumed_step() -> None:
    stream, clock = io.StringIO(), Clock()
    report = ConsoleReport(1000, resumed_step=500, stream=stream, clock=clock)
    clock.now_s = 10.0
    report.log(record(510))  # 1 s a step since the resume, 490 left
    for step in range(520, 800, 10):
        clock.now_s += 30.0
        report.log(record(step))  # 3 s a step for longer than the pace is looked back
    report.log(record(1000))
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("ETA 8 min 10 s")
    assert lines[-2].endswith(f"ETA {duration(3 * (1000 - 790))}")
    assert lines[-1].endswith("ETA 0 s")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3600, "1 h 00 min"),
        (3780, "1 h 03 min"),
        (86400 * 2 + 4 * 3600, "2 d 04 h"),
    ],
)
def test_durations_show_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
