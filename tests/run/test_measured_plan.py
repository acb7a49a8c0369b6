"""The first steps measure, the plan that comes of it stays, and no loss depends on that or on links in turns."""

import json
from dataclasses import replace

from tests.support.counted_rules import FULL
from tests.support.small_run import ASYNC, STEPS, small_runs, stop_after
from torchround.planning.cards import DeviceSpec
from torchround.planning.costs import BundleCount, Costs, KeptCost, LayerCost, ParameterCounts
from torchround.planning.partition import Partition
from torchround.planning.plan import Plan
from torchround.planning.plan_report import plan_for
from torchround.planning.run_question import RunQuestion
from torchround.run.run_plan import PlanByMeasuring

__all__ = ["small_runs"]

PLANNED = "--engine.plan=none"
LONGER = f"--training.steps={STEPS + 2}"


def measured(steps):
    return [PLANNED, LONGER, f"--engine.measure_steps={steps}", "--engine.num_devices=3"]


def test_measuring_and_planning_again_changes_no_loss_and_a_resumed_run_keeps_the_plan(small_runs, capsys):
    assert small_runs("counted", ASYNC, *measured(0)) == 0
    losses = small_runs.losses("counted")
    counted = small_runs.plan("counted")
    stop_after(4, small_runs, "run", ASYNC, *measured(2))
    assert "planned again from 2 measured steps" in capsys.readouterr().out
    text = (small_runs.path("run") / "plan.json").read_text()
    plan = json.loads(text)
    assert plan["rounds"] == counted["rounds"] == 1 and plan["step_s"] != counted["step_s"]
    assert small_runs("run", ASYNC, *measured(2)) == 0
    printed = capsys.readouterr().out
    assert "planned again" not in printed and f"as in the run so far\n{Plan.from_json(text)}\n" in printed
    assert (small_runs.path("run") / "plan.json").read_text() == text
    assert small_runs.losses("run") == losses
    assert small_runs("all-measure", ASYNC, *measured(100)) == 0
    assert small_runs.losses("all-measure") == losses


def test_a_run_resumed_on_other_devices_measures_again(small_runs, capsys):
    stop_after(2, small_runs, "run", *measured(2))
    capsys.readouterr()
    assert small_runs("run", *measured(2), "--engine.num_devices=2") == 0
    assert "planned again from 2 measured steps" in capsys.readouterr().out


def test_a_changed_setting_of_what_is_kept_ends_the_plan_of_the_run_so_far():
    block = LayerCost("block", 1.0, 2.0, keepable=(KeptCost("attention", 1, 0.5), KeptCost("down", 1, 0.1)))
    costs = Costs((block,) * 5)
    question = RunQuestion(
        costs_for=lambda *shape: costs,
        parameters=ParameterCounts((BundleCount((1,)),)),
        updates=FULL,
        seq_len=8,
        global_batch_size=8,
        micro_batch_size=1,
        num_devices=2,
        device=DeviceSpec("card", 24, 1.0),
        device_bytes=None,
        host_bytes=2**30,
        keep_activations="all",
    )
    earlier = plan_for(replace(question, given=(Partition((2, 2), 1, (2, 2)), 1)))
    assert earlier.kept
    stays = {}
    for setting in ("all", "auto", "none", "attention"):
        changed = replace(question, keep_activations=setting)
        stays[setting] = PlanByMeasuring(changed, plan_for(changed), earlier, 5, 3, 10).settled == earlier
    assert stays == {"all": True, "auto": True, "none": False, "attention": False}
