"""The first steps measure, the plan that comes of it stays, and no loss depends on that or on links in turns."""

from tests.support.small_run import ASYNC, STEPS, stop_after

PLANNED = "--engine.plan=none"
LONGER = f"--training.steps={STEPS + 2}"


def measured(steps):
    return [PLANNED, LONGER, f"--engine.measure_steps={steps}", "--engine.num_devices=3"]


def test_measuring_and_planning_again_changes_no_loss_also_after_a_resume(small_runs, capsys):
    assert small_runs("counted", ASYNC, *measured(0)) == 0
    losses, counted = small_runs.losses("counted"), small_runs.plan("counted")
    stop_after(4, small_runs, "run", ASYNC, *measured(2))
    assert "planned again from 2 measured steps" in capsys.readouterr().out
    plan = small_runs.plan("run")
    assert plan["rounds"] == counted["rounds"] == 1 and plan["step_s"] != counted["step_s"]
    assert small_runs("run", ASYNC, *measured(2)) == 0
    assert "planned again from 2 measured steps" in capsys.readouterr().out
    assert small_runs.losses("run") == losses
    assert small_runs("all-measure", ASYNC, *measured(100)) == 0
    assert small_runs.losses("all-measure") == losses
