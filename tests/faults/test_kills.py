"""SIGKILL at random moments, most of them in or near a save: real runs in real processes, killed for real."""

import json
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.fork_server import Child, ForkServer
from tests.support.small_run import ASYNC, BOUNDED, COMPACT, PREDICT, UNCORRECTED, SmallRuns
from torchround.checkpoint import Checkpointer, verify_checkpoint

KILLS, FEWER_KILLS = 25, 8  # for each way to train, and for each way to keep its state
SPLIT = "--training.dtype=bfloat16"
STEPS = 25
OFTEN = [f"--training.steps={STEPS}", "--checkpoint.interval_steps=1"]


def killed(fork_server: ForkServer, folder: Path, arguments: list[str], moment: random.Random) -> Child:
    """Start a run and kill it, unless it completes first: three of four times at a file operation of a checkpoint."""
    if moment.random() < 0.75:
        delay_s = moment.choice((0.0, moment.uniform(0, 0.01)))
        return fork_server.run("is_killed_at", moment.randint(1, 80), delay_s, arguments, folder=folder)
    child = fork_server.start("trains", arguments, folder=folder)
    time.sleep(moment.uniform(0, 0.4))
    child.send(signal.SIGKILL)
    child.wait()
    return child


def newest(checkpoints: Path) -> int:
    """Return the step of the newest complete checkpoint, after reading every byte of it; 0 without one."""
    step = Checkpointer(checkpoints).latest_step() or 0
    if step:
        verify_checkpoint(checkpoints / f"step-{step}")
    return step


def announced(child: Child) -> int:
    """Return the last step that the run reported as saved."""
    return max(map(int, re.findall(r"^saved \S+step-(\d+) ", child.text(), re.MULTILINE)), default=0)


@pytest.mark.parametrize(
    ("mode", "all_kills"),
    [
        pytest.param([], KILLS, id="sync"),
        pytest.param([ASYNC, UNCORRECTED], KILLS, id="async"),
        pytest.param([ASYNC, PREDICT], KILLS, id="async, predict"),
        pytest.param([*BOUNDED], KILLS, id="bounded"),
        pytest.param([SPLIT], FEWER_KILLS, id="split"),
        pytest.param([ASYNC, UNCORRECTED, COMPACT, SPLIT], FEWER_KILLS, id="async, compact, split"),
        pytest.param(["--optimizer.name=muon", SPLIT], FEWER_KILLS, id="muon"),
    ],
)
def test_killed_at_random_moments_every_resume_succeeds_and_the_run_equals_an_uninterrupted_one(
    fork_server: ForkServer, tmp_path: Path, mode: list[str], all_kills: int
) -> None:
    runs, moment, kills, number = SmallRuns(tmp_path), random.Random(5), 0, 0
    whole = fork_server.run("trains", ["--run.name=whole", *OFTEN, *mode], folder=tmp_path)
    assert whole.wait() == 0, whole.text()
    while kills < all_kills:
        number += 1
        left = all_kills - kills
        kills += kill_until_complete(fork_server, runs, f"run-{number}", mode, moment, at_most=left)
        runs.assert_same(f"run-{number}", "whole", step=STEPS)


def kill_until_complete(
    fork_server: ForkServer, runs: SmallRuns, name: str, mode: list[str], moment: random.Random, at_most: int
) -> int:
    """Kill a run and start it again until it is complete. Returns the number of kills."""
    arguments = [f"--run.name={name}", *OFTEN, *mode]
    checkpoints, reached, kills = runs.path(name) / "checkpoints", 0, 0
    while reached < STEPS and kills < at_most:
        child = killed(fork_server, runs.folder, arguments, moment)
        assert child.wait() in (-signal.SIGKILL, 0), child.text()
        kills += child.wait() == -signal.SIGKILL
        resumed = re.search(r"^resuming after step (\d+) ", child.text(), re.MULTILINE)
        assert resumed is None or int(resumed[1]) == reached, child.text()
        before, reached = reached, newest(checkpoints)
        assert reached >= max(before, announced(child)), child.text()
    finished = fork_server.run("trains", arguments, folder=runs.folder)
    assert finished.wait() == 0, finished.text()
    return kills


def test_killed_before_its_first_checkpoint_a_run_keeps_what_its_losses_depend_on(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """The planner chooses other stale layers for other devices. A run keeps the layers of its first start."""
    runs, bounded = SmallRuns(tmp_path), ["--engine.update=bounded", "--training.clip=layer"]
    arguments = ["--run.name=run", "--engine.plan=none", *bounded]

    def stale_layers() -> int:
        return json.loads((runs.path("run") / "plan.json").read_text())["stale_layers"]

    child = fork_server.run("is_killed_at", 1, 0.0, [*arguments, "--engine.num_devices=3"], folder=tmp_path)
    assert child.wait() == -signal.SIGKILL and not runs.saved("run"), child.text()
    losses, planned = runs.losses("run"), stale_layers()
    again = fork_server.run("trains", [*arguments, "--engine.num_devices=1"], folder=tmp_path)
    assert again.wait() == 0, again.text()
    assert stale_layers() == planned > 0
    assert len(losses) > 2 and losses.items() <= runs.losses("run").items()
