"""Checkpoints of other names, as docs/checkpoints.md ("Other names") describes: constants of one file and nothing else."""

import pytest

from torchround.checkpoint import folders
from torchround.commands import manage_checkpoints


@pytest.fixture
def other_names(monkeypatch):
    monkeypatch.setattr(folders, "STEP_NAME", "at-{:06d}-steps")
    monkeypatch.setattr(folders, "TENSOR_FILE", "part-{:d}.safetensors")


def test_a_run_with_other_names_saves_resumes_keeps_lists_and_verifies(small_runs, other_names, capsys):
    saving = "--checkpoint.interval_steps=2", "--checkpoint.keep_latest_k=2"
    assert small_runs("run", *saving, "--training.steps=4") == 0
    assert small_runs("run", *saving) == 0  # resumes after step 4
    run = small_runs.path("run")
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["at-000004-steps", "at-000005-steps"]
    newest = run / "checkpoints" / names[-1]
    assert {path.name for path in newest.glob("*.safetensors")} == {"part-0.safetensors"}
    assert manage_checkpoints.main(["verify", str(run)]) == 0
    capsys.readouterr()
    assert manage_checkpoints.main(["list", str(run)]) == 0
    assert capsys.readouterr().out.count("complete") == 2
    (run / "checkpoints" / "step-9").mkdir()  # no checkpoint under these names
    assert small_runs.saved("run") == [4, 5]


@pytest.mark.parametrize("name", ["step-", "step-01", "step-1x", "step-²", "step-1.tmp.tmp", "step-1" + "0" * 20])
def test_a_name_that_no_save_gives_is_no_checkpoint_s(name, monkeypatch):
    monkeypatch.setattr(folders, "STEP_NAME", "step-{}")
    monkeypatch.setattr(folders, "TENSOR_FILE", "tensors-{:05d}.safetensors")
    assert not folders.is_checkpoint_name(name) and folders.is_checkpoint_name("step-10.tmp")
    assert not folders.is_file_of_checkpoint("tensors-٠٠٠٠١.safetensors")
    assert folders.is_file_of_checkpoint("tensors-100000.safetensors")
