"""The first steps measure, the plan that comes of it stays, and no loss depends on any of that. Traces of steps."""

import json
from dataclasses import replace

import pytest

from tests.support.counted_rules import FULL
from tests.support.small_run import ASYNC, STEPS, SmallRuns, before_step, interrupt, small_runs
from torchround.pipeline.cards import DeviceSpec
from torchround.pipeline.costs import Costs, KeptCost, LayerCost, ParameterCounts
from torchround.pipeline.partition import Partition
from torchround.pipeline.plan import Plan
from torchround.pipeline.plan_report import plan_for
from torchround.pipeline.run_question import RunQuestion
from torchround.run.run_plan import PlanByMeasuring

__all__ = ["small_runs"]

PLANNED = "--engine.plan=none"
LONGER = f"--training.steps={STEPS + 2}"


def measured(steps: int) -> list[str]:
    return [PLANNED, LONGER, f"--engine.measure_steps={steps}", "--engine.num_devices=3"]


def stop_before(step: int, small_runs: SmallRuns, *overrides: str) -> None:
    """The run `run`, asked to stop just before a step: it finishes that one and saves."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, step, interrupt)
        assert small_runs("run", *overrides) == 143


@pytest.mark.parametrize("update", ["--engine.update=sync", ASYNC])
def test_measuring_and_planning_again_changes_no_loss(small_runs: SmallRuns, update: str) -> None:
    for name, steps in (("plain", 0), ("measured", 3), ("all steps measure", 100)):
        assert small_runs(name.replace(" ", "-"), update, *measured(steps)) == 0
    losses = [small_runs.losses(name) for name in ("plain", "measured", "all-steps-measure")]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == STEPS + 2


def test_the_plan_of_the_folder_is_the_measured_one(small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    assert small_runs("run", *measured(2)) == 0
    assert "planned again from 2 measured steps" in capsys.readouterr().out
    plan = json.loads((small_runs.path("run") / "plan.json").read_text())
    assert small_runs("counted", *measured(0)) == 0
    counted = json.loads((small_runs.path("counted") / "plan.json").read_text())
    assert plan["rounds"] == counted["rounds"] == 1
    assert plan["step_s"] != counted["step_s"]


def test_a_resumed_run_keeps_its_measured_plan(small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    stop_before(4, small_runs, *measured(2))
    plan = (small_runs.path("run") / "plan.json").read_text()
    capsys.readouterr()
    assert small_runs("run", *measured(2)) == 0
    printed = capsys.readouterr().out
    assert "planned again" not in printed and f"as in the run so far\n{Plan.from_json(plan)}\n" in printed
    assert (small_runs.path("run") / "plan.json").read_text() == plan
    assert small_runs("whole", *measured(0)) == 0
    assert small_runs.losses("run") == small_runs.losses("whole")


def test_no_time_is_predicted_before_measuring_on_devices_of_unknown_speed(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small_runs("run", *measured(2)) == 0
    before, after = capsys.readouterr().out.split("planned again from 2 measured steps")
    assert "each layer is timed for 2 steps" in before and "bubble" not in before
    assert " ms " in after and "bubble (idle share of the devices)" in after
    assert small_runs("run", *measured(2)) == 0
    done = capsys.readouterr().out
    assert "nothing to do" in done and "bubble" not in done
    assert small_runs("counted", *measured(0)) == 0
    printed = capsys.readouterr().out
    assert "the step time is unknown" in printed and " ms " not in printed


def test_a_run_resumed_on_other_devices_measures_again(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_before(3, small_runs, *measured(2))
    capsys.readouterr()
    assert small_runs("run", *measured(2), "--engine.num_devices=2") == 0
    assert "planned again from 2 measured steps" in capsys.readouterr().out
    assert small_runs("whole", *measured(0)) == 0
    assert small_runs.losses("run") == small_runs.losses("whole")


def test_a_changed_setting_of_what_is_kept_ends_the_plan_of_the_run_so_far() -> None:
    block = LayerCost("block", 1.0, 2.0, keepable=(KeptCost("attention", 1, 0.5), KeptCost("down", 1, 0.1)))
    costs = Costs((block,) * 5)
    question = RunQuestion(
        costs_for=lambda *shape: costs,
        parameters=ParameterCounts(trained=1),
        updates=FULL,
        seq_len=8,
        global_batch_size=8,
        micro_batch_size=1,
        num_devices=2,
        device=DeviceSpec("card", 24, 1.0),
        device_bytes=None,
        keep_activations="all",
    )
    earlier = plan_for(replace(question, given=(Partition((2, 2), 1, (2, 2)), 1)))
    assert earlier.kept
    stays = {}
    for setting in ("all", "auto", "none", "attention"):
        changed = replace(question, keep_activations=setting)
        stays[setting] = PlanByMeasuring(changed, plan_for(changed), earlier, 5, 3, 10).settled == earlier
    assert stays == {"all": True, "auto": True, "none": False, "attention": False}


def test_chosen_steps_are_traced_and_no_loss_changes(small_runs: SmallRuns) -> None:
    assert small_runs("plain") == 0
    assert small_runs("traced", "--trace.steps=[2, 5]") == 0
    assert small_runs.losses("traced") == small_runs.losses("plain")
    folder = small_runs.path("traced") / "trace"
    assert sorted(path.name for path in folder.iterdir()) == ["step-2.json", "step-5.json"]
    for step in (2, 5):
        events = json.loads((folder / f"step-{step}.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert step in {event["args"]["step"] for event in spans} <= {step - 1, step, step + 1}
        own = {event["cat"] for event in spans if event["args"]["step"] == step}
        assert {"fused", "backward", "recompute", "weights", "gradients", "update"} <= own
    assert not (small_runs.path("plain") / "trace").exists()
