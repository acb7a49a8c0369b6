"""A run, its measuring steps, a dry run and the `plan` command plan with the same numbers, in one function."""

from dataclasses import replace

import pytest
import torch

import torchround.run.run_plan
from tests.support.small_run import SmallRuns, small_runs
from torchround.commands import plan_run, train_model
from torchround.config import EngineTable, TrainingTable, load_config
from torchround.layer import LayeredModel
from torchround.models import FAMILIES
from torchround.pipeline import plan_report
from torchround.pipeline.costs import BLOCK_LAUNCH_S, EXPERTS_LAUNCH_S
from torchround.pipeline.memory import MIB
from torchround.pipeline.plan_report import plan_for
from torchround.pipeline.planner import InfeasiblePlanError
from torchround.pipeline.run_question import RunQuestion
from torchround.run.hardware import Hardware
from torchround.run.numbers import RunNumbers, run_question

__all__ = ["small_runs"]

KEYS = [
    *("--engine.plan=none", "--engine.rounds=2", "--engine.recompute=layer", "--engine.update=async"),
    *("--training.dtype=bfloat16", "--engine.grad_dtype=float16", "--engine.accumulate_dtype=bfloat16"),
]
MACHINE = Hardware("cpu", 2, 64 * MIB, 8 * MIB)
TRAINING = TrainingTable(seq_len=512, global_batch_size=8, micro_batch_size=1, dtype="float32")


def on_this_machine(patch: pytest.MonkeyPatch, machine: Hardware) -> None:
    patch.setattr(train_model, "find_hardware", lambda *_: machine)
    patch.setattr(plan_run, "hardware", lambda given, config: machine)


def debug_model() -> LayeredModel:
    family = FAMILIES["llama3"]
    model: LayeredModel = family.build(family.config_from_flavor("debug"))
    return model


def test_a_run_its_measuring_steps_a_dry_run_and_the_plan_command_plan_with_the_same_numbers(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_this_machine(monkeypatch, MACHINE)
    asked: list[RunQuestion] = []

    def seen(question: RunQuestion, *costs: object) -> object:
        asked.append(question)
        return plan_for(question, *costs)  # type: ignore[arg-type]

    for module in (train_model, plan_report, torchround.run.run_plan):
        monkeypatch.setattr(module, "plan_for", seen)
    assert small_runs("run", *KEYS, "--engine.measure_steps=1") == 0
    of_the_run, *alternatives, measured = asked  # the header names a faster setting
    assert all(question.given is None for question in alternatives)
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
    assert checked.num_micro_batches == of_the_run.num_micro_batches == 4
    limits = of_the_run.limits()
    assert limits.host_bytes is not None and 0 < limits.host_bytes < 8 * MIB
    # bfloat16 sums that travel as float16 have the same size, and are converted all the same.
    assert limits.rounding_share == 1.0 and limits.rounding_bytes > 0


def test_a_run_whose_boundaries_do_not_fit_host_memory_is_refused_before_anything_is_allocated(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none_is_made(*arguments: object) -> None:
        raise AssertionError("the host store is allocated")

    keys = ["--engine.plan=none", "--model.family=llama3", "--model.flavor=debug", "--training.seq_len=512"]
    plenty = Hardware("cpu", 2, 2**30, 2**30)
    with monkeypatch.context() as patch:
        patch.setattr("torchround.trainer.build_store", none_is_made)
        question = run_question(debug_model(), RunNumbers(TRAINING, EngineTable()), plenty)
        # Room for weights, gradients, optimizer state, two batches and the integers of two, and 64 KiB for what passes between stages.
        needed = question.state().state_bytes + (2 + 2) * 8 * 32 * 512 + 2**16
        on_this_machine(patch, replace(plenty, host_bytes=needed))
        for more in ([], ["--dry-run"]):
            # The window of shuffled sequences is counted too; these bytes have no room for one.
            arguments = ["--training.global_batch_size=8", "--data.shuffle_sequences=0"]
            assert small_runs("run", *keys, *more, *arguments) == 2
            output = " ".join("".join(capsys.readouterr()).split())
            assert "activations between" in output and "of host memory" in output, output
    assert not (small_runs.path("run") / "checkpoints").exists()
    assert not small_runs.path("run").exists()


def test_a_run_that_fits_can_measure_within_the_memory_of_its_plan() -> None:
    """Steps of one layer per stage, which measured before, need more host memory than the run has."""
    numbers = RunNumbers(TRAINING, EngineTable())
    plenty = run_question(debug_model(), numbers, Hardware("cpu", 2, 2**30))
    partition = plan_for(plenty).partition
    ones = (1,) * (len(debug_model().layers) - 1)
    for host_bytes in range(2 * MIB, 64 * MIB, MIB // 4):
        scarce = replace(plenty, host_bytes=host_bytes)
        try:
            counted = plan_for(scarce)
        except InfeasiblePlanError:
            continue
        break
    with pytest.raises(InfeasiblePlanError, match="host memory"):
        plan_for(replace(scarce, given=(type(partition)(ones, 1, ones), 1)))
    planning = torchround.run.run_plan.PlanByMeasuring(scarce, counted, None, 0, 3, 10)
    assert planning.until == 3 and planning.settled == counted
    assert "each layer is timed for 3 steps" in planning.text()


def test_numbers_of_a_run_are_its_configs() -> None:
    numbers = RunNumbers(TrainingTable(dtype="bfloat16"), EngineTable(accumulate_dtype="float32"))
    assert (numbers.dtype, numbers.gradient_dtype) == (torch.bfloat16, torch.bfloat16)
    assert numbers.accumulate_dtype is torch.float32 and numbers.spike_factor == 0.0
    wide = RunNumbers(TrainingTable(dtype="bfloat16", on_spike="skip"), EngineTable(grad_dtype="float32"))
    assert wide.gradient_dtype is torch.float32 and wide.spike_factor > 0


def test_a_plan_for_cards_counts_the_launches_of_each_block_and_one_for_the_host_none() -> None:
    hardware = Hardware("cuda", 8, 2**34, 2**34)
    for flavor, launch_s in (("debug", BLOCK_LAUNCH_S), ("debug_moe", EXPERTS_LAUNCH_S)):
        model = FAMILIES["qwen3"].build(FAMILIES["qwen3"].config_from_flavor(flavor))
        numbers = RunNumbers(TRAINING, EngineTable())
        counted = run_question(model, numbers, hardware).costs()
        assert counted.launch_s == pytest.approx((len(model.layers) - 2) * launch_s)
        assert run_question(model, numbers, MACHINE).costs().launch_s == 0
