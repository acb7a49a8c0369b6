"""A run that is resumed with other settings: legal changes are reported and take effect, another model is refused."""

import json

import pytest

from tests.support.hostile_cases import forge_file
from tests.support.small_run import ASYNC, TWO_ROUNDS, stop_after
from torchround.checkpoint.folders import checkpoint_name


def without(small_runs, *path, step):
    state = small_runs.saved_state("run", step)
    *tables, name = path
    table = state
    for key in tables:
        table = table[key]
    del table[name]
    file = small_runs.checkpoint("run", step) / "state.json"
    forge_file(file, json.dumps(state).encode())


def test_from_async_to_sync_the_older_version_is_left_out_and_from_sync_to_async_the_first_step_reads_the_newest(
    small_runs, caplog
):
    """The first step reads the same weights in both, so after it a run may turn into one that was `sync` all along."""
    assert small_runs("whole") == 0
    stop_after(1, small_runs, "run", ASYNC)
    stop_after(1, small_runs, "run")
    assert "from now on engine.update 'async' -> 'sync'" in caplog.text
    assert small_runs("run", ASYNC) == 0
    assert "from now on engine.update 'sync' -> 'async'" in caplog.text
    changed, whole = small_runs.losses("run"), small_runs.losses("whole")
    assert [changed[step] for step in (1, 2, 3)] == [whole[step] for step in (1, 2, 3)]
    assert changed[4][0] != whole[4][0]


def test_a_checkpoint_whose_prediction_lacks_a_number_is_a_named_error(small_runs, capsys):
    stop_after(2, small_runs, "run", ASYNC)
    without(small_runs, "prediction", "lr", step=2)
    assert small_runs("run", ASYNC) == 2
    [message] = capsys.readouterr().err.splitlines()[-1:]
    assert f"{checkpoint_name(2)}: invalid run state in the checkpoint: prediction is" in message


def test_other_rounds_change_a_run_by_rounding_alone_and_another_schedule_is_used_and_reported(small_runs, caplog):
    larger = "--training.global_batch_size=7"  # sums of three micro-batches are the same in two rounds
    assert small_runs("whole", larger) == 0
    stop_after(2, small_runs, "run", larger)
    assert small_runs("run", TWO_ROUNDS, larger, "--training.steps=3") == 0
    changed, whole = small_runs.losses("run"), small_runs.losses("whole")
    assert changed[3][0] == pytest.approx(whole[3][0], rel=1e-6)
    assert "Other training.steps change the learning rate of each step" in caplog.text
    assert small_runs("run", "--optimizer.lr=5e-3", "--lr_schedule.decay=none") == 0
    assert "optimizer.lr 0.01 -> 0.005, lr_schedule.decay " in caplog.text
    assert [small_runs.losses("run")[step][2] for step in (4, 5)] == [5e-3] * 2


def test_adapters_on_weights_of_another_type_are_refused(small_runs, capsys):
    """`test_complete_runs.py` asks for another model."""
    assert small_runs("run", "--lora.rank=2", "--training.steps=1") == 0
    assert small_runs("run", "--lora.rank=2", "--training.dtype=bfloat16", "--training.steps=6") == 2
    assert "'float32' -> 'bfloat16'). Resume with" in capsys.readouterr().err.splitlines()[-1]
