"""Machines as threads: what they gather, and how all of them end when one fails."""

import math
import threading
import time
from datetime import timedelta

import pytest
import torch

from tests.support.machines import on_threads, run_machines
from torchround.machines.group import CHANNELS, Channel, MachineError, measure_rate
from torchround.machines.links import Purpose

VALUES = [0.1 + 0.2, math.inf, 5e-324, None, "a name", [1, {"key": True}]]
FAILED = "machine 1 (node1) has failed: ZeroDivisionError: by zero"


def test_each_machine_gathers_the_values_of_all_in_the_order_of_ranks():
    def gather(group):
        return group.channel("steps").gather([group.rank, *VALUES], "the values")

    assert run_machines(3, gather) == [[[rank, *VALUES] for rank in range(3)]] * 3


def test_a_value_of_any_length_arrives_whole():
    lengths = (1, 3000, 0)

    def gather(group):
        channel = group.channel("batches")
        texts = [channel.gather("x" * (num_bytes if group.rank == 1 else 0), "a text") for num_bytes in lengths]
        return [*(len(text) for _, text in texts), *channel.gather(group.rank, "the next value")]

    assert run_machines(2, gather) == [[*lengths, 0, 1]] * 2


def test_channels_never_mix_their_values():
    def gather(group):
        found = {}

        def use(name):
            channel = group.channel(name)
            found[name] = [channel.gather([name, turn], "a value")[1] for turn in range(20)]

        # Each machine starts the threads in another order.
        names = CHANNELS[group.rank :] + CHANNELS[: group.rank]
        on_threads([lambda name=name: use(name) for name in names])
        return found

    assert run_machines(2, gather) == [{name: [[name, turn] for turn in range(20)] for name in CHANNELS}] * 2


def test_an_error_on_one_machine_ends_all_with_its_name_and_what_was_waited_for():
    """Machine 0 waits, machine 2 waits and asks to be told afterwards, machine 3 waits for nothing."""
    texts, told = {}, {}

    def fail(group):
        heard = threading.Event()
        if group.rank == 1:
            raise ZeroDivisionError("by zero")
        if group.rank == 3:
            group.on_fault(lambda fault: (told.update({3: fault}), heard.set()))
            heard.wait()
            return
        with pytest.raises(MachineError) as caught:
            group.channel("steps").gather(0, "the losses of step 12")
        texts[group.rank] = str(caught.value)
        if group.rank == 2:
            group.on_fault(lambda fault: told.update({2: fault}))

    with pytest.raises(ZeroDivisionError):
        run_machines(4, fail)
    waited = "; machine {0} (node{0}) waited for the losses of step 12"
    assert texts == {rank: FAILED + waited.format(rank) for rank in (0, 2)}
    assert str(told[3]) == FAILED and told[2].machine == told[3].machine == 1


def test_abort_wakes_every_thread_that_waits_on_any_machine_with_a_named_error():
    """On each machine: a thread for each channel, one that receives from, and one that sends to, another machine."""

    def wait(group):
        following, large = (group.rank + 1) % group.size, torch.zeros(2**24)
        calls = [lambda name=name: group.channel(name).gather(0, f"{name}'s") for name in CHANNELS if name != "start"]
        if group.rank == 0:  # otherwise the values would come
            calls = []
        calls.append(lambda: group.link(following, Purpose.GRADIENTS).receive(large, "a tensor"))
        calls.append(lambda: list(group.link(following, Purpose.TRIAL).chunks(9, torch.float32, "some")))
        calls.append(lambda: group.link(following, Purpose.WEIGHTS).send(large, "a tensor"))
        errors = []

        def woken(call):
            with pytest.raises(MachineError) as caught:
                call()
            errors.append(str(caught.value))

        waiting = threading.Thread(target=on_threads, args=([lambda call=call: woken(call) for call in calls],))
        waiting.start()
        group.channel("start").gather(0, "all to wait")
        if group.rank == 0:
            group.abort()
        waiting.join()
        with pytest.raises(MachineError):
            group.link(following, Purpose.TRIAL).send(torch.zeros(1), "later")
        return len(errors) == len(calls) and all(f"(node{group.rank}) waited for" in text for text in errors)

    assert run_machines(3, wait, timeout_s=2.0) == [True] * 3


class Gloo:
    """A gloo group in which a message has arrived by half: no wait for it ends by itself."""

    looks = 0

    def size(self):
        return 1

    def allgather(self, received, sent):
        received[0][0].copy_(sent[0])
        return self

    def is_completed(self):
        return False

    def wait(self, timeout=timedelta.max):
        assert timeout < timedelta(minutes=1), "a wait that nothing ends"
        self.looks += 1
        raise RuntimeError("Operation timed out!")


def test_a_value_of_which_a_part_has_arrived_is_awaited_until_the_group_has_ended():
    group = Gloo()

    class Machines:
        is_aborted = property(lambda self: group.looks == 3)
        explain = staticmethod(lambda error, peer, what: MachineError(f"{error} {what}"))

    channel = Channel(group, Machines())
    with pytest.raises(MachineError, match="timed out! the losses"):
        channel.gather(0, "the losses")
    assert group.looks == 3, "it waits on while the group lives"


def test_all_machines_learn_the_rate_of_the_slowest_one():
    def measure(group):
        for peer in group.peers if group.rank == 1 else ():
            link = group.link(peer, Purpose.TRIAL)
            send = link.send
            link.send = lambda data, what, send=send: (time.sleep(data.nbytes / 4e6), send(data, what))
        return measure_rate(group, trial_bytes=1 << 16, seconds=0.01)

    [rate] = set(run_machines(3, measure))
    assert 0 < rate <= 2 * 4e6, "to two peers at once"
