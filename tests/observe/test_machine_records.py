"""The times of several machines in a record: each machine's own, the slowest named, on the console and in the file."""

import io
import json
from dataclasses import replace

import pytest

from tests.support.step_records import ENGINE, record
from torchround.observe import MetricsFile
from torchround.observe.record import MachineTimes
from torchround.observe.reporters import SLOW_MACHINE, ConsoleReport


def machine(name, **times):
    """Make the times of a machine whose own work takes 1 s, with changes."""
    usual = MachineTimes(name, 2.0, 0.0, 1.0, 0.5, 0.1, 0.2, 3.0, 40.0)
    return replace(usual, **times)


def line(monkeypatch, shown, columns=300):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    ConsoleReport(1000, stream=stream).log(shown)
    return stream.getvalue()


@pytest.mark.parametrize(
    "slow", [{"busy_s": 1.2}, {"optimizer_s": 1.2}, {"data_s": 0.2}], ids=lambda times: next(iter(times))
)
def test_the_slowest_machine_is_the_one_whose_own_work_takes_longest(slow, monkeypatch):
    # The waits for others are longest where the work is shortest, so they must not count.
    machines = (machine("machine 0 (a)", peers_wait_s=1.0), machine("machine 1 (b)", **slow))
    assert record(1, machines=machines).slowest == 1
    assert "machine 1 (b) slowest (+20 %)" in line(monkeypatch, record(1, machines=machines))


def test_machines_that_are_about_as_fast_are_not_named(monkeypatch):
    machines = (machine("machine 0 (a)"), machine("machine 1 (b)", busy_s=SLOW_MACHINE - 0.01))
    assert "slowest" not in line(monkeypatch, record(1, machines=machines))
    assert "slowest" not in line(monkeypatch, record(1))


def test_the_file_has_a_list_by_machine_for_each_time(tmp_path):
    machines = (machine("machine 0 (a)", busy_s=1.5), machine("machine 1 (b)", sent_gib=2.0))
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.log(record(1, machines=machines))
    metrics.log(record(2))
    metrics.close()
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "machines" not in second
    assert first["machines"]["slowest"] == 0
    assert first["machines"]["name"] == ["machine 0 (a)", "machine 1 (b)"]
    own = record(3, **ENGINE, peers_wait_s=0.25, sent_gib=1.5, saved_gib=0.5).machine_times("machine 1 (b)")
    assert own == MachineTimes("machine 1 (b)", 0.5, 0.01, 0.5, 0.02, 0.01, 0.25, 1.5, 1.5, 0.5)
    assert MachineTimes.from_dict(json.loads(json.dumps(own.as_dict()))) == own
    assert first["machines"]["busy_s"] == [1.5, 1.0] and first["machines"]["sent_gib"] == [3.0, 2.0]
