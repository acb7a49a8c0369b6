"""docs/schedules.md shows what the simulator gives, and its commands for pictures run."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from scripts import schedule_tables
from torchround.commands.simulate_schedules import main

PAGE = schedule_tables.PAGE.read_text(encoding="utf-8")
PICTURES = re.findall(r"^python scripts/simulate\.py (.*--plot (\S+))$", PAGE, flags=re.MULTILINE)
CHECKED_MODELS = ("Qwen3-1.7B", "Llama-3.1-8B")  # the others take most of the time and nothing new


def shown_table(name: str) -> str:
    return PAGE.partition(f"<!-- table {name} -->\n")[2].partition("\n<!-- end -->")[0]


def cells(name: str) -> dict[str, dict[str, str]]:
    """Row -> column -> text of a table in the page."""
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in shown_table(name).splitlines()
    )
    return {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("name", ["published", "pipeoffload", "paci"])
def test_a_table_in_the_page_is_what_the_simulator_gives(name: str) -> None:
    assert shown_table(name) == schedule_tables.TABLES[name]()
    assert schedule_tables.with_table(PAGE, name, shown_table(name)) == PAGE


@pytest.mark.parametrize("schedule", schedule_tables.BOUND)
def test_the_page_shows_the_simulated_bubbles_of_bound_schedules(schedule: str) -> None:
    row = cells("bound")[schedule]
    for model in CHECKED_MODELS:
        result = schedule_tables.compared(schedule, model)
        assert row[model] == f"{100 * result.bubble:.1f}"
    assert list(row.values())[-4:] == schedule_tables.other_cells(result)


@pytest.mark.parametrize("schedule", schedule_tables.ROUNDPIPE)
def test_todays_plans_are_at_least_as_good_as_the_page_says(schedule: str) -> None:
    promised_ms = float(cells("roundpipe")[schedule]["8B: ms / step"])
    assert schedule_tables.compared(schedule, "Llama-3.1-8B").makespan_s * 1e3 <= promised_ms * 1.005


def test_every_picture_of_the_page_exists_and_has_its_command() -> None:
    shown = set(re.findall(r"\]\(images/(\S+)\)", PAGE))
    assert shown == {name for _, name in PICTURES}
    assert all((schedule_tables.PAGE.parent / "images" / name).is_file() for name in shown)


@pytest.mark.parametrize("command", [command for command, name in PICTURES if name != "roundpipe.png"])
def test_a_command_for_a_picture_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(schedule_tables.ROOT)
    monkeypatch.syspath_prepend(str(schedule_tables.ROOT / "scripts"))
    words = shlex.split(command)
    words[-1] = str(tmp_path / words[-1])
    drawable = importlib.util.find_spec("matplotlib") is not None
    assert main(words if drawable else words[:-2]) == 0
    assert not drawable or Path(words[-1]).stat().st_size > 10_000
