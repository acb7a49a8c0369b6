"""The console line, in a log and in a real terminal, and the times of several machines in it and in the metrics."""

import fcntl
import io
import json
import os
import struct
import sys
import termios
from dataclasses import asdict, replace
from datetime import datetime

import pytest

from tests.support.step_records import ENGINE, Clock, record
from torchround.observe.console import SLOW_MACHINE, ConsoleReport, duration
from torchround.observe.metrics_file import MetricsFile
from torchround.observe.record import MachineTimes, PromptSample

AT_NOON = {"now": lambda: datetime(2026, 1, 2, 12, 4, 31)}
FULL = {"mfu": 0.4125, "device_peaks_gib": (10.123, 9.0), "skipped_steps": 2, "validation_loss": 3.5}


def line(monkeypatch, columns, total_steps=1000, **figures):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, clock = io.StringIO(), Clock()
    report = ConsoleReport(total_steps, stream=stream, clock=clock, **AT_NOON)
    clock.now_s += 24.0
    report.log(record(12, **figures))
    assert stream.getvalue().count("\n") == 1
    return stream.getvalue().rstrip("\n")


def test_a_wide_line_has_every_known_figure_and_a_narrow_one_what_a_user_looks_at_first(monkeypatch):
    wide, narrow = line(monkeypatch, 300, **FULL), line(monkeypatch, 80, **FULL)
    first = ["12:04:31", "12/1000", "3.2500", "3.5000", "skipped 2"]
    rest = ["3.00e-04", "0.875", "12,346", "41.2 %", "10.12 GiB", "1.50 GiB", "32 min"]
    assert [figure for figure in (*first, *rest) if figure not in wide] == []
    assert [figure for figure in first if figure not in narrow] == [] and "MFU" not in narrow
    unknown = line(monkeypatch, 300)
    assert not [word for word in ("MFU", "device", "skipped", "None") if word in unknown] and "1.50 GiB" in unknown
    assert "0.30 MiB" in line(monkeypatch, 300, device_peaks_gib=(0.3 / 1024,))
    assert "buffers 1.00 GiB" in line(monkeypatch, 300, device_peaks_gib=(1.0,), has_virtual_devices=True)


@pytest.mark.parametrize(("columns", "total_steps"), [(60, 2_000_000), (80, 1000), (100, 12), (120, 2_000_000)])
def test_no_line_is_wider_than_the_console(monkeypatch, columns, total_steps):
    for figures in ({}, {"tokens_per_s": 12_345_678.9}, FULL):
        shown = line(monkeypatch, columns, total_steps, **figures)
        # The step and its losses are never left out, however narrow the console is.
        least = "12:04:31  step      12/2000000  loss 3.2500  validation loss 3.5000"
        assert len(shown) <= max(columns, len(least)) and "loss 3.2500" in shown


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_gets_the_line_of_its_width(monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "__stdout__", terminal)
        ConsoleReport(1000, stream=terminal, **AT_NOON).log(record(12, **FULL))
        shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert shown.split("ETA")[0].strip() == line(monkeypatch, columns, **FULL).split("ETA")[0].strip()
    assert shown.count("\n") == 1


def test_the_time_left_follows_the_recent_pace_and_counts_from_the_resumed_step():
    stream, clock = io.StringIO(), Clock()
    report = ConsoleReport(1000, resumed_step=500, stream=stream, clock=clock)
    clock.now_s += 10.0
    report.log(record(510))  # 1 s a step since the resume, 490 left
    for step in range(520, 800, 10):
        clock.now_s += 30.0
        report.log(record(step))  # 3 s a step for longer than the pace is looked back
    report.log(record(1000))
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("ETA 8 min")
    assert lines[-2].endswith(f"ETA {3 * (1000 - 790) // 60} min")
    assert lines[-1].endswith("ETA 0 s")


def test_durations_show_their_two_largest_units():
    texts = {0.4: "0 s", 59.4: "59 s", 59.6: "1 min 00 s", 185: "3 min 05 s", 3600: "1 h 00 min", 3780: "1 h 03 min"}
    for seconds, text in {**texts, 86400 * 2 + 4 * 3600: "2 d 04 h"}.items():
        assert duration(seconds) == text


def test_continuations_follow_their_line_and_cannot_command_the_terminal():
    stream = io.StringIO()
    report = ConsoleReport(1000, stream=stream, **AT_NOON)
    report.log(record(12, samples=(PromptSample("one\nprompt", " and\x1b[31m\nmore"), PromptSample("b", ""))))
    assert stream.getvalue().splitlines()[1:] == ["one", "          prompt» and\\x1b[31m", "          more", "b»"]


def machine(name, **times):
    usual = MachineTimes(name, 2.0, 0.0, 1.0, 0.5, 0.1, 0.2, 40.0)
    return replace(usual, **times)


@pytest.mark.parametrize(
    "slow", [{"busy_s": 1.2}, {"optimizer_s": 1.2}, {"data_s": 0.2}], ids=lambda times: next(iter(times))
)
def test_the_slowest_machine_is_the_one_whose_own_work_takes_longest(slow, monkeypatch):
    # The waits for others are longest where the work is shortest, so they must not count.
    machines = (machine("machine 0 (a)", peers_wait_s=1.0), machine("machine 1 (b)", **slow))
    assert record(1, machines=machines).slowest == 1
    assert "machine 1 (b) slowest (+20 %)" in line(monkeypatch, 300, machines=machines)
    machines = (machine("machine 0 (a)"), machine("machine 1 (b)", busy_s=SLOW_MACHINE - 0.01))
    assert "slowest" not in line(monkeypatch, 300, machines=machines), "they are about as fast"


def test_the_file_has_a_list_by_machine_for_each_time(tmp_path):
    machines = (machine("machine 0 (a)", busy_s=1.5), machine("machine 1 (b)"))
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.log(record(1, machines=machines))
    metrics.log(record(2))
    metrics.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "machines" not in second
    assert first["machines"]["slowest"] == 0
    assert first["machines"]["name"] == ["machine 0 (a)", "machine 1 (b)"]
    own = record(3, **ENGINE, peers_wait_s=0.25).machine_times("machine 1 (b)")
    assert own == MachineTimes("machine 1 (b)", 0.5, 0.01, 0.5, 0.02, 0.01, 0.25, 1.5)
    assert MachineTimes(**json.loads(json.dumps(asdict(own)))) == own
    assert first["machines"]["busy_s"] == [1.5, 1.0]
