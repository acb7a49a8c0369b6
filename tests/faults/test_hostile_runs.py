"""Run folders sent by an attacker: the run says what it does not use, and touches nothing outside."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_hostile_checkpoints import (
    BOMB,
    DEEP,
    TITLE,
    instead,
    judge_in_copy,
    pipe,
    saved,
    state,
    tensor_values,
)
from tests.support.fork_server import ForkServer
from tests.support.hostile_cases import Case

__all__ = ["saved"]

MEASURED = ("--run.name=run", "--training.steps=8", "--engine.plan=none", "--engine.measure_steps=1")
EPOCHS = (
    *("--run.name=run", "--training.steps=none", "--data.epochs=1"),
    "--training.global_batch_size=56",  # few steps
)
OWN = ("--run.name=run", "--training.steps=8")


def own(harm: Callable[[Path], object]):
    """Put a whole run's folder in place, as an attacker may have sent it."""
    return lambda folder: harm(folder / "outputs" / "run")


def plan(change: Callable[[dict[str, Any]], object]):
    """Alter the measured plan of a run, which then continues."""

    def forge_plan(path: Path) -> None:
        content = json.loads((path / "plan.json").read_text())
        change(content)
        (path / "plan.json").write_text(json.dumps(content))

    return Case(own(forge_plan), "planned again from 1 measured steps", MEASURED, 0)


def outside(name: str):
    """Make a checkpoint's folder a link to one outside."""

    def link(path: Path) -> None:
        (path.parents[1] / "elsewhere").mkdir()
        (path.parents[1] / "elsewhere" / "precious").write_text("precious")
        (path / "checkpoints" / name).symlink_to(path.parents[1] / "elsewhere")

    return link


RUNS = {
    "nothing but a forged checkpoint": Case(
        own(lambda path: instead("state.json", BOMB)(path / "checkpoints" / "step-5")),
        "none of the checkpoints",
        OWN,
        1,
    ),
    "weights that are no numbers": Case(
        own(lambda path: tensor_values(float("nan"))(path / "checkpoints" / "step-5")),
        "BadStepsError|not finite",
        (*OWN, "--training.steps=40", "--training.max_skipped_steps=3"),
        1,
    ),
    "a checkpoint that is a link": Case(own(outside("step-9")), "step-9: manifest.json cannot be read", OWN, 0),
    "leftovers that are a link": Case(own(outside("step-9.tmp")), "step-9.tmp is a link, so only", OWN, 0),
    "trash that is a link": Case(own(outside("step-9.trash")), "step-9.trash is a link, so only", OWN, 0),
    "checkpoints that are a file": Case(
        own(lambda path: (shutil.rmtree(path / "checkpoints"), (path / "checkpoints").touch())),
        "CheckpointError: the checkpoint of step 8 could not be written .*File exists",
        OWN,
        1,
    ),
    "metrics nested without end": Case(
        own(lambda path: (path / "metrics.jsonl").write_bytes(DEEP + b"\n")), "the run is complete", OWN, 0
    ),
    "metrics that are a pipe": Case(own(pipe("metrics.jsonl")), "metrics.jsonl .*not an ordinary file", OWN),
    "a plan nested without end": Case(
        own(lambda path: (path / "plan.json").write_bytes(DEEP)), "the run is complete", OWN, 0
    ),
    "a plan with a terminal's command": plan(lambda content: content["stages"][0].update(first_layer=TITLE)),
    "a plan of another kind of stage": plan(lambda content: content["stages"][0].update(kind="\x1b[2J")),
    "a plan without stages": plan(lambda content: content.update(stages=[])),
    "a plan of seconds in words": plan(lambda content: content["stages"][0].update(seconds="x")),
    "a plan that is infinite": plan(lambda content: content.update(bubble=float("inf"))),
    "a plan that is a pipe": Case(own(pipe("plan.json")), "plan.json .*not an ordinary file", OWN),
    "a plan of numbers beyond all": Case(
        own(
            lambda path: (path / "plan.json").write_text(
                '{"forward": [1e999], "fused": -1, "backward": [], "rounds": 1e9}'
            )
        ),
        "the run is complete",
        (*OWN, "--engine.plan=none"),
        0,
    ),
    "a validation that no run had": Case(
        own(lambda path: state(lambda content: content.update(validation=[1]))(path / "checkpoints" / "step-5")),
        "invalid run state in the checkpoint: .*validation is",
        OWN,
    ),
    "steps of epochs that are a pipe": Case(
        own(lambda path: os.mkfifo(path / "epoch_steps.json")), "epoch_steps.json .*not an ordinary file", EPOCHS
    ),
    "steps of epochs nested without end": Case(
        own(lambda path: (path / "epoch_steps.json").write_bytes(DEEP)), "the run is complete", EPOCHS, 0
    ),
    "a lock that is a pipe": Case(
        own(lambda path: ((path / ".lock").unlink(), os.mkfifo(path / ".lock"))), "lock .*not an ordinary file", OWN
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_hostile_run_folder_is_reported_and_nothing_outside_is_touched(
    fork_server: ForkServer, saved: Path, tmp_path: Path, name: str
) -> None:
    judge_in_copy(RUNS[name], fork_server, tmp_path, saved)
