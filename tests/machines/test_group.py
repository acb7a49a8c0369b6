"""Machines as threads: what they gather, and how all of them end when one fails."""

import math
import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from tests.support.machines import run_machines
from torchround.machines.channels import CHANNELS, SHORT_BYTES, Channel
from torchround.machines.errors import LaunchError, MachineError
from torchround.machines.group import MachineGroup
from torchround.machines.links import Purpose

VALUES = [0.1 + 0.2, math.inf, 5e-324, None, "a name", [1, {"key": True}]]


def test_each_machine_gathers_the_values_of_all_in_the_order_of_ranks() -> None:
    def gather(group: MachineGroup) -> object:
        return group.channel("steps").gather([group.rank, *VALUES], "the values")

    assert run_machines(3, gather) == [[[rank, *VALUES] for rank in range(3)]] * 3


@pytest.mark.parametrize("num_bytes", [SHORT_BYTES - 2, SHORT_BYTES - 1, 3 * SHORT_BYTES])
def test_a_value_of_any_length_arrives_whole(num_bytes: int) -> None:
    def gather(group: MachineGroup) -> list[int]:
        channel = group.channel("batches")
        texts = channel.gather("x" * (num_bytes if group.rank == 1 else 0), "the long text")
        return [*map(len, texts), *channel.gather(group.rank, "the next value")]

    assert run_machines(2, gather) == [[0, num_bytes, 0, 1]] * 2


def test_channels_never_mix_their_values() -> None:
    def gather(group: MachineGroup) -> dict[str, list[object]]:
        found: dict[str, list[object]] = {}

        def use(name: str) -> None:
            channel = group.channel(name)
            found[name] = [channel.gather([name, turn], "a value")[1] for turn in range(20)]

        # Each machine starts the threads in another order.
        names = CHANNELS[group.rank :] + CHANNELS[: group.rank]
        threads = [threading.Thread(target=use, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    expected = {name: [[name, turn] for turn in range(20)] for name in CHANNELS}
    assert run_machines(2, gather) == [expected] * 2


def test_an_error_on_one_machine_ends_all_with_its_name_and_what_was_waited_for() -> None:
    texts: dict[int, str] = {}

    def fail(group: MachineGroup) -> None:
        if group.rank == 1:
            raise ZeroDivisionError("by zero")
        try:
            group.channel("steps").gather(0, "the losses of step 12")
        except MachineError as error:
            texts[group.rank] = str(error)
            assert error.machine == 1
            raise

    with pytest.raises(ZeroDivisionError):
        run_machines(3, fail)
    assert texts == {
        rank: f"machine 1 (node1) has failed: ZeroDivisionError: by zero; machine {rank} (node{rank}) waited for the "
        "losses of step 12"
        for rank in (0, 2)
    }


def test_a_machine_that_waits_for_nothing_is_told_of_another_ones_failure() -> None:
    told: list[MachineError] = []

    def fail(group: MachineGroup) -> None:
        heard = threading.Event()
        group.on_fault(lambda fault: (told.append(fault), heard.set()))  # type: ignore[func-returns-value]
        if group.rank == 1:
            raise ZeroDivisionError("by zero")
        heard.wait()

    with pytest.raises(ZeroDivisionError):
        run_machines(2, fail)
    assert [str(fault) for fault in told] == ["machine 1 (node1) has failed: ZeroDivisionError: by zero"]


def test_a_fault_is_told_to_a_call_that_comes_later() -> None:
    told: list[MachineError] = []

    def fail(group: MachineGroup) -> None:
        if group.rank == 1:
            raise ZeroDivisionError("by zero")
        with pytest.raises(MachineError):
            group.channel("steps").gather(0, "the losses")
        group.on_fault(told.append)

    with pytest.raises(ZeroDivisionError):
        run_machines(2, fail)
    assert [fault.machine for fault in told] == [1]


def test_abort_wakes_every_thread_that_waits_in_any_group() -> None:
    def wait(group: MachineGroup) -> int:
        woken = []

        def receive(index: int) -> None:
            try:
                peer = (group.rank + 1) % group.size
                list(group._groups.values())[index].recv([torch.zeros(1)], peer, 5).wait()
            except RuntimeError:
                woken.append(index)

        threads = [threading.Thread(target=receive, args=(index,)) for index in range(len(group._groups))]
        for thread in threads:
            thread.start()
        group.channel("start").gather(0, "all to wait")
        if group.rank == 0:
            group.abort()
        for thread in threads:
            thread.join()
        return len(woken)

    assert run_machines(3, wait, timeout_s=2.0) == [len(CHANNELS) + 4] * 3


class HalfArrived:
    """A gloo group in which a message has arrived by half: no wait for it ever ends by itself."""

    def __init__(self, looks: list[bool]) -> None:
        self.looks = looks

    def size(self) -> int:
        return 2

    def allgather(self, *arguments: object) -> "HalfArrived":
        return self

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        assert timeout < timedelta(minutes=1), "a wait that nothing ends"
        self.looks.append(True)
        raise RuntimeError("Operation timed out!")


def test_a_value_of_which_a_part_has_arrived_is_awaited_until_the_group_has_ended() -> None:
    looks: list[bool] = []
    explain = lambda error, peer, what: MachineError(f"{error} {what}")
    group = HalfArrived(looks)
    channel = Channel(group, explain, timedelta(days=1), lambda: len(looks) == 3)  # type: ignore[arg-type]
    with pytest.raises(MachineError, match="timed out! the losses"):
        channel.gather(0, "the losses")
    assert len(looks) == 3, "it waits on while the group lives"


class ArrivesLate(HalfArrived):
    """A gloo group whose values arrive just after a wait for them has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            super().wait(timeout)


def test_a_value_that_arrives_between_two_waits_is_no_fault() -> None:
    explain = lambda error, peer, what: MachineError(f"{error} {what}")
    channel = Channel(ArrivesLate([]), explain, timedelta(days=1), lambda: False)  # type: ignore[arg-type]
    channel._exchange(b"a", 1, channel._first_options)


def test_a_message_that_was_not_expected_is_named_as_such_on_all_machines() -> None:
    texts: dict[int, str] = {}

    def exchange(group: MachineGroup) -> None:
        try:
            if group.rank == 0:
                group.links.sender(1, Purpose.FILES).send(torch.ones(3), "three numbers")
            else:
                group.links.receiver(0, Purpose.FILES).receive(torch.ones(2), "two numbers")
            group.channel("steps").gather(0, "the losses")
        except MachineError as error:
            texts[group.rank] = str(error)

    run_machines(2, exchange)
    problem = "machine 1 (node1) has failed: message 0 of 12 bytes came instead of message 0 of 8 bytes, from "
    assert all(text.startswith(f"{problem}machine 0 (node0); ") for text in texts.values()), texts
    assert len(texts) == 2


def test_machines_that_do_not_come_are_counted_and_named() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(LaunchError, match=r"1 of 3 machines came within 0.2 s: machine 0 \(nodea\); missing: 1, 2"):
        MachineGroup(store, 0, 3, host="nodea", start_timeout_s=0.2)
