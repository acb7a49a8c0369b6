"""Validation: the best checkpoint is kept, listed and exported, and patience ends a run at the same step after a resume."""

import json
import math
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file

from tests.support.small_run import ASYNC, PREDICT, stop_after
from torchround.checkpoint import Checkpointer, CheckpointError
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands.manage_checkpoints import main as manage
from torchround.run.validation import RunValidation, ValidationProgress, best_of, kept_losses

VALIDATED = ("--validation.interval_steps=1", '--validation.sources=[{ path = "text.jsonl" }]')
LONG = (*VALIDATED, "--training.steps=9", "--lr_schedule.decay=none")
BEST = "--validation.keep_best=true"
# The best loss is of step 3.
LOSSES = {1: 5.0, 2: 4.0, 3: 2.0, 4: 3.0, 5: math.nan, 6: 2.0, 7: 2.5, 8: 3.0, 9: 3.0}


@pytest.fixture
def losses(monkeypatch):
    given = defaultdict(lambda: 1.0, LOSSES)
    monkeypatch.setattr(RunValidation, "loss", lambda self, engine: given[engine.store.step])
    return given


def test_every_validation_of_a_run_that_predicts_is_of_the_weights_that_its_checkpoint_holds(small_runs):
    """A run that begins with a checkpoint's weights and learns next to nothing has the loss that was validated."""
    predicts = (*VALIDATED, ASYNC, PREDICT, "--checkpoint.interval_steps=3", "--validation.max_batches=2")
    assert small_runs("run", *predicts) == 0
    validated = {line["step"]: line["validation_loss"] for line in small_runs.steps("run")}
    idle = ("--checkpoint.load=weights", "--training.steps=1", "--optimizer.lr=1e-30")
    for step in (3, 5):
        start = f"--checkpoint.load_path={small_runs.path('run') / 'checkpoints' / checkpoint_name(step)}"
        assert small_runs(f"from-{step}", *predicts, *idle, start) == 0
        assert small_runs.steps(f"from-{step}")[0]["validation_loss"] == validated[step]


def test_the_best_checkpoint_is_kept_listed_and_exported(small_runs, losses, capsys):
    few = ("--checkpoint.interval_steps=2", "--checkpoint.keep_latest_k=2", "--checkpoint.export=weights")
    assert small_runs("run", *LONG, *few, BEST) == 0
    assert small_runs.saved("run") == [3, 8, 9]
    assert small_runs("without", *LONG, *few) == 0
    assert small_runs.saved("without") == [8, 9]
    folder = small_runs.path("run")
    [exported] = (folder / "export").iterdir()
    [file] = exported.glob("*.safetensors")
    assert exported.name == checkpoint_name(3)
    assert torch.equal(load_file(file)["lm_head.weight"], small_runs.state("run", 3)["weights/head.weight"])
    capsys.readouterr()
    assert manage(["list", str(folder)]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "2.0000, the best" in rows[checkpoint_name(3)] and "3.0000" in rows[checkpoint_name(9)]
    assert "best" not in rows[checkpoint_name(8)] + rows[checkpoint_name(9)]


@pytest.mark.parametrize("stop", [pytest.param(2, marks=pytest.mark.nightly), 3, 7])
def test_a_resumed_run_keeps_the_same_best_checkpoint_and_saves_no_worse_one(small_runs, losses, stop):
    best = (*LONG, BEST, "--checkpoint.keep_latest_k=1")
    stop_after(stop, small_runs, "run", *best)
    assert small_runs("run", *best) == 0
    assert small_runs.saved("run") == [3, 9]
    progress = small_runs.saved_state("run", 9)["validation"]
    assert progress == {"loss": 3.0, "best_loss": 2.0, "best_step": 3, "since_best": 6}


def test_a_better_checkpoint_that_cannot_be_saved_leaves_the_best_one_there_is(small_runs, losses, monkeypatch, caplog):
    save = Checkpointer.save

    def failing(self, step, *rest):
        if step == 3:
            raise CheckpointError("No space left on device")
        return save(self, step, *rest)

    monkeypatch.setattr(Checkpointer, "save", failing)
    assert small_runs("run", *LONG, "--checkpoint.interval_steps=4", "--checkpoint.keep_latest_k=1", BEST) == 0
    assert "No space left" in caplog.text
    # Steps 2, 4, 8 and 9 were saved, with losses 4, 3, 3 and 3: the first of the equal ones stays.
    assert small_runs.saved("run") == [4, 9]


def test_a_last_step_that_is_due_to_be_saved_is_saved_once_and_with_its_validation(small_runs, losses, capsys):
    """Step 4 is the last one, and no interval validates it."""
    losses |= {3: 3.0, 4: 1.0}
    interval = ("--validation.interval_steps=3", "--checkpoint.interval_steps=2", "--training.steps=4")
    assert small_runs("run", *LONG, *interval, BEST) == 0
    assert small_runs.saved_state("run", 4)["validation"]["loss"] == 1.0
    assert capsys.readouterr().out.count(f"checkpoints/{checkpoint_name(4)} (") == 1


def test_a_damaged_checkpoint_is_no_candidate(small_runs, losses):
    assert small_runs("run", *LONG, BEST, "--checkpoint.keep_latest_k=0") == 0
    checkpointer = Checkpointer(small_runs.path("run") / "checkpoints")
    assert kept_losses(checkpointer) == {1: 5.0, 2: 4.0, 3: 2.0, 9: 3.0}
    (checkpointer.folder / checkpoint_name(3) / "state.json").write_text("{}")
    assert kept_losses(checkpointer) == {1: 5.0, 2: 4.0, 9: 3.0}


def test_patience_ends_a_run_and_a_resumed_one_at_the_same_step(small_runs, losses, capsys):
    patient = (*LONG, ASYNC, "--validation.patience=4", "--metrics.log_every_steps=4")
    assert small_runs("whole", *patient) == 0
    assert small_runs.saved("whole") == [7] and small_runs.steps("whole")[-1]["step"] == 7
    stop_after(5, small_runs, "run", *patient)
    for _ in range(2):  # the same command again trains nothing
        assert small_runs("run", *patient) == 0
        assert "2.0000 at step 3" in capsys.readouterr().out.splitlines()[-1]
        assert small_runs.saved("run") == [5, 7] and small_runs.steps("run")[-1]["step"] == 7
    assert small_runs("run", *LONG, ASYNC, "--validation.patience=5") == 0
    assert small_runs.saved("run")[-1] == 8


def test_progress_takes_only_lower_finite_losses_for_better():
    progress = ValidationProgress()
    for step, loss in ((1, math.nan), (2, 3.0), (3, 3.0), (4, math.inf), (5, 2.5)):
        progress = progress.after(step, loss)
        assert ValidationProgress.from_state(json.loads(json.dumps(vars(progress)))) == progress
        if step < 5:
            assert progress.since_best == {1: 1, 2: 0, 3: 1, 4: 2}[step]
    assert progress == ValidationProgress(2.5, 2.5, 5, 0)
    assert "the best: none" in ValidationProgress().after(1, math.nan).stop_reason(1)
    assert best_of({4: 2.0, 2: 2.0, 6: 3.0}) == 2 and best_of({}) is None


@pytest.mark.parametrize(
    "change", [{"best_loss": "2"}, {"loss": math.nan}, {"best_step": -1}, {"since_best": True}, {"more": 1}], ids=str
)
def test_progress_that_no_run_saved_is_refused(change):
    with pytest.raises(ValueError, match="validation"):
        ValidationProgress.from_state({"loss": 2.0, "best_loss": 2.0, "best_step": 3, "since_best": 0, **change})
