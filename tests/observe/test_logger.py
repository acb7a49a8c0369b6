"""All reporters together: one that fails is one warning, and wandb is joined again after a resume."""

import io
import json
import logging
import os

import pytest

from tests.support.processes import run_program
from tests.support.step_records import record
from torchround.config import MetricsTable
from torchround.observe.console import ConsoleReport
from torchround.observe.logger import MetricsLogger, open_metrics
from torchround.observe.metrics_file import MetricsFile


class Failing:
    def log(self, record):
        raise ConnectionError(f"step {record.step} was not sent")

    def close(self):
        raise ConnectionError("still no network")


def test_a_failing_reporter_costs_one_warning_and_the_others_continue(tmp_path, caplog):
    stream, closed = io.StringIO(), io.StringIO()
    closed.close()
    with caplog.at_level(logging.WARNING):
        metrics = MetricsLogger(
            {
                "the network": Failing,
                "a closed console": lambda: ConsoleReport(3, stream=closed),
                "a file": lambda: MetricsFile(tmp_path / "metrics.jsonl"),
                "the console": lambda: ConsoleReport(3, stream=stream),
            }
        )
        for step in (1, 2, 3):
            metrics.log(record(step))
        metrics.close()
        metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert stream.getvalue().count("\n") == 3
    assert len(caplog.records) == 2 and "step 1 was not sent" in caplog.text and "a closed console" in caplog.text


def test_a_reporter_that_cannot_be_made_costs_one_warning_too(tmp_path, caplog, capsys):
    (tmp_path / "run").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        metrics = open_metrics(MetricsTable(), tmp_path / "run", "run", total_steps=3, config={})
        metrics.log(record(1))
        metrics.close()
    assert "step 1/3" in capsys.readouterr().out
    assert len(caplog.records) == 1 and "metrics.jsonl failed" in caplog.text


OUR_WRITER = """
class Writer:
    def __init__(self, folder, config):
        self.file = (folder / "ours.txt").open("w")
        self.file.write(config["run"])

    def log(self, record):
        self.file.write(f" {record.step}")

    def close(self):
        self.file.close()


make_writer = Writer
"""


def test_a_writer_of_a_users_module_gets_every_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "our_metrics.py").write_text(OUR_WRITER)
    metrics = open_metrics(MetricsTable(module="our_metrics"), tmp_path, "run", total_steps=3, config={"run": "x"})
    for step in (1, 2):
        metrics.log(record(step))
    metrics.close()
    assert (tmp_path / "ours.txt").read_text() == "x 1 2"


WANDB_PROGRAM = """
import sys
from pathlib import Path
from tests.support.step_records import ENGINE, record
from torchround.config import MetricsTable
from torchround.observe.logger import open_metrics

open_metrics(MetricsTable(), Path(sys.argv[1]) / "without", "a run", 10, {}).close()
assert "wandb" not in sys.modules, "imported before it was asked for"
folder, mode, resumed_step, run_id = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] or None
table = MetricsTable(wandb=mode, wandb_project="tests")
metrics = open_metrics(table, folder, "a run", 10, {"training": {"steps": 10}}, resumed_step, run_id)
for step in range(resumed_step + 1, resumed_step + 4):
    metrics.log(record(step, loss=float(step), **ENGINE))
metrics.close()
print("wandb imported:", "wandb" in sys.modules)
print("run id:", metrics.wandb_run_id)
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)


def run_with_wandb(folder, mode, resumed_step=0, run_id="", **environment):
    settings = {"HOME": str(folder), "WANDB_SILENT": "true", **environment}
    result = run_program("-c", WANDB_PROGRAM, folder, mode, resumed_step, run_id, **settings)
    pairs = dict(line.split(": ") for line in result.stdout.splitlines() if ": " in line)
    return pairs, result.stderr


def logged_by_wandb(folder, run_id):
    """Return the records in wandb's own files of this run: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in sorted(folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb")):
        content, position, entry = path.read_bytes(), 7, b""
        while position + 7 <= len(content):
            if 32768 - position % 32768 < 7:  # too little of a block is left for a header
                position += 32768 - position % 32768
                continue
            length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
            entry += content[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):  # whole, or the last part
                items, entry = wandb_internal_pb2.Record.FromString(entry).history.item, b""
                if items:
                    records.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return records


def test_wandb_works_offline_and_is_rejoined_after_a_resume(tmp_path):
    first, printed = run_with_wandb(tmp_path, "offline", WANDB_MODE="offline", WANDB_SILENT="false")
    assert "wandb sync" in printed and "engine/" not in printed  # what to do, without dozens of last values
    second, _ = run_with_wandb(tmp_path, "offline", resumed_step=2, run_id=first["run id"], WANDB_MODE="offline")
    assert second["run id"] == first["run id"] != "None"
    records = logged_by_wandb(tmp_path, first["run id"])
    assert [entry["step"] for entry in records] == [1, 2, 3, 3, 4, 5]
    assert all(entry["loss"] == entry["step"] and "mfu" not in entry for entry in records)
    curves = {"engine/busy_s/0": 0.25, "engine/busy_s/1": 0.5, "engine/host_peak_gib": 8.0}
    assert all(curves.items() <= entry.items() for entry in records)
