"""Machines as real processes that are killed, stopped or fail: the others end with a message that names them."""

import itertools
import os
import signal

import pytest
import torch

from tests.support.machines import group_of_environment, start_machines
from tests.support.namespaces import ADDRESSES, enter, joined_networks
from torchround.machines.group import MachineError
from torchround.machines.links import Purpose

# Long enough that a machine of a loaded computer is not silent by accident.
TIMEOUT_S = 3.0
nightly = pytest.mark.nightly


def work_until_a_fault(group, work, steps_before_the_fault):
    try:
        for step in itertools.count():
            if step == steps_before_the_fault:
                print("at work", flush=True)
            work(step)
    except MachineError as error:
        print(f"[{error}]", flush=True)
        return 1
    finally:
        group.close()


def agree_for_ever(networks=()):
    settings, rank = {}, int(os.environ["RANK"])
    if networks:
        enter(networks[rank])
        settings = {"store_host": ADDRESSES[0], "address": ADDRESSES[rank]}
    group = group_of_environment(timeout_s=TIMEOUT_S, **settings)
    return work_until_a_fault(group, lambda step: group.channel("steps").gather(0.5, f"the losses of step {step}"), 10)


def send_for_ever():
    group = group_of_environment(timeout_s=TIMEOUT_S)
    link, values = group.link(1 - group.rank, Purpose.WEIGHTS), torch.zeros(2**22)
    transfer = link.send if group.rank else link.receive
    return work_until_a_fault(group, lambda step: transfer(values, f"the weights of step {step}"), 4)


def started(processes, folder, **settings):
    machines = start_machines(
        processes, 3, "tests.machines.test_lost_machines:agree_for_ever", folder=folder, **settings
    )
    for machine in machines:
        machine.wait_until_printed("at work")
    return machines


def assert_ended_naming(machines, lost):
    for machine in machines:
        assert machine.wait() == 1, machine.text()
        assert f"[{lost}" in machine.text(), machine.text()
        assert f"; machine {machine.rank} (node{machine.rank}) waited for the losses of step" in machine.text()


@pytest.mark.parametrize("holds_store", [False, pytest.param(True, marks=nightly)])
def test_a_killed_machine_is_named_by_all_others(processes, tmp_path, holds_store):
    victim, *others = started(processes, tmp_path, first_holds_store=holds_store)
    victim.send(signal.SIGKILL)
    assert_ended_naming(others, "machine 0 (node0)" + " has ended or lost its network" * (not holds_store))
    assert victim.wait() == -signal.SIGKILL


def test_a_stopped_machine_is_named_by_all_others_and_learns_of_it_once_it_continues(processes, tmp_path):
    machines = started(processes, tmp_path)
    machines[1].send(signal.SIGSTOP)
    silent = f"machine 1 (node1) has given no sign of life for {TIMEOUT_S:g} s"
    assert_ended_naming([machines[0], machines[2]], silent)
    machines[1].send(signal.SIGCONT)
    assert_ended_naming([machines[1]], silent)


@nightly
def test_a_partition_of_the_network_ends_both_machines_with_the_name_of_the_other(processes, tmp_path):
    function = "tests.machines.test_lost_machines:agree_for_ever"
    with joined_networks() as networks:
        machines = start_machines(processes, 2, function, networks.names, first_holds_store=True, folder=tmp_path)
        for machine in machines:
            machine.wait_until_printed("at work")
        networks.cut()
        assert_ended_naming(machines[:1], f"machine 1 (node1) has given no sign of life for {TIMEOUT_S:g} s")
        assert_ended_naming(machines[1:], "machine 0 (node0) cannot be reached, and keeps the store")


@nightly
def test_the_machine_that_keeps_the_store_is_named_when_it_is_stopped(processes, tmp_path):
    machines = started(processes, tmp_path, first_holds_store=True)
    machines[0].send(signal.SIGSTOP)
    assert_ended_naming(machines[1:], "machine 0 (node0) cannot be reached, and keeps the store")
    machines[0].send(signal.SIGCONT)
    assert machines[0].wait() == 1, "it finds its connections closed"


@nightly  # by default, `test_group.py` wakes threads in the middle of a tensor
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_machine_that_is_lost_in_the_middle_of_a_tensor_leaves_no_other_one_waiting(processes, tmp_path, number):
    function = "tests.machines.test_lost_machines:send_for_ever"
    receiver, sender = start_machines(processes, 2, function, folder=tmp_path)
    sender.wait_until_printed("at work")
    sender.send(number)
    assert receiver.wait() == 1, receiver.text()
    assert "[machine 1 (node1) has" in receiver.text()
    assert "waited for receiving the weights of step" in receiver.text()
