"""A complete run that is asked for again: it says so, and which settings nothing was trained with."""

from tests.support.small_run import ASYNC

COMPLETE = "the run is complete after 5 steps; nothing to do"
# What a change says, by the change.
REFUSED = {"--model.flavor=tied": "model.flavor 'untied' -> 'tied'", "--lora.rank=2": "lora.rank 0 -> 2"}
WARNED = {
    "--optimizer.lr=5e-3": "optimizer.lr 0.01 -> 0.005",
    "--lr_schedule.decay=none": "lr_schedule.decay",
    "--training.dtype=bfloat16": "training.dtype 'float32' -> 'bfloat16'",
    "--training.steps=3": "training.steps 5 -> 3",
    ASYNC: "engine.update 'sync' -> 'async'",
}
SAME_RUN = ["--engine.num_devices=3", "--checkpoint.keep_latest_k=1", "--validation.max_batches=3"]


def test_a_complete_run_is_left_as_it_is_and_names_what_has_changed(small_runs, capsys, caplog):
    assert small_runs("run") == 0
    lock = small_runs.path("run") / ".lock"
    before = {path: path.stat().st_mtime_ns for path in small_runs.path("run").rglob("*") if path != lock}
    for change, said in REFUSED.items():
        for steps in (5, 6):  # complete, and resumed
            assert small_runs("run", change, f"--training.steps={steps}") == 2, change
            [message] = capsys.readouterr().err.splitlines()
            assert said in message
    for change, said in [*WARNED.items(), *((change, "") for change in SAME_RUN)]:
        caplog.clear()
        assert small_runs("run", change) == 0, change
        assert COMPLETE in capsys.readouterr().out and said in caplog.text
        assert bool(said) == ("was made with other settings" in caplog.text), caplog.text
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
