"""The pages on schedules and results show the tables that simulation gives, and the commands for pictures run."""

import re
import shlex
from pathlib import Path

import pytest

from scripts import line_chart, pipeline_tables
from torchround.simulate.command import main

SCHEDULES_PAGE = pipeline_tables.PAGES[0]
PAGE = SCHEDULES_PAGE.read_text(encoding="utf-8")
PICTURES = re.findall(r"^torchround simulate (.*--plot (\S+))$", PAGE, flags=re.MULTILINE)
# Half a minute and more each.
SLOW = {"a800", "kept", "longest", "muon"}
SHOWN = [
    pytest.param(path, name, id=name, marks=pytest.mark.nightly if name in SLOW else ())
    for path in pipeline_tables.PAGES
    for name in pipeline_tables.tables_in(path.read_text(encoding="utf-8"))
]


@pytest.mark.documented
@pytest.mark.parametrize(("path", "name"), SHOWN)
def test_a_table_in_a_page_is_what_simulation_gives(path, name):
    page = path.read_text(encoding="utf-8")
    table = pipeline_tables.TABLES[name]()
    assert pipeline_tables.table_in(page, name) == table
    assert pipeline_tables.with_table(page, name, table) == page


@pytest.mark.parametrize("path", pipeline_tables.PAGES, ids=lambda path: path.stem)
def test_a_drawing_is_that_of_the_tables_in_its_page(path):
    for name, drawn in pipeline_tables.drawings_of(path.read_text(encoding="utf-8")).items():
        assert (path.parent / "images" / name).read_text(encoding="utf-8") == drawn, name


def test_a_chart_reads_the_rows_that_it_names_and_leaves_out_cells_without_a_number():
    table = "| x | a | b |\n| --- | ---: | ---: |\n| 2 cards | 5 (1.0) | - |\n| all | 9 | 9 |\n| 4 cards | 7 | 8.5 |"
    assert line_chart.series_of(line_chart.Panel("", r"(\d+) cards"), table) == {"a": [(2, 5), (4, 7)], "b": [(4, 8.5)]}
    turned = line_chart.series_of(line_chart.Panel("", r"(\w)", is_transposed=True), table.replace("a | b", "1 | 2"))
    assert turned["4 cards"] == [(1, 7), (2, 8.5)]


@pytest.mark.documented
def test_the_check_names_a_stale_table(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- table paci -->\n| old |\n<!-- end -->\n", encoding="utf-8")
    assert pipeline_tables.main(["--check"], [page]) == 1
    assert "page.md: paci" in capsys.readouterr().err
    assert pipeline_tables.main(["--write"], [page]) == 0
    assert pipeline_tables.main(["--check"], [page]) == 0


@pytest.mark.documented
@pytest.mark.parametrize("command", [command for command, name in PICTURES if name != "roundpipe.png"])
def test_a_command_for_a_picture_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(pipeline_tables.ROOT)
    monkeypatch.syspath_prepend(str(pipeline_tables.ROOT / "scripts"))
    words = shlex.split(command)
    words[-1] = str(tmp_path / words[-1])
    assert main(words) == 0 and Path(words[-1]).stat().st_size > 10_000
