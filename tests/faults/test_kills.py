"""SIGKILL at random moments, most of them in or near a save: real runs in real processes, killed for real."""

import json
import random
import re
import shutil
import signal
import time

import pytest

from tests.support.released_run import small_release
from tests.support.small_run import ASYNC, BOUNDED, COMPACT, PREDICT, UNCORRECTED, SmallRuns
from torchround.checkpoint import Checkpointer, verify_checkpoint
from torchround.checkpoint.folders import checkpoint_name

SPLIT = "--training.dtype=bfloat16"
RELEASE = ["--model.family=auto", "--model.flavor=none", "--model.hf_path=release"]
PACKED = [*RELEASE, SPLIT, "--lora.rank=2", "--lora.base=nf4", "--lora.base_cache=cache"]
STEPS = 12
OFTEN = [f"--training.steps={STEPS}", "--checkpoint.interval_steps=1"]
TRAINS = "tests.support.scenarios:trains"
IS_KILLED = "tests.support.scenarios:is_killed_at"


def killed(processes, folder, arguments, moment):
    """Start a run and kill it, unless it completes first: three of four times at a file operation of a checkpoint."""
    if moment.random() < 0.75:
        delay_s = moment.choice((0.0, moment.uniform(0, 0.01)))
        return processes.run(IS_KILLED, moment.randint(1, 40), delay_s, arguments, folder=folder)
    child = processes.start(TRAINS, arguments, folder=folder)
    time.sleep(moment.uniform(0, 0.4))
    child.send(signal.SIGKILL)
    child.wait()
    return child


def newest(checkpoints):
    step = Checkpointer(checkpoints).latest_step() or 0
    if step:
        verify_checkpoint(checkpoints / checkpoint_name(step))
    return step


def announced(child):
    name = checkpoint_name(0).replace("0", "([0-9]+)")
    return max(map(int, re.findall(rf"^saved \S+{name} ", child.text(), re.MULTILINE)), default=0)


@pytest.mark.parametrize(
    ("mode", "all_kills"),
    [
        pytest.param([ASYNC, PREDICT], 2, id="a few"),
        *(
            pytest.param(mode, kills, id=name, marks=pytest.mark.nightly)
            for name, mode, kills in (
                ("sync", [], 25),
                ("async", [ASYNC, UNCORRECTED], 25),
                ("async, predict", [ASYNC, PREDICT], 25),
                ("bounded", [*BOUNDED], 25),
                ("split", [SPLIT], 8),
                ("async, compact, split", [ASYNC, UNCORRECTED, COMPACT, SPLIT], 8),
                ("muon", ["--optimizer.name=muon", SPLIT], 8),
                # Kills come while the cache is written too.
                ("packed", PACKED, 8),
            )
        ),
    ],
)
def test_killed_at_random_moments_every_resume_succeeds_and_the_run_equals_an_uninterrupted_one(
    processes, tmp_path, mode, all_kills
):
    runs, moment, kills, number = SmallRuns(tmp_path), random.Random(5), 0, 0
    small_release(tmp_path / "release")
    whole = processes.run(TRAINS, ["--run.name=whole", *OFTEN, *mode], folder=tmp_path)
    assert whole.wait() == 0, whole.text()
    while kills < all_kills:
        number += 1
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        kills += kill_until_complete(processes, runs, f"run-{number}", mode, moment, at_most=all_kills - kills)
        runs.assert_same(f"run-{number}", "whole", step=STEPS)


def kill_until_complete(processes, runs, name, mode, moment, at_most):
    arguments = [f"--run.name={name}", *OFTEN, *mode]
    reached = kills = 0
    while reached < STEPS and kills < at_most:
        child = killed(processes, runs.folder, arguments, moment)
        assert child.wait() in (-signal.SIGKILL, 0), child.text()
        kills += child.wait() == -signal.SIGKILL
        resumed = re.search(r"^resuming after step (\d+) ", child.text(), re.MULTILINE)
        assert resumed is None or int(resumed[1]) == reached, child.text()
        before, reached = reached, newest(runs.path(name) / "checkpoints")
        assert reached >= max(before, announced(child)), child.text()
    finished = processes.run(TRAINS, arguments, folder=runs.folder)
    assert finished.wait() == 0, finished.text()
    return kills


def test_killed_before_its_first_checkpoint_a_run_keeps_what_its_losses_depend_on(processes, tmp_path):
    """The planner chooses other stale layers for other devices. A run keeps the layers of its first start."""
    runs, bounded = SmallRuns(tmp_path), ["--engine.update=bounded", "--training.clip=layer"]
    arguments = ["--run.name=run", "--engine.plan=none", *bounded]

    def stale_layers():
        return json.loads((runs.path("run") / "plan.json").read_text())["stale_layers"]

    child = processes.run(IS_KILLED, 1, 0.0, [*arguments, "--engine.num_devices=3"], folder=tmp_path)
    assert child.wait() == -signal.SIGKILL and not runs.saved("run"), child.text()
    losses, planned = runs.losses("run"), stale_layers()
    again = processes.run(TRAINS, [*arguments, "--engine.num_devices=1"], folder=tmp_path)
    assert again.wait() == 0, again.text()
    assert stale_layers() == planned > 0
    assert len(losses) > 2 and losses.items() <= runs.losses("run").items()
