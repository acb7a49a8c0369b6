"""A run that is interrupted and resumed has the losses and the weights of one that never stopped, bit for bit."""

import json
import signal
from collections.abc import Callable

import pytest
import torch

import torchround.engine.optimizer_worker
import torchround.pipeline.plan_report
from tests.support.small_run import (
    ASYNC,
    BOUNDED,
    COMPACT,
    PREDICT,
    STEPS,
    TIED,
    TWO_ROUNDS,
    UNCORRECTED,
    SmallRuns,
    before_forward,
    before_step,
    interrupt,
    small_runs,
    write_text,
)
from torchround.checkpoint import Checkpointer
from torchround.engine.store.host_store import HostStore
from torchround.run import run_parts

__all__ = ["small_runs"]

ALONE, THREE = "--engine.num_devices=1", "--engine.num_devices=3"
OTHER_PLAN = "--engine.plan={ forward = [1, 1, 1], fused = 2, backward = [3], rounds = 1 }"
KEEP_ALL, KEEP_SOME = "--engine.keep_activations=all", "--engine.keep_activations=['attention', 'down']"
MODES = {
    "sync": [],
    "sync, tied": [TIED],
    "sync, two rounds": [TWO_ROUNDS],
    "async": [ASYNC, UNCORRECTED],
    "async, tied": [ASYNC, UNCORRECTED, TIED],
    "async, tied, two rounds": [ASYNC, UNCORRECTED, TIED, TWO_ROUNDS],
    "async, bfloat16": [ASYNC, UNCORRECTED, "--training.dtype=bfloat16"],
    "async, float16": [ASYNC, UNCORRECTED, "--training.dtype=float16"],
    "async, predict": [ASYNC, PREDICT],
    "bounded": [*BOUNDED],
    "bounded, tied, bfloat16": [*BOUNDED, TIED, "--training.dtype=bfloat16"],
    "bounded, no stale layers": [*BOUNDED, "--engine.stale_layers=0"],
    "kept, bounded": [KEEP_ALL, *BOUNDED, "--engine.stale_layers=2"],
    "kept, async, predict, adapters": [KEEP_ALL, ASYNC, PREDICT, "--lora.rank=2", "--lora.dropout=0.5"],
    "async, predict, tied, bfloat16": [ASYNC, PREDICT, TIED, "--training.dtype=bfloat16"],
    "sync, split": ["--training.dtype=bfloat16"],
    "sync, two rounds, compact, split": [TWO_ROUNDS, COMPACT, "--training.dtype=bfloat16"],
    "async, compact, split": [ASYNC, UNCORRECTED, COMPACT, "--training.dtype=bfloat16"],
    "async, predict, compact": [ASYNC, PREDICT, COMPACT, "--training.dtype=bfloat16"],
    "muon, sync, split": ["--optimizer.name=muon", "--training.dtype=bfloat16"],
    "muon, async, compact, two rounds": [
        "--optimizer.name=muon",
        ASYNC,
        COMPACT,
        TWO_ROUNDS,
        "--training.dtype=bfloat16",
    ],
}


class PlantedError(RuntimeError):
    pass


def fail_at(call: int) -> Callable[[int], None]:
    def action(number: int) -> None:
        if number == call:
            raise PlantedError(f"call {call}")

    return action


@pytest.mark.parametrize("mode", MODES)
def test_interrupted_at_any_step_and_resumed_on_other_devices_it_equals_an_uninterrupted_run(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    overrides = MODES[mode]
    assert small_runs("whole", *overrides) == 0
    for step in range(1, STEPS) if mode in ("sync", "async, tied, two rounds") else (2, 3):
        name = f"stopped-at-{step}"
        with monkeypatch.context() as patch:
            before_step(patch, step, interrupt)
            assert small_runs(name, *overrides) == 128 + signal.SIGTERM
        assert small_runs.saved(name) == [step]
        assert small_runs(name, *overrides, ALONE if step % 2 else THREE) == 0
        small_runs.assert_same(name, "whole")


def test_interrupted_after_every_step_it_equals_an_uninterrupted_run(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small_runs("whole", ASYNC) == 0
    for step in range(1, STEPS + 1):
        with monkeypatch.context() as patch:
            before_step(patch, 1, interrupt)
            assert small_runs("stopped", ASYNC) == (128 + signal.SIGTERM if step < STEPS else 0)
        assert small_runs.saved("stopped")[-1] == step
    small_runs.assert_same("stopped", "whole")


def test_resumed_with_another_partition_it_equals_an_uninterrupted_run(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small_runs("whole") == 0
    before_step(monkeypatch, 2, interrupt)
    assert small_runs("stopped") == 128 + signal.SIGTERM
    assert small_runs("stopped", OTHER_PLAN, THREE) == 0
    small_runs.assert_same("stopped", "whole")


@pytest.mark.parametrize(
    "mode", ["sync", "async, tied, two rounds", "async, bfloat16", "async, predict", "bounded, no stale layers"]
)
def test_interrupted_and_resumed_with_other_kept_activations_it_equals_a_run_that_recomputes(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    assert small_runs("recomputes", *MODES[mode], "--engine.keep_activations=none") == 0
    with monkeypatch.context() as patch:
        before_step(patch, 2, interrupt)
        assert small_runs("keeps", *MODES[mode], KEEP_ALL) == 128 + signal.SIGTERM
    assert small_runs("keeps", *MODES[mode], KEEP_SOME, THREE) == 0
    plan = json.loads((small_runs.path("keeps") / "plan.json").read_text())
    assert plan["kept"] == [[], *[["attention", "down"]] * 3, []]
    small_runs.assert_same("keeps", "recomputes")


# A step runs layer 1 (a block) 4 times forward and 4 times in its backward stage: calls 9 to 16 are step 2's.
@pytest.mark.parametrize("mode", ["sync, tied", "async, tied, two rounds"])
@pytest.mark.parametrize("call", [1, 9, 13, 16, 31])
def test_a_run_resumed_after_a_fault_in_a_stage_equals_one_without_the_fault(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, call: int
) -> None:
    assert small_runs("whole", *MODES[mode]) == 0
    with monkeypatch.context() as patch:
        before_forward(patch, 1, fail_at(call))
        capsys.readouterr()
        assert small_runs("faulty", *MODES[mode]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("PipelineError: device cpu:") and f"PlantedError: call {call}" in message
    # A state without an update is not saved: a new start makes it again.
    saved = small_runs.saved("faulty")
    assert len(saved) <= 1 and 0 not in saved
    assert (call - 1) // 8 - 1 <= max(saved, default=0) <= (call - 1) // 8
    assert small_runs("faulty", *MODES[mode], ALONE) == 0
    small_runs.assert_same("faulty", "whole")


@pytest.mark.parametrize("mode", ["bounded", "bounded, tied, bfloat16"])
@pytest.mark.parametrize("call", [9, 30])
def test_a_bounded_run_resumed_after_a_fault_in_the_middle_of_a_step_equals_one_without_the_fault(
    small_runs: SmallRuns,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    mode: str,
    call: int,
) -> None:
    """Layers of two versions are never saved: the newest checkpoint is from before the fault."""
    often = [*MODES[mode], "--checkpoint.interval_steps=1"]
    assert small_runs("whole", *often) == 0
    with monkeypatch.context() as patch:
        before_forward(patch, 1, fail_at(call))
        capsys.readouterr()
        assert small_runs("faulty", *often) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("PipelineError: device cpu:") and f"PlantedError: call {call}" in message
    # The fault also abandons a save that is under way.
    saved = Checkpointer(small_runs.path("faulty") / "checkpoints").latest_step() or 0
    assert saved <= (call - 1) // 8
    if "an update was not completed" in caplog.text:
        assert ("there is no checkpoint" if saved == 0 else f"checkpoint is of step {saved}") in caplog.text
    assert small_runs("faulty", *often, ALONE) == 0
    small_runs.assert_same("faulty", "whole")


def test_a_run_resumes_from_the_last_update_after_a_fault_outside_the_engine(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small_runs("whole") == 0

    def fail() -> None:
        raise PlantedError("in the loop itself")

    with monkeypatch.context() as patch:
        before_step(patch, 4, fail)
        with pytest.raises(PlantedError):  # no message of ours: a traceback
            small_runs("faulty")
    [rescued] = small_runs.saved("faulty")
    assert rescued in (2, 3)
    assert small_runs("faulty") == 0
    small_runs.assert_same("faulty", "whole")


def test_an_update_that_cannot_be_completed_is_not_saved(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small_runs("whole") == 0
    original, calls = torchround.engine.optimizer_worker.update_, []

    def failing(buffers, *, update, **options):
        if update == 4:
            calls.append(buffers)
            if len(calls) > 3:  # in the middle of the model, and at each further try
                raise PlantedError("in an update")
        original(buffers, update=update, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torchround.engine.optimizer_worker, "update_", failing)
        assert small_runs("faulty", "--checkpoint.interval_steps=2") == 1
    assert "mixes two weight versions" in capsys.readouterr().err.splitlines()[-1]
    assert small_runs.saved("faulty") == [2]
    assert small_runs("faulty") == 0
    small_runs.assert_same("faulty", "whole")


def test_a_resumed_run_keeps_the_rounds_that_were_planned_for_it(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for other devices would have other rounds, which add up gradients in another order."""
    auto = ["--engine.plan=none", "--engine.rounds=auto"]
    make_plan = torchround.pipeline.plan_report.make_plan

    def as_many_as_devices(costs, num_devices, num_micro_batches, update, rounds, limits, **options):
        rounds = num_devices if rounds == "auto" else rounds
        return make_plan(costs, num_devices, num_micro_batches, update, rounds, limits, **options)

    monkeypatch.setattr(torchround.pipeline.plan_report, "make_plan", as_many_as_devices)
    assert small_runs("whole", *auto) == 0
    with monkeypatch.context() as patch:
        before_step(patch, 2, interrupt)
        assert small_runs("stopped", *auto) == 128 + signal.SIGTERM
    assert small_runs("stopped", *auto, ALONE) == 0
    small_runs.assert_same("stopped", "whole")
    assert small_runs("alone", *auto, ALONE) == 0
    assert small_runs.losses("alone") != small_runs.losses("whole")


def test_a_new_run_may_start_from_a_checkpoint_of_another(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small_runs("whole", ASYNC, "--checkpoint.interval_steps=2") == 0
    load = f"--checkpoint.load_path={small_runs.path('whole')}/checkpoints/step-4"
    assert small_runs("branch", ASYNC, load) == 0
    assert small_runs.losses("branch") == {5: small_runs.losses("whole")[5]}
    assert small_runs("branch", ASYNC, load, "--training.steps=6") == 0  # its own checkpoint comes first
    assert list(small_runs.losses("branch")) == [5, 6]


def test_a_new_stage_takes_only_the_weights_of_a_checkpoint_and_begins_at_step_0_on_other_data(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small_runs("first", ASYNC) == 0
    write_text(small_runs.folder / "other.jsonl", lines=200, seed=1)
    stage = ["--checkpoint.load=weights", f"--checkpoint.load_path={small_runs.path('first')}/checkpoints/step-5"]
    stage += ['--data.sources=[{ path = "other.jsonl" }]', "--run.seed=1"]
    begun_with: list[dict[str, torch.Tensor]] = []

    def look(store: HostStore) -> None:
        refresh(store)
        begun_with.append({name: view.clone() for name, view in store.named_views().items()})

    refresh = HostStore.refresh_device_weights
    with monkeypatch.context() as patch:
        patch.setattr(HostStore, "refresh_device_weights", look)
        before_step(patch, 2, interrupt)
        assert small_runs("second", *stage) == 128 + signal.SIGTERM
    assert small_runs("second", *stage) == 0  # resumes from its own checkpoint
    assert list(small_runs.losses("second")) == [1, 2, 3, 4, 5]
    first, [begun] = small_runs.state("first"), begun_with
    assert {name for name in begun if name.startswith("weights/")} == {n for n in first if n.startswith("weights/")}
    for name, view in begun.items():
        moment = not name.startswith("weights/")
        assert not view.any() if moment else torch.equal(view, first[name])


@pytest.mark.parametrize(
    ("folder", "overrides", "message"),
    [
        ("nowhere", [], "checkpoint.load_path: given nowhere; legal: one checkpoint, a folder step-N"),
        ("outputs/first", [], "given outputs/first; legal: one checkpoint, such as outputs/first/checkpoints/step-5"),
        ("outputs/first/checkpoints/step-5", [TIED], "model.flavor 'untied' -> 'tied'"),
    ],
)
def test_weights_of_another_shape_are_refused(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str], folder: str, overrides: list[str], message: str
) -> None:
    assert small_runs("first") == 0
    load = ["--checkpoint.load=weights", f"--checkpoint.load_path={folder}"]
    assert small_runs("second", *load, *overrides) == 2
    assert message in capsys.readouterr().err


def test_a_resumed_run_rejoins_its_page_in_wandb_and_a_branch_does_not(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str | None] = []
    open_metrics = run_parts.open_metrics

    def with_a_page(*arguments, wandb_run_id, **options):
        joined.append(wandb_run_id)
        return open_metrics(*arguments, wandb_run_id=wandb_run_id or f"page-{len(joined)}", **options)

    monkeypatch.setattr(run_parts, "open_metrics", with_a_page)
    assert small_runs("run") == 0
    load = f"--checkpoint.load_path={small_runs.path('run')}/checkpoints/step-5"
    assert small_runs("run", "--training.steps=6") == 0
    assert small_runs("branch", load, "--training.steps=6") == 0
    assert joined == [None, "page-1", None]
    assert small_runs.saved_state("branch", 6)["wandb_run_id"] == "page-3"


@pytest.mark.parametrize(
    ("change", "expected"), [("--run.seed=1", "seed was 0, is 1"), ("--checkpoint.load_path=nowhere", None)]
)
def test_settings_that_do_not_fit_a_checkpoint_are_refused_with_a_remedy(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str], change: str, expected: str | None
) -> None:
    name = "run" if expected else "new"
    assert small_runs("run") == 0
    assert small_runs(name, "--training.steps=6", change) == 2
    message = capsys.readouterr().err
    assert (
        expected or "checkpoint.load_path: given nowhere; legal: one checkpoint, a folder step-N of a run"
    ) in message and "Traceback" not in message
    assert not expected or "--run.name" in message


def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    small_runs: SmallRuns, caplog: pytest.LogCaptureFixture
) -> None:
    assert small_runs("whole") == 0
    assert small_runs("damaged", "--checkpoint.interval_steps=2") == 0
    [tensors] = (small_runs.path("damaged") / "checkpoints" / "step-5").glob("*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    assert small_runs("damaged", "--training.steps=6", "--lr_schedule.decay=none") == 0
    assert "step-5" in caplog.text
    assert [line["step"] for line in small_runs.steps("damaged")] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_holds_what_a_resumed_run_needs(small_runs: SmallRuns) -> None:
    assert small_runs("run", ASYNC) == 0
    state = small_runs.saved_state("run")
    assert state["step"] == state["applied_updates"] == 5 and state["skipped_steps"] == 0
    assert state["tokens"] == small_runs.steps("run")[-1]["tokens"] > 0
    assert state["config"]["engine"]["update"] == "async"
    kinds = {name.split("/")[0] for name in small_runs.state("run")}
    assert kinds == {"weights", "exp_avg", "exp_avg_sq", "master_1_old"}
