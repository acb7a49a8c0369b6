"""A disk fills up or becomes read-only under a run: training continues, and saves succeed again once there is room."""

import contextlib
import re
import shutil

import pytest

from tests.support.disks import files_limited_to
from tests.support.small_run import SmallRuns, awaiting_saves, before_step
from torchround.checkpoint import verify_checkpoint
from torchround.checkpoint.folders import checkpoint_name

EVERY_SECOND = ["--checkpoint.interval_steps=2", "--training.steps=10", "--checkpoint.keep_latest_k=0"]
LEFT_BYTES = 64 << 10  # less than the tensors of a checkpoint need


@pytest.mark.parametrize("update", ["sync", pytest.param("async", marks=pytest.mark.nightly)])
def test_training_continues_the_old_checkpoint_verifies_and_saves_succeed_once_there_is_room(
    small_runs, monkeypatch, caplog, update
):
    arguments = [*EVERY_SECOND, f"--engine.update={update}"]
    assert small_runs("whole", *arguments) == 0
    checkpoints = small_runs.path("run") / "checkpoints"
    saves_ended, trouble = awaiting_saves(monkeypatch), contextlib.ExitStack()

    def begin():
        saves_ended(1)
        trouble.enter_context(files_limited_to(LEFT_BYTES))

    def end():
        saves_ended(3)
        assert verify_checkpoint(checkpoints / checkpoint_name(2)) == 2
        trouble.close()

    with trouble:
        before_step(monkeypatch, 4, begin)
        before_step(monkeypatch, 8, end)
        assert small_runs("run", *arguments) == 0
    for step in (4, 6):
        assert f"the checkpoint of step {step} could not be written" in caplog.text
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == caplog.text.count("training continues") == 2
    assert "File too large" in caplog.text
    assert small_runs.saved("run") == [2, 8, 10]
    small_runs.assert_same("run", "whole", step=10)
    assert [verify_checkpoint(checkpoints / checkpoint_name(step)) for step in (2, 8, 10)] == [2, 8, 10]


TROUBLES = {
    "full": "are free|File too large",
    "filling": "No space left on device|File too large",
    "read-only": "Read-only file system|Permission denied|File exists",
}


@pytest.mark.nightly
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_disk_of_its_own_that_fills_up_or_becomes_read_only_costs_two_saves_also_with_a_new_plan(
    processes, tmp_path, trouble
):
    runs = SmallRuns(tmp_path)
    arguments = [*EVERY_SECOND, "--engine.plan=none", "--engine.measure_steps=4"]
    scenario = "tests.support.scenarios:trains_while_the_disk_is"
    run = processes.run(scenario, trouble, 4, 8, arguments, folder=tmp_path)
    assert run.wait() == 0 and re.search(TROUBLES[trouble], run.text()), run.text()
    warnings = re.findall(r"^WARNING: .*checkpoint of step (\d+) could not be .*$", run.text(), re.MULTILINE)
    assert warnings == ["4", "6"] and "verified step 2 in trouble" in run.text()
    shutil.rmtree(tmp_path / "outputs")
    (tmp_path / "kept").rename(tmp_path / "outputs")
    whole = processes.run("tests.support.scenarios:trains", ["--run.name=whole", *arguments], folder=tmp_path)
    assert whole.wait() == 0, whole.text()
    assert runs.saved("run") == [2, 8, 10]
    runs.assert_same("run", "whole", step=10)
