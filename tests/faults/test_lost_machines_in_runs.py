"""Runs that lose a machine: the others end with a message that names it, and the run continues from what was saved."""

import re
import signal

import pytest

from tests.support.small_machines import SmallMachines, small_machines, starter

__all__ = ["small_machines", "starter"]

ENDLESS = ["--training.steps=100000", "--lr_schedule.decay=none", "--checkpoint.interval_steps=1"]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_killed_is_named_and_the_run_continues_to_the_same_bits(
    small_machines: SmallMachines, lost: int
) -> None:
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


def test_a_machine_that_is_stopped_is_named_after_its_time_out(small_machines: SmallMachines) -> None:
    machines = small_machines.start("run", 2, *ENDLESS, "--machines.timeout_s=5")
    machines[0].wait_until_printed("step      3/")
    machines[1].send(signal.SIGSTOP)
    assert machines[0].wait() == 1, machines[0].text()
    message = machines[0].text().splitlines()[-1]
    assert "machine 1 (" in message and "waited for" in message
    machines[1].send(signal.SIGCONT)
    assert machines[1].wait() == 1, machines[1].text()


def test_a_checkpoint_that_machine_0_cannot_write_ends_all_with_the_same_message(
    small_machines: SmallMachines,
) -> None:
    folder = small_machines.path("run")
    folder.mkdir(parents=True)
    (folder / "checkpoints").write_text("no folder")
    first, second = small_machines("run", 2, code=1)
    assert first.splitlines()[-1] == second.splitlines()[-1]
    assert second.startswith("CheckpointError: ") and "machine 0 (" in second
