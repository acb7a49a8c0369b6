"""A family that a user's own module adds: trained, resumed and exported by its name."""

import pytest

from tests.support.small_run import SmallRuns, small_runs  # noqa: F401  (a fixture)

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


def test_a_module_without_families_is_one_message(runs, capsys):
    assert runs("run", "--model.module=json", "--model.family=mine") == 2
    assert "model.module: json gives no FAMILIES" in capsys.readouterr().err
