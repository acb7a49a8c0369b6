"""What `torchround plan` and `--dry-run` say about several machines."""

import re
from pathlib import Path

import pytest

from tests.support.small_run import small_runs
from torchround.commands import plan_run

__all__ = ["small_runs"]

DEBUG = ["--config", "debug.toml", "--device", "rtx4090", "--num-devices", "2"]
SMALL_HOST = ["--host-memory-gib", "0.0296"]


@pytest.fixture
def printed(capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    return capsys


def test_a_plan_for_four_machines_shows_the_exchange_and_the_speed_of_1_to_16(printed):
    machines = ["--machines.planned", "4", "--machines.gbit_per_s", "0.9"]
    assert plan_run.main([*DEBUG, *machines]) == 0
    out = printed.readouterr().out
    assert "4 machines share each step of 4 micro-batches, at most 1 on each" in out
    assert re.search(r"link: (\S+) MiB of gradients out, \1 MiB of weights back", out)
    assert re.search(r"at 0.9 Gb/s: (\S+) s and \1 s on the wire, \S+ s not hidden by compute; step \S+ s", out)
    head, *rows = (line.split() for line in out.partition("tokens/s of all machines, with")[2].splitlines()[2:])
    assert " ".join(head) == "machines micro-batches host 0.9 Gb/s no exchange"
    table = {row[0]: row[1:] for row in rows[1:6]}
    assert list(table) == ["1", "2", "4", "8", "16"]
    assert table["1"][-1] == "(1.00)" and table["8"] == ["without", "work"]


def test_a_run_that_does_not_fit_one_machine_is_told_how_many_would_do(printed):
    assert plan_run.main([*DEBUG, *SMALL_HOST]) == 1
    assert "  on 2 such machines: fits\n" in printed.readouterr().out


def test_a_dry_run_plans_for_the_configured_machines_and_a_run_for_its_own(small_runs, capsys):
    machines = ["--machines.planned=2", "--engine.plan=none", "--engine.measure_steps=0"]
    assert small_runs("run", *machines, "--dry-run") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 machines share each step of 4 micro-batches, at most 2 on each" in out
    assert "2 micro-batches in 1 round(s)" in out and "messages of other machines" in out
    assert "exchange per step on the busiest link" in out
    assert small_runs("run", *machines) == 0
    assert "4 micro-batches in 1 round(s)" in " ".join(capsys.readouterr().out.split())
