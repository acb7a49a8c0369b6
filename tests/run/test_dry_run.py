"""A dry run predicts what the run then counts for itself."""

import json
import re
from pathlib import Path

import pytest

from tests.support.small_run import TIED, small_runs
from torchround.config import load_config
from torchround.models import FAMILIES, LoraShape, add_adapters
from torchround.run.hardware import Hardware
from torchround.run.numbers import RunNumbers, run_question

__all__ = ["small_runs"]

HARDWARE = Hardware("cpu", 2, None)
DEBUG = Path(__file__).parents[2] / "configs" / "debug.toml"


def llama(tied, adapters):
    family = FAMILIES["llama3"]
    config = family.config_from_flavor("debug", tied_embeddings=tied)
    model = family.build(config)
    if adapters:
        add_adapters(model, family.hf_names(config), LoraShape(4, 8.0, 0.0, ("q_proj", "v_proj")))
    return model


def test_planned_costs_leave_out_what_frozen_weights_do_not_need():
    config = load_config(DEBUG, ["--lora.rank=4", "--lora.targets=['q_proj','v_proj']"])
    numbers = RunNumbers(config.training, config.engine)
    model, full = llama(tied=False, adapters=True), llama(tied=False, adapters=False)
    costs = run_question(model, numbers, HARDWARE).costs()
    trained = run_question(full, numbers, HARDWARE).costs()
    for ours, theirs in zip(costs.layers[1:], trained.layers[1:], strict=True):
        # Without gradients of weights: once the forward, and twice what attention does without weights.
        assert theirs.backward_s == pytest.approx(2 * theirs.forward_s)
        assert ours.forward_s <= ours.backward_s < 0.75 * theirs.backward_s
        assert ours.workspace_bytes < theirs.workspace_bytes or ours.name == "head"  # its norm takes most
        assert ours.gradient_bytes < 0.1 * theirs.gradient_bytes


@pytest.mark.parametrize("more", [[TIED], ["--engine.plan=none", "--engine.rounds=2"]])
def test_a_dry_run_shows_the_runs_plan_and_its_distance_from_the_fastest(small_runs, capsys, more):
    overrides = ["--engine.measure_steps=0", *more]
    assert small_runs("run", *overrides, "--dry-run") == 0
    predicted = capsys.readouterr().out
    assert "engine.plan left out" not in predicted or "--engine.plan=none" not in more
    assert small_runs("run", *overrides) == 0
    printed = capsys.readouterr().out
    summaries = [re.search(r"\d+ micro-batches in .*per\s+device", text, re.DOTALL) for text in (predicted, printed)]
    first, second = (" ".join(match[0].split()) if match else "" for match in summaries)
    assert first == second != ""
    plan = json.loads((small_runs.path("run") / "plan.json").read_text())
    assert f"bubble (idle share of the devices) {100 * plan['bubble']:.2f} %" in first
