"""A family that a user's own module adds: trained, resumed and exported by its name."""

import sys

import pytest

from tests.support.small_run import SmallRuns, small_runs  # noqa: F401  (a fixture)
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf, try_model

MODULE = """
from dataclasses import replace

from torchround.models import OWN_FAMILIES

FAMILIES = (replace(OWN_FAMILIES["llama3"], name="mine"),)
"""
MINE = ("--model.module=my_family", "--model.family=mine", "--model.flavor=debug", "--engine.plan=none")


@pytest.fixture
def runs(small_runs, monkeypatch):  # noqa: F811
    monkeypatch.syspath_prepend(str(small_runs.folder))
    (small_runs.folder / "my_family.py").write_text(MODULE)
    return small_runs


def test_a_family_of_a_users_module_trains_resumes_and_is_exported(runs):
    assert runs("run", *MINE, "--training.steps=2") == 0
    assert runs("run", *MINE, "--training.steps=3", "--checkpoint.export=weights") == 0
    assert list((runs.folder / "outputs" / "run" / "export").glob("*/model*.safetensors"))


def test_a_module_that_only_a_run_s_folder_names_is_not_imported(runs, capsys, monkeypatch):
    assert runs("run", *MINE, "--training.steps=1") == 0
    monkeypatch.delitem(sys.modules, "my_family")
    run = runs.folder / "outputs" / "run"
    exporting = [str(run / "checkpoints" / checkpoint_name(1)), str(runs.folder / "exported")]
    trying = ["--run", str(run), "--prompt=a", "--max-tokens=1", "--engine.devices=cpu"]
    for command, arguments in ((export_hf, exporting), (try_model, trying)):
        assert command.main(arguments) == 2
        assert "importing it would run it" in capsys.readouterr().err and "my_family" not in sys.modules
    assert export_hf.main([*exporting, f"--config={run / 'config.toml'}"]) == 0
    assert try_model.main([*trying, "--model.module=my_family"]) == 0


def test_a_module_without_families_or_without_a_writer_is_one_message(runs, capsys):
    assert runs("run", "--model.module=json", "--model.family=mine") == 2
    assert "model.module: json gives no FAMILIES" in capsys.readouterr().err
    assert runs("run", *MINE, "--metrics.module=json") == 2
    assert "metrics.module: json gives no make_writer" in capsys.readouterr().err
