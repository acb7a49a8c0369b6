"""Machines as real processes that are killed, stopped or fail: the others end with a message that names them."""

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.machines import MachineProcess, MachineStarter, group_of_environment
from torchround.machines.errors import MachineError
from torchround.machines.links import Purpose

# Long enough that a machine of a loaded computer is not silent by accident.
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineStarter]:
    starter = MachineStarter(tmp_path_factory.mktemp("machines"))
    yield starter
    starter.close()


def agree_for_ever(failing: int = -1) -> int:
    """Gather losses until an error ends it, which is printed. Machine `failing` raises an error after ten steps."""
    group = group_of_environment(timeout_s=TIMEOUT_S)
    step = 0
    try:
        while True:
            group.channel("steps").gather(0.5, f"the losses of step {step}")
            step += 1
            if step == 10:
                print("at work", flush=True)
                if group.rank == failing:
                    group.fail("out of memory")
                    return 3
    except MachineError as error:
        print(f"[{error}]", flush=True)
        return 1
    finally:
        group.close()


def send_for_ever() -> int:
    """Let machine 1 send tensors to machine 0 until an error ends it, which is printed."""
    group = group_of_environment(timeout_s=TIMEOUT_S)
    values = torch.zeros(2**25)
    try:
        for step in itertools.count():
            if group.rank == 0:
                group.links.receiver(1, Purpose.WEIGHTS).receive(values, f"the weights of step {step}")
            else:
                group.links.sender(0, Purpose.WEIGHTS).send(values, f"the weights of step {step}")
            if step == 3:
                print("at work", flush=True)
    except MachineError as error:
        print(f"[{error}]", flush=True)
    finally:
        group.close()
    return 1


def started(starter: MachineStarter, folder: Path, *arguments: object, **settings: bool) -> list[MachineProcess]:
    function = "tests.machines.test_lost_machines:agree_for_ever"
    machines = starter.start(3, function, *arguments, folder=folder, **settings)
    for machine in machines:
        machine.wait_until_printed("at work")
    return machines


def assert_ended_naming(machines: list[MachineProcess], lost: str) -> None:
    for machine in machines:
        assert machine.wait() == 1, machine.text()
        assert f"[{lost}" in machine.text(), machine.text()
        assert f"; machine {machine.rank} (node{machine.rank}) waited for the losses of step" in machine.text()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_machine_is_named_by_all_others(starter: MachineStarter, tmp_path: Path, victim: int) -> None:
    machines = started(starter, tmp_path)
    machines[victim].send(signal.SIGKILL)
    others = [machine for machine in machines if machine.rank != victim]
    assert_ended_naming(others, f"machine {victim} (node{victim}) has ended or lost its network")
    assert machines[victim].wait() == -signal.SIGKILL


def test_a_stopped_machine_is_named_by_all_others_and_learns_of_it_once_it_continues(
    starter: MachineStarter, tmp_path: Path
) -> None:
    machines = started(starter, tmp_path)
    machines[1].send(signal.SIGSTOP)
    silent = f"machine 1 (node1) has given no sign of life for {TIMEOUT_S:g} s"
    assert_ended_naming([machines[0], machines[2]], silent)
    machines[1].send(signal.SIGCONT)
    assert_ended_naming([machines[1]], silent)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_that_is_lost_in_the_middle_of_a_tensor_leaves_no_other_one_waiting(
    starter: MachineStarter, tmp_path: Path, number: int
) -> None:
    function = "tests.machines.test_lost_machines:send_for_ever"
    receiver, sender = starter.start(2, function, folder=tmp_path)
    sender.wait_until_printed("at work")
    sender.send(number)
    assert receiver.wait() == 1, receiver.text()
    assert "[machine 1 (node1) has" in receiver.text()
    assert "waited for receiving the weights of step" in receiver.text()


def test_a_failing_machine_is_named_with_its_problem(starter: MachineStarter, tmp_path: Path) -> None:
    machines = started(starter, tmp_path, 2)
    assert_ended_naming(machines[:2], "machine 2 (node2) has failed: out of memory")
    assert machines[2].wait() == 3


def test_the_machine_that_keeps_the_store_is_named_when_it_is_killed(starter: MachineStarter, tmp_path: Path) -> None:
    machines = started(starter, tmp_path, first_holds_store=True)
    machines[0].send(signal.SIGKILL)
    assert_ended_naming(machines[1:], "machine 0 (node0)")


def test_the_machine_that_keeps_the_store_is_named_when_it_is_stopped(starter: MachineStarter, tmp_path: Path) -> None:
    machines = started(starter, tmp_path, first_holds_store=True)
    machines[0].send(signal.SIGSTOP)
    keeps = "machine 0 (node0) cannot be reached, and keeps the store through which the machines find each other"
    assert_ended_naming(machines[1:], keeps)
    machines[0].send(signal.SIGCONT)
    assert machines[0].wait() == 1, "it finds its connections closed"
