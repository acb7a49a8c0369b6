"""A run that is interrupted and goes on has the losses and the weights of one that never stopped, bit for bit."""

import signal
import threading

import pytest

import torchround.engine.build
from tests.small_run import (
    ASYNC,
    STEPS,
    TIED,
    TWO_ROUNDS,
    SmallRuns,
    before_step,
    interrupt,
    small_runs,
    wrap_layer,
)

__all__ = ["small_runs"]

ALONE, THREE = "--engine.num_devices=1", "--engine.num_devices=3"
OTHER_PLAN = "--engine.plan={ forward = [1, 1, 1], fused = 2, backward = [3], rounds = 1 }"
MODES = {
    "sync": [],
    "sync, tied": [TIED],
    "sync, two rounds": [TWO_ROUNDS],
    "async": [ASYNC],
    "async, tied": [ASYNC, TIED],
    "async, tied, two rounds": [ASYNC, TIED, TWO_ROUNDS],
    "async, bfloat16": [ASYNC, "--training.dtype=bfloat16"],
}


class PlantedError(RuntimeError):
    pass


def fail_once(monkeypatch: pytest.MonkeyPatch, layer: int, call: int) -> None:
    """Layer `layer` fails at its `call`-th forward of the run, recomputes included, on whichever device."""
    lock, calls = threading.Lock(), [0]

    def wrap(model):
        kind = type(model.layers[layer])
        forward = kind.forward
        model.layers[layer].fails = True

        def failing(self, hidden, micro_batch):
            if getattr(self, "fails", False):
                with lock:
                    calls[0] += 1
                    if calls[0] == call:
                        raise PlantedError(f"call {call}")
            return forward(self, hidden, micro_batch)

        monkeypatch.setattr(kind, "forward", failing)

    wrap_layer(monkeypatch, wrap)


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


# A step runs layer 1 (a block) 4 times forward and 4 times in its backward stage: calls 9 to 16 are step 2's.
@pytest.mark.parametrize("mode", ["sync, tied", "async, tied, two rounds"])
@pytest.mark.parametrize("call", [1, 9, 13, 16, 31])
def test_after_a_fault_in_a_stage_the_run_goes_on_from_the_last_update_and_equals_one_without(
    small_runs: SmallRuns,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    call: int,
) -> None:
    assert small_runs("whole", *MODES[mode]) == 0
    with monkeypatch.context() as patch:
        fail_once(patch, layer=1, call=call)
        capsys.readouterr()
        assert small_runs("faulty", *MODES[mode]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("PipelineError: device cpu:") and f"PlantedError: call {call}" in message
    [rescued] = small_runs.saved("faulty")
    assert (call - 1) // 8 - 1 <= rescued <= (call - 1) // 8
    assert small_runs("faulty", *MODES[mode], ALONE) == 0
    small_runs.assert_same("faulty", "whole", may_lack={rescued - 1, rescued})


def test_a_run_that_goes_on_keeps_the_rounds_that_were_once_planned_for_it(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other devices would be planned with other rounds, which add gradients up in another order."""
    auto = ["--engine.plan=none", "--engine.rounds=auto"]
    make_plan = torchround.engine.build.make_plan

    def as_many_as_devices(costs, num_devices, num_micro_batches, update, rounds, limits):
        rounds = num_devices if rounds == "auto" else rounds
        return make_plan(costs, num_devices, num_micro_batches, update, rounds, limits)

    monkeypatch.setattr(torchround.engine.build, "make_plan", as_many_as_devices)
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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("--run.seed=1", "seed was 0, is 1"),
        ("--checkpoint.load_path=nowhere", None),
    ],
)
def test_what_does_not_fit_a_checkpoint_is_a_mistake_with_what_to_do(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str], change: str, expected: str | None
) -> None:
    name = "run" if expected else "new"
    assert small_runs("run") == 0
    assert small_runs(name, "--training.steps=6", change) == 2
    message = capsys.readouterr().err
    assert (
        expected or "checkpoint.load_path: checkpoint nowhere: manifest.json cannot be read"
    ) in message and "Traceback" not in message
    assert not expected or "--run.name" in message


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
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
