"""Every benchmark runs at a tiny size, and every row of the results table names a command that exists."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, find, main
from benchmarks.frame import in_turns, median_ratio

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
COMPILES = {"compiled-layers", "optimizer-speed"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.compiles if name in COMPILES else pytest.mark.documented)
        for name in BENCHMARKS
    ],
)
def test_a_benchmark_runs_at_a_tiny_size_and_reports_its_machine(name: str, tmp_path: Path) -> None:
    """Start each in a process of its own, as users do: several change threads or the environment for good."""
    command = [sys.executable, "-m", "benchmarks", name, *shlex.split(find(name).tiny)]
    out = tmp_path / "report.json"
    done = subprocess.run([*command, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["machine"]["cores"] >= 1 and report["command"].startswith(f"python -m benchmarks {name} ")
    [row] = [line for line in done.stderr.splitlines() if line.startswith("| ")]
    assert row.count(" | ") == 4 and report["command"] in row


def result_rows() -> list[list[str]]:
    """Return the cells of each row that names a command: measured, figure, rival, command, machine, date."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "python -m benchmarks " in line
    ]
    return [row for row in rows if len(row) > 1]


@pytest.mark.parametrize("row", result_rows(), ids=lambda row: row[0][:60])
def test_a_result_names_its_command_machine_and_date(row: list[str]) -> None:
    measured, figure, rival, command, machine, date = row
    module, name, *arguments = shlex.split(command.strip("`"))[2:]
    assert module == "benchmarks" and measured and figure and rival
    find(name).parse(name, arguments)  # ends the process if an option is unknown
    described = re.findall(r"^\| ([A-Z]) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert machine.split(",")[0] in described or machine.startswith("any: ")
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", date)


def test_every_benchmark_that_needs_no_gpu_has_a_result_and_every_machine_is_described() -> None:
    rows = result_rows()
    assert {row[3].strip("`").split()[3] for row in rows} == {*BENCHMARKS} - {"gpu"}
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"\n| {row[4].split(',')[0]} | " in page for row in rows if not row[4].startswith("any: "))


def test_the_list_names_every_benchmark_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\S.*", printed, re.MULTILINE) for name in BENCHMARKS)


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such"]) == 2
    assert "plain-loop" in capsys.readouterr().err


def test_turns_begin_with_another_work_each_time_and_leave_warm_up_out() -> None:
    calls: list[str] = []

    def work(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = in_turns({"a": lambda: work("a"), "b": lambda: work("b")}, turns=2, warm_up_turns=1)
    assert "".join(calls) == "abbaab"
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_a_disturbance_of_both_sides_leaves_the_median_ratio_alone() -> None:
    assert median_ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0
