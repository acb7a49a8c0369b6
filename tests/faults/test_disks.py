"""A disk runs full or becomes read-only under a run: training continues, and saves succeed again once there is room."""

import re

import pytest

from tests.support.small_run import ASYNC, SmallRuns
from torchround.checkpoint import verify_checkpoint

EVERY_SECOND = ["--checkpoint.interval_steps=2", "--training.steps=10", "--checkpoint.keep_latest_k=0"]
SYNC = ["--engine.plan=none", "--engine.measure_steps=4"]  # the plan is also written anew in trouble
TROUBLES = {
    "full": "are free|File too large",
    "filling": "No space left on device|File too large",
    "read-only": "Read-only file system|Permission denied|File exists",
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trouble", "mode"),
    [
        pytest.param(trouble, mode, id=f"{trouble}, {name}")
        for trouble in TROUBLES
        for name, mode in (("sync", SYNC), ("async", [ASYNC]))
    ],
)
def test_training_continues_the_old_checkpoint_verifies_and_saves_succeed_once_there_is_room(
    processes, tmp_path, trouble, mode
):
    """The trouble begins when step 4 is dispatched and ends when step 8 is, so the saves of steps 4 and 6 fail."""
    (tmp_path / "disk").mkdir()
    runs, disk = SmallRuns(tmp_path), SmallRuns(tmp_path / "disk")
    arguments = [*EVERY_SECOND, *mode]
    run = processes.run(
        "tests.support.scenarios:trains_while_the_disk_is", trouble, 4, 8, arguments, folder=disk.folder
    )
    assert run.wait() == 0, run.text()
    warnings = re.findall(r"^WARNING: .*checkpoint of step (\d+) could not be .*$", run.text(), re.MULTILINE)
    assert warnings == ["4", "6"] and re.search(TROUBLES[trouble], run.text()), run.text()
    assert "verified step 2 in trouble" in run.text()
    whole = processes.run("tests.support.scenarios:trains", ["--run.name=whole", *arguments], folder=tmp_path)
    assert whole.wait() == 0, whole.text()
    (disk.folder / "kept" / "run").rename(runs.path("run"))
    assert runs.saved("run") == [2, 8, 10]
    runs.assert_same("run", "whole", step=10)
    for step in runs.saved("run"):
        assert verify_checkpoint(runs.path("run") / "checkpoints" / f"step-{step}") == step
