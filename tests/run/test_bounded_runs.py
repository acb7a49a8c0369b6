"""Runs with `engine.update = "bounded"`: the same losses for each cut and after each stop, and a K that stays."""

import torch
from safetensors.torch import load_file

from tests.support.small_run import STEPS, stop_after
from torchround.checkpoint.folders import checkpoint_name
from torchround.engine.store.bundles import OLDER_WEIGHTS

BOUNDED = ("--engine.update=bounded", "--training.clip=layer", "--training.max_norm=0.5")
STALE = "--engine.stale_layers=2"
PLANNED = "--engine.plan=none"


def test_a_run_that_was_stopped_continues_with_its_stale_layers_and_refuses_others(small_runs, capsys, caplog):
    """Also on other devices, and with a plan of its own: the checkpoint decides the stale layers."""
    assert small_runs("whole", *BOUNDED, STALE) == 0
    stop_after(3, small_runs, "run", *BOUNDED, STALE)
    before = small_runs.plan("run")
    capsys.readouterr()
    assert small_runs("run", *BOUNDED, "--engine.stale_layers=1") == 2
    error = capsys.readouterr().err
    assert "engine.stale_layers: given 1" in error and error.count("\n") == 1
    assert small_runs.plan("run") == before
    assert small_runs("run", *BOUNDED, PLANNED, "--engine.num_devices=3") == 0
    small_runs.assert_same("run", "whole")
    assert small_runs.plan("run")["stale_layers"] == 2
    # The first step of a run that was `sync` reads the newest weights.
    stop_after(1, small_runs, "changed", *BOUNDED[1:])
    stop_after(2, small_runs, "changed", *BOUNDED, STALE)
    assert "from now on engine.update 'sync' -> 'bounded'" in caplog.text
    assert small_runs("sync", *BOUNDED[1:]) == 0
    changed, whole = small_runs.losses("changed"), small_runs.losses("sync")
    assert changed[2][0] == whole[2][0] and changed[3][0] != whole[3][0]


def test_validations_are_of_the_newest_weights_and_change_nothing(small_runs):
    """A validation writes the newest weights of stale layers, and the older ones again. So a complete run can be extended."""
    validated = (*BOUNDED, STALE, "--lr_schedule.decay=none", "--data.validation_fraction=0.2")
    validated = (*validated, "--validation.interval_steps=2")
    for name, steps in (("longer", 4), ("shorter", 2)):
        assert small_runs(name, *validated, f"--training.steps={steps}") == 0
    longer, shorter = (small_runs.steps(name)[1] for name in ("longer", "shorter"))
    assert longer["validation_loss"] == shorter["validation_loss"]
    # A run of `sync` that starts from these weights validates them before its first update changes them.
    start = ("--checkpoint.load=weights", f"--checkpoint.load_path={small_runs.checkpoint('shorter', 2)}")
    frozen = ("--training.steps=1", "--optimizer.lr=1e-30", "--optimizer.weight_decay=0")
    assert small_runs("sync", *validated[4:], *start, *frozen, "--training.clip=layer") == 0
    assert small_runs.steps("sync")[0]["validation_loss"] == shorter["validation_loss"]
    assert small_runs("shorter", *validated, "--training.steps=4") == 0
    small_runs.assert_same("shorter", "longer", step=4)


def test_too_many_stale_layers_are_one_message(small_runs, capsys):
    for number, plan in ((5, PLANNED), (3, "--engine.plan={ forward = [1], fused = 3, backward = [1] }")):
        assert small_runs("run", *BOUNDED, f"--engine.stale_layers={number}", plan) == 2
        error = capsys.readouterr().err
        assert "engine.stale_layers" in error and error.count("\n") == 1
        assert not small_runs.path("run").exists()


def test_a_plans_file_brings_its_stale_layers_and_an_export_holds_the_newest_weights(small_runs):
    assert small_runs("first", *BOUNDED, STALE) == 0
    given = f"--engine.plan={small_runs.path('first')}/plan.json"
    assert small_runs("run", *BOUNDED, given, "--checkpoint.export=weights") == 0
    small_runs.assert_same("run", "first")
    assert small_runs.plan("run")["stale_layers"] == 2
    [file] = (small_runs.path("run") / "export" / checkpoint_name(STEPS)).glob("*.safetensors")
    exported = load_file(file)["model.embed_tokens.weight"]
    saved = small_runs.state("run")
    newest, older = (saved[f"{kind}/embedding.weight"] for kind in ("weights", f"{OLDER_WEIGHTS}1_old"))
    assert torch.equal(exported, newest) and not torch.equal(exported, older)
