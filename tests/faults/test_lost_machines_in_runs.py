"""Runs that lose a machine: the others end with a message that names it, and the run continues from what was saved."""

import random
import re
import signal
import socket
import time
from contextlib import suppress

import psutil
import pytest

from tests.support.small_machines import ALL_ROUNDS
from tests.support.small_run import ASYNC, BOUNDED, COMPACT, PREDICT, UNCORRECTED
from torchround.checkpoint.folders import checkpoint_name

ENDLESS = ["--training.steps=100000", "--lr_schedule.decay=none", "--checkpoint.interval_steps=1"]


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_machine_that_is_killed_is_named_and_the_run_continues_to_the_same_bits(small_machines, lost):
    machines = small_machines.start("run", 2, *ENDLESS)
    machines[0].wait_until_printed("step      3/")
    machines[lost].send(signal.SIGKILL)
    assert machines[lost].wait() == -signal.SIGKILL
    assert machines[1 - lost].wait() == 1, machines[1 - lost].text()
    [message] = [line for line in machines[1 - lost].text().splitlines() if re.match(r"\w+Error:", line)]
    assert f"machine {lost} (" in message
    assert "Traceback" not in machines[1 - lost].text()
    last = max(small_machines.saved("run")) + 2
    total = [*ENDLESS, f"--training.steps={last}"]
    small_machines("run", 2, *total)
    small_machines("whole", 1, *total)
    small_machines.assert_same("run", "whole", step=last)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("num_machines", "undisturbed", "mode"),
    [
        pytest.param(2, 1, [], id="sync"),
        pytest.param(3, 1, [ASYNC, PREDICT], id="async, predict"),
        pytest.param(2, 1, [ASYNC, UNCORRECTED, COMPACT], id="async, compact"),
        pytest.param(2, 2, [*BOUNDED, "--engine.rounds=1"], id="bounded"),
        pytest.param(2, 1, ["--optimizer.name=muon"], id="muon"),
    ],
)
def test_kills_at_random_moments_leave_a_run_that_continues_to_the_same_bits(
    small_machines, num_machines, undisturbed, mode
):
    """Every step is saved, so most of the 8 kills meet an exchange or a save. `bounded` has one round on each machine."""
    generator, arguments = random.Random(num_machines), [*ENDLESS, *mode]
    for _ in range(8):
        done = max(small_machines.saved("run"), default=0)
        machines = small_machines.start("run", num_machines, *arguments)
        lost = machines[generator.randrange(num_machines)]
        machines[0].wait_until_printed(
            f"saved outputs/run/checkpoints/{checkpoint_name(done + generator.randint(1, 3))} "
        )
        time.sleep(generator.random() * 0.2)  # the moment is random; nothing depends on it
        lost.send(signal.SIGKILL)
        codes = [machine.wait() for machine in machines]
        assert codes == [-signal.SIGKILL if machine is lost else 1 for machine in machines], "\n---\n".join(
            machine.text() for machine in machines
        )
    last = max(small_machines.saved("run")) + 2
    total = [*arguments, f"--training.steps={last}"]
    small_machines("run", num_machines, *total)
    small_machines("whole", undisturbed, *total)
    small_machines.assert_same("run", "whole", step=last)


def wait_until_listening(port):
    while True:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


@pytest.mark.nightly
def test_torchrun_continues_with_the_machines_that_are_left(small_machines):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    elastic = [*ENDLESS, "--training.steps=40"]
    agents = [small_machines.start_agent("run", port, "1:2", *elastic)]
    wait_until_listening(port)
    agents.append(small_machines.start_agent("run", port, "1:2", *elastic))
    try:
        small_machines.wait_until_saved("run", 3)
        # The first agent holds the rendezvous, so the second one is lost, and its process with it.
        for process in (*psutil.Process(agents[1].pid).children(recursive=True), agents[1]):
            process.kill()
        printed, errors = agents[0].communicate(timeout=300)
    finally:
        for agent in agents:
            agent.kill()
    assert agents[0].returncode == 0, errors
    resumed = re.search(r"resuming after step (\d+)", printed)
    assert resumed is not None and "the run is complete" in printed, printed
    # The same history by hand: two machines up to that step, then one, each with as many rounds.
    small_machines("hand", 2, *ENDLESS, f"--training.steps={resumed[1]}")
    small_machines("hand", 1, *ENDLESS, "--training.steps=40", f"--engine.rounds={ALL_ROUNDS // 2}")
    small_machines.assert_same("run", "hand", step=40)
