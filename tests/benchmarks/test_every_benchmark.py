"""Every benchmark runs at a tiny size, and every row of the results table names a command that exists."""

import json
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, find, main
from benchmarks.frame import in_turns, median_ratio
from benchmarks.kept_schedule import IDLE_LINK, compare, kept_blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
COMPILES = {"optimizer-speed"}
# Ten seconds and more each.
SLOW = {"data-wait", "machines", "schedule"}


def tier_of(name):
    return pytest.mark.nightly if name in SLOW else pytest.mark.compiles if name in COMPILES else pytest.mark.documented


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier_of(name)) for name in BENCHMARKS])
def test_a_benchmark_runs_at_a_tiny_size_and_reports_its_machine(name, tmp_path):
    """Start each in a process of its own, as users do: several change threads or the environment for good."""
    command = [sys.executable, "-m", "benchmarks", name, *shlex.split(find(name).tiny)]
    out = tmp_path / "report.json"
    done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(out.read_text(encoding="utf-8"))
    # Two sides that compute the same have the same losses at any size.
    assert report.get("steps_with_another_loss", 0) == 0 and report.get("losses_equal", True)
    assert report["machine"]["cores"] >= 1 and report["command"].startswith(f"python -m benchmarks {name} ")
    [row] = [line for line in done.stderr.splitlines() if line.startswith("| ")]
    assert row.count(" | ") == 4 and report["command"] in row


def test_every_result_names_a_command_that_exists():
    commands = re.findall(r"\| `python -m (benchmarks .*?)` \|", PAGE.read_text(encoding="utf-8"))
    names = set()
    for command in commands:
        _, name, *arguments = shlex.split(command)
        find(name).parse(name, arguments)  # ends the process if an option is unknown
        names.add(name)
    assert names == {*BENCHMARKS} - {"gpu"}


def test_the_list_names_every_benchmark_and_an_unknown_name_is_refused(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S.*", printed, re.MULTILINE) for name in BENCHMARKS)
    assert main(["no-such"]) == 2
    assert "plain-loop" in capsys.readouterr().err


def test_turns_begin_with_another_work_each_time_and_leave_warm_up_out():
    calls = []

    def work(name):
        calls.append(name)
        return len(calls)

    found = in_turns({"a": lambda: work("a"), "b": lambda: work("b")}, turns=2, warm_up_turns=1)
    assert "".join(calls) == "abbaab"
    assert found == {"a": [4, 5], "b": [3, 6]}
    # A disturbance of both sides leaves the median ratio alone.
    assert median_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0


# With 3 the copies take a third of the time that computation takes.
@pytest.mark.parametrize("link", [IDLE_LINK, pytest.param(3.0, marks=pytest.mark.nightly)])
def test_a_step_that_keeps_is_as_simulated_and_shorter_than_recomputation(link):
    """In modelled time, so no machine makes it longer."""
    sizes = {"devices": 2, "microbatches": 4, "stage_blocks": 4, "steps": 2, "host_share": None}
    found = compare(Namespace(**sizes, link=link), kept_blocks(4))
    assert found["kept"]["kept_parts"] > 0
    # The simulation takes the copies of a stage's first micro-batch as hidden: 0.1 % of these steps.
    assert found["difference"] == pytest.approx(0.0, abs=0.01)
    assert found["gain"] == pytest.approx(found["simulated_gain"], abs=0.01) and found["gain"] > 0.12
    up_s, down_s = found["kept"]["link_s"]
    assert up_s == pytest.approx(down_s, rel=0.05) and up_s > 0
