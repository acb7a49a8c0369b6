"""A run that is interrupted and resumed has the losses and the weights of one that never stopped, bit for bit."""

import shutil
import sys
from types import SimpleNamespace

import pytest

from tests.support.faults import Bomb, PlantedError, before, wait_until
from tests.support.small_run import (
    ASYNC,
    BOUNDED,
    COMPACT,
    PREDICT,
    STEPS,
    TIED,
    TWO_ROUNDS,
    UNCORRECTED,
    before_forward,
    before_step,
    stop_after,
    write_text,
)
from torchround.checkpoint import Checkpointer
from torchround.checkpoint.folders import checkpoint_name
from torchround.engine.store import host_store

ALONE, THREE = "--engine.num_devices=1", "--engine.num_devices=3"
OTHER_PLAN = "--engine.plan={ forward = [1, 1], fused = 2, backward = [2], rounds = 1 }"
KEEP_ALL, KEEP_SOME = "--engine.keep_activations=all", "--engine.keep_activations=['attention', 'down']"
BFLOAT16, FLOAT16, MUON = "--training.dtype=bfloat16", "--training.dtype=float16", "--optimizer.name=muon"
ADAPTERS = ["--lora.rank=2", "--lora.dropout=0.5"]
SCALED = [*ADAPTERS, "--lora.dora=true", "--lora.rslora=true", "--lora.rank_pattern={ q_proj = 3 }"]
# Four micro-batches add up in another order in two rounds; three do not.
IN_TWO_ROUNDS = (TWO_ROUNDS, "--training.global_batch_size=7")
# Settings, and those that the resumed run changes. Every pair of update and form of state is in one.
RUNS = {
    "sync, kept": ([], [KEEP_SOME, THREE]),
    "sync, tied, two rounds, compact, split": ([TIED, *IN_TWO_ROUNDS, COMPACT, BFLOAT16], [ALONE]),
    "async, another plan": ([ASYNC, UNCORRECTED], [OTHER_PLAN, THREE]),
    "async, tied, two rounds": ([ASYNC, UNCORRECTED, TIED, *IN_TWO_ROUNDS], [THREE]),
    "async, float16": ([ASYNC, UNCORRECTED, FLOAT16], [ALONE]),
    "async, compact, split": ([ASYNC, UNCORRECTED, COMPACT, BFLOAT16], [ALONE]),
    "kept, async, predict, scaled adapters": (
        [KEEP_ALL, ASYNC, PREDICT, BFLOAT16, *SCALED],
        [KEEP_SOME, OTHER_PLAN, THREE],
    ),
    "kept, adapters, split": ([KEEP_ALL, BFLOAT16, *ADAPTERS], [KEEP_SOME, THREE]),
    "async, predict, tied, split": ([ASYNC, PREDICT, TIED, BFLOAT16], [THREE]),
    "async, predict, compact": ([ASYNC, PREDICT, COMPACT, BFLOAT16], [ALONE]),
    "bounded, tied, split": ([*BOUNDED, TIED, BFLOAT16], [THREE]),
    "bounded, no stale layers": ([*BOUNDED, "--engine.stale_layers=0"], [KEEP_ALL, ALONE]),
    "kept, bounded": ([KEEP_ALL, *BOUNDED, "--engine.stale_layers=2"], [ALONE]),
    "muon, sync, split": ([MUON, BFLOAT16], [THREE]),
    "muon, async, compact, two rounds": ([MUON, ASYNC, COMPACT, *IN_TWO_ROUNDS, BFLOAT16], [ALONE]),
}
# By default, each update, each form of state and each number of devices.
BY_DEFAULT = (
    *("sync, tied, two rounds, compact, split", "kept, async, predict, scaled adapters"),
    *("bounded, tied, split", "muon, async, compact, two rounds"),
)
nightly = pytest.mark.nightly


def fail_at(call):
    def action(number=call):
        if number == call:
            raise PlantedError(f"call {call}")

    return action


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in BY_DEFAULT else nightly) for name in RUNS])
def test_interrupted_and_resumed_on_other_devices_it_equals_an_uninterrupted_run(small_runs, name):
    settings, changes = RUNS[name]
    assert small_runs("whole", *settings) == 0
    stop_after(2, small_runs, "stopped", *settings)
    assert small_runs("stopped", *settings, *changes) == 0
    small_runs.assert_same("stopped", "whole")
    if KEEP_SOME in changes:
        plan = small_runs.plan("stopped")
        blocks = sum(plan["forward"]) - 1  # before the fused stage
        assert plan["kept"] == [[], *[["attention", "down"]] * blocks, *[[]] * plan["fused"]]


def test_interrupted_after_every_step_it_equals_an_uninterrupted_run(small_runs):
    assert small_runs("whole", ASYNC) == 0
    for step in range(1, STEPS):
        stop_after(1, small_runs, "stopped", ASYNC)
        assert small_runs.saved("stopped")[-1] == step
    assert small_runs("stopped", ASYNC) == 0
    small_runs.assert_same("stopped", "whole")


# A step runs layer 1 (a block) 3 times forward and 3 times in its backward stage: calls 7 to 12 are step 2's.
@pytest.mark.parametrize(
    ("settings", "call"),
    [
        pytest.param([TIED], 1, marks=nightly),
        pytest.param([TIED], 10, marks=nightly),
        pytest.param([ASYNC, UNCORRECTED, TIED, TWO_ROUNDS], 12, marks=nightly),
        ([ASYNC, UNCORRECTED, TIED, TWO_ROUNDS], 23),
        pytest.param([*BOUNDED, "--checkpoint.interval_steps=1"], 7, marks=nightly),
        ([*BOUNDED, TIED, BFLOAT16, "--checkpoint.interval_steps=1"], 23),
    ],
)
def test_a_run_resumed_after_a_fault_in_a_stage_equals_one_without_the_fault(
    small_runs, monkeypatch, capsys, settings, call
):
    """In `bounded`, layers of two versions are never saved: the newest checkpoint is from before the fault."""
    assert small_runs("whole", *settings) == 0
    with monkeypatch.context() as patch:
        before_forward(patch, 1, fail_at(call))
        capsys.readouterr()
        assert small_runs("faulty", *settings) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("PipelineError: device cpu:") and f"PlantedError: call {call}" in message
    saved = Checkpointer(small_runs.path("faulty") / "checkpoints").latest_step() or 0
    assert saved <= (call - 1) // 6
    if BOUNDED[0] not in settings:
        # A state without an update is not saved: a new start makes it again.
        assert (call - 1) // 6 - 1 <= saved and len(small_runs.saved("faulty")) == bool(saved)
    assert small_runs("faulty", *settings, ALONE) == 0
    small_runs.assert_same("faulty", "whole")


def test_a_run_resumes_from_the_last_update_after_a_fault_outside_the_engine(small_runs, monkeypatch):
    assert small_runs("whole") == 0
    with monkeypatch.context() as patch:
        before_step(patch, 4, fail_at(4))
        with pytest.raises(PlantedError):  # no message of ours: a traceback
            small_runs("faulty")
    [rescued] = small_runs.saved("faulty")
    assert rescued in (2, 3)
    assert small_runs("faulty") == 0
    small_runs.assert_same("faulty", "whole")


def test_an_update_that_cannot_be_completed_is_not_saved(small_runs, monkeypatch, capsys, caplog):
    """Let update 4 fail in the middle of the model, and at each further try."""
    bomb = Bomb("update_", hit=4, stays=True)

    def is_fourth(*_, update, **options):
        if update == 4:
            wait_until(lambda: small_runs.saved("faulty") == [2])  # the fault would end the save of step 2
        return update == 4

    assert small_runs("whole") == 0
    with monkeypatch.context() as patch:
        before(patch, host_store, "update_", bomb, is_fourth)
        assert small_runs("faulty", "--checkpoint.interval_steps=2") == 1
    assert "mixes two weight versions" in capsys.readouterr().err.splitlines()[-1]
    assert "what it left is not saved" in caplog.text
    assert small_runs.saved("faulty") == [2]
    assert small_runs("faulty") == 0
    small_runs.assert_same("faulty", "whole")


def test_a_resumed_run_keeps_the_rounds_of_its_first_start(small_runs):
    """A plan for other devices may have other rounds, which add up gradients in another order."""
    # Sums of three micro-batches are the same in one round and in two; those of four are not.
    planned = ["--engine.plan=none", "--training.steps=4", "--lr_schedule.decay=none", "--training.global_batch_size=7"]
    for name in ("whole", "stopped"):
        assert small_runs(name, *planned, "--engine.rounds=2", "--training.steps=2") == 0
    assert small_runs("whole", *planned, "--engine.rounds=2") == 0
    assert small_runs("stopped", *planned, "--engine.rounds=auto", ALONE) == 0
    small_runs.assert_same("stopped", "whole", step=4)
    assert small_runs("killed", *planned, "--engine.rounds=2", "--training.steps=2") == 0
    shutil.rmtree(small_runs.path("killed") / "checkpoints")  # as if it was killed before the first one
    assert small_runs("killed", *planned, "--engine.rounds=auto", ALONE) == 0
    assert small_runs.losses("killed") == small_runs.losses("whole")
    assert small_runs("alone", *planned, "--engine.rounds=auto", ALONE) == 0
    first, whole = small_runs.losses("alone")[1], small_runs.losses("whole")[1]
    assert first[1] != whole[1] and first[2:] == whole[2:], "another norm of the gradient at the same rate"


def test_a_new_run_may_start_from_a_checkpoint_of_another(small_runs):
    assert small_runs("whole", ASYNC, "--checkpoint.interval_steps=2") == 0
    load = f"--checkpoint.load_path={small_runs.path('whole')}/checkpoints/{checkpoint_name(4)}"
    assert small_runs("branch", ASYNC, load) == 0
    assert small_runs.losses("branch") == {5: small_runs.losses("whole")[5]}
    assert small_runs("branch", ASYNC, load, "--training.steps=6") == 0  # its own checkpoint comes first
    assert list(small_runs.losses("branch")) == [5, 6]


def test_a_new_stage_takes_only_the_weights_of_a_checkpoint_and_begins_at_step_0_on_other_data(small_runs, capsys):
    assert small_runs("first", ASYNC) == 0
    state = small_runs.saved_state("first")
    kinds = {name.split("/")[0] for name in small_runs.state("first")}
    assert kinds == {"weights", "exp_avg", "exp_avg_sq", "master_1_old"}
    assert state["step"] == state["applied_updates"] == 5 and state["skipped_steps"] == 0
    assert state["tokens"] == small_runs.steps("first")[-1]["tokens"] > 0
    write_text(small_runs.folder / "other.jsonl", lines=200, seed=1)
    path = f"outputs/first/checkpoints/{checkpoint_name(5)}"
    stage = ["--checkpoint.load=weights", f"--checkpoint.load_path={path}"]
    stage += ['--data.sources=[{ path = "other.jsonl" }]', "--run.seed=1"]
    stop_after(2, small_runs, "second", *stage)
    assert small_runs("second", *stage) == 0  # resumes from its own checkpoint
    assert list(small_runs.losses("second")) == [1, 2, 3, 4, 5]
    for name, overrides, expected in (
        ("new", [*stage, "--checkpoint.load_path=nowhere"], "given nowhere; legal: one checkpoint"),
        ("new", [*stage, "--checkpoint.load_path=outputs/first"], f"such as {path}"),
        ("new", [*stage, TIED], "model.flavor 'untied' -> 'tied'"),
        ("new", ["--checkpoint.load_path=nowhere"], "given nowhere"),
        ("first", [ASYNC, "--training.steps=6", "--run.seed=1"], "seed was 0, is 1"),
    ):
        capsys.readouterr()
        assert small_runs(name, *overrides) == 2
        message = capsys.readouterr().err
        assert expected in message and "Traceback" not in message and ("--run.name" in message) == (name == "first")


class Wandb:
    """A stand-in for the package: a run without an id gets the next one."""

    def __init__(self):
        self.Settings = SimpleNamespace
        self.asked = []

    def init(self, id, **options):
        self.asked.append(id)
        ignore = lambda *_, **options: None
        page = id or f"page-{len(self.asked)}"
        return SimpleNamespace(id=page, define_metric=ignore, log=ignore, finish=ignore)


def test_a_resumed_run_rejoins_its_page_in_wandb_and_a_branch_does_not(small_runs, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    load = f"--checkpoint.load_path=outputs/run/checkpoints/{checkpoint_name(5)}"
    for name, *more in (["run"], ["run", "--training.steps=6"], ["branch", load, "--training.steps=6"]):
        assert small_runs(name, "--metrics.wandb=offline", *more) == 0
    assert wandb.asked == [None, "page-1", None]
    assert small_runs.saved_state("branch", 6)["wandb_run_id"] == "page-3"
