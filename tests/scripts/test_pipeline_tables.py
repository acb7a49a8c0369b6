"""The pages on schedules and results show the tables that simulation gives, and the commands for pictures run."""

import re
import shlex
from pathlib import Path

import pytest

from scripts import pipeline_tables
from torchround.simulate.command import main

SCHEDULES_PAGE = pipeline_tables.PAGES[0]
PAGE = SCHEDULES_PAGE.read_text(encoding="utf-8")
PICTURES = re.findall(r"^torchround simulate (.*--plot (\S+))$", PAGE, flags=re.MULTILINE)
# Half a minute and more each.
SLOW = {"kept", "longest"}
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


@pytest.mark.documented
@pytest.mark.parametrize("command", [command for command, name in PICTURES if name != "roundpipe.png"])
def test_a_command_for_a_picture_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(pipeline_tables.ROOT)
    monkeypatch.syspath_prepend(str(pipeline_tables.ROOT / "scripts"))
    words = shlex.split(command)
    words[-1] = str(tmp_path / words[-1])
    assert main(words) == 0 and Path(words[-1]).stat().st_size > 10_000
