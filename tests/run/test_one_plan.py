"""A run, its measuring steps, a dry run and the `plan` command plan with the same numbers, in one function."""

import re
from dataclasses import replace

import pytest

import torchround.run.numbers
from tests.support.small_run import MICRO_BATCHES, TIED, files_of
from torchround.commands import plan_run, train_model
from torchround.config import Config, EngineTable, PlanTable, load_config
from torchround.models import FAMILIES
from torchround.planning import plan_report
from torchround.planning.memory import MIB
from torchround.planning.plan_report import plan_for
from torchround.planning.rates import RATES
from torchround.run.hardware import Hardware
from torchround.run.numbers import given_plan, run_question

KEYS = [
    *("--engine.plan=none", "--engine.rounds=2", "--engine.recompute=layer", "--engine.update=async"),
    *("--training.dtype=float16", "--engine.accumulate_dtype=bfloat16"),
]
MACHINE = Hardware("cpu", 2, 64 * MIB, 8 * MIB)


def test_a_run_its_measuring_steps_a_dry_run_and_the_plan_command_plan_with_the_same_numbers(small_runs, monkeypatch):
    asked = []

    def seen(question, *costs):
        asked.append(question)
        return plan_for(question, *costs)

    replaced = [(module, "plan_for", seen) for module in (plan_report, torchround.run.numbers)]
    for module, name in ((train_model, "find_hardware"), (plan_run, "planned_hardware")):
        replaced.append((module, name, lambda *_: MACHINE))
    for module, name, value in replaced:
        monkeypatch.setattr(module, name, value)
    assert small_runs("run", *KEYS, "--engine.measure_steps=1") == 0
    of_the_run, measured = asked
    assert measured.given is None
    del asked[:]
    assert small_runs("run", *KEYS, "--run.name=other", "--dry-run") == 0
    of_the_dry_run = asked[0]
    del asked[:]
    assert plan_run.main(["--config", "small.toml", *KEYS]) == 0
    of_the_command = asked[0]
    for question in (measured, of_the_dry_run, of_the_command):
        assert question.limits() == of_the_run.limits()
        assert question.costs() == of_the_run.costs()
        assert question.state() == of_the_run.state()
        same = replace(question, given=None, costs_for=of_the_run.costs_for)
        assert same == of_the_run
    checked = load_config("small.toml", KEYS)  # the config's own checks count micro-batches too
    assert checked.num_micro_batches == of_the_run.num_micro_batches == MICRO_BATCHES
    limits = of_the_run.limits()
    assert limits.host_bytes is not None and 0 < limits.host_bytes < 8 * MIB
    # bfloat16 sums that travel as float16 have the same size, and are converted all the same.
    assert limits.rounded_bytes == limits.accumulate_bytes > 0


def test_a_plan_for_cards_counts_the_launches_of_each_block_and_one_for_the_host_none():
    hardware = Hardware("cuda", 8, 2**34, 2**34)
    for flavor, launch_s in (("debug", RATES.block_launch_s), ("debug_moe", RATES.experts_launch_s)):
        model = FAMILIES["qwen3"].build(FAMILIES["qwen3"].config_from_flavor(flavor))
        config = Config.model_construct()
        counted = run_question(model, config, hardware).costs()
        assert counted.launch_s == pytest.approx((len(model.layers) - 2) * launch_s)
        assert run_question(model, config, MACHINE).costs().launch_s == 0


@pytest.mark.parametrize("more", [[TIED], ["--engine.plan=none", "--engine.rounds=2"]])
def test_a_dry_run_shows_the_runs_plan_and_its_distance_from_the_fastest(small_runs, capsys, more):
    overrides = ["--engine.measure_steps=0", *more]
    before = files_of(small_runs.folder)
    assert small_runs("run", *overrides, "--dry-run", "--engine.device_memory_gib=1e-4") == 2
    capsys.readouterr()
    assert small_runs("run", *overrides, "--dry-run") == 0
    assert files_of(small_runs.folder) == before and not small_runs.path("run").exists()
    predicted = capsys.readouterr().out
    assert "optimizer state" in predicted and "each device needs" in predicted
    assert "engine.plan left out" not in predicted or "--engine.plan=none" not in more
    assert small_runs("run", *overrides) == 0
    printed = capsys.readouterr().out
    summaries = [re.search(r"\d+ micro-batches in .*per\s+device", text, re.DOTALL) for text in (predicted, printed)]
    first, second = (" ".join(match[0].split()) if match else "" for match in summaries)
    assert first == second != ""
    assert f"bubble (idle share of the devices) {100 * small_runs.plan('run')['bubble']:.2f} %" in first


def test_the_plan_of_a_file_says_what_is_kept_unless_a_setting_does(tmp_path):
    model = FAMILIES["llama3"].build(FAMILIES["llama3"].config_from_flavor("debug"))
    table = EngineTable(keep_activations="all", plan=PlanTable(forward=[6], fused=2, backward=[6]))
    config = Config.model_construct(engine=table)
    plan = plan_for(run_question(model, config, Hardware("cuda", 2, 2**34, 2**34)))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert any(plan.kept)
    assert given_plan(EngineTable(plan=str(path)), len(model.layers))[2] == plan.kept
    assert given_plan(EngineTable(plan=str(path), keep_activations="none"), len(model.layers))[2] is None
