"""Devices that share a link take turns to upload weights: in order, with the same bits, never waiting for a dead one.

The tests judge order by waits and events alone, so no verdict depends on timing.
"""

import threading
import time
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest
import torch

from tests.support.reference import Reference
from tests.support.toy import (
    PARTITIONS,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
    watched,
)
from torchround.engine.device import CpuDevice, DeviceWatcher, Stream
from torchround.engine.errors import PipelineError
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, SYNC
from torchround.engine.watch.race_checker import AccessLog, find_races
from torchround.engine.worker.link_turns import REMEMBERED, LinkTurns

FINEST = PARTITIONS["one layer a stage"]
MICRO_BATCHES = 4


class EnqueuingDevice(CpuDevice):
    """A device that only notes which events its upload stream waits for. An event is the number of its record."""

    def __init__(self, index):
        super().__init__(index)
        self.waits = []
        self.records = 0

    def _record(self, stream):
        assert stream is Stream.WEIGHT_UPLOAD
        self.records += 1
        return f"{self.name} {self.records}"

    def _wait(self, stream, event):
        assert stream is Stream.WEIGHT_UPLOAD
        self.waits.append(event)


def take(turns, devices, index, window):
    """Take a turn and return the events that it waits for."""
    devices[index].waits.clear()
    with turns.turn(index, devices[index], window):
        pass
    return devices[index].waits


def test_a_turn_follows_the_others_turns_up_to_its_window_as_far_as_they_were_taken():
    devices, turns = [EnqueuingDevice(index) for index in range(4)], LinkTurns([(0, 1, 3)])
    assert take(turns, devices, 0, 0) == []
    assert take(turns, devices, 0, 1) == [], "its own stream orders its own chunks"
    for window in (2, 3, 4):
        take(turns, devices, 0, window)
    assert take(turns, devices, 1, 1) == ["cpu:0 2"], "not the chunks that thread 0 has enqueued ahead"
    assert take(turns, devices, 3, 2) == ["cpu:0 3", "cpu:1 1"]
    assert take(turns, devices, 1, 9) == ["cpu:0 5", "cpu:3 1"], "the last ones, though not of this window"


def test_the_second_of_two_chunks_of_one_window_waits():
    for first, second in ((0, 1), (1, 0)):
        devices, turns = [EnqueuingDevice(0), EnqueuingDevice(1)], LinkTurns([(0, 1)])
        assert take(turns, devices, first, 5) == []
        assert take(turns, devices, second, 5) == [f"cpu:{first} 1"]


def test_a_device_outside_all_groups_and_one_of_another_group_are_not_waited_for():
    devices, turns = [EnqueuingDevice(index) for index in range(5)], LinkTurns([(0, 1), (2, 3)])
    for index in range(5):
        take(turns, devices, index, 0)
    assert [take(turns, devices, index, 1) for index in range(5)] == [
        ["cpu:1 1"], ["cpu:0 2"], ["cpu:3 1"], ["cpu:2 2"], []
    ]  # fmt: skip
    assert devices[4].records == 0


def test_no_device_waits_for_a_turn_that_failed():
    devices, turns = [EnqueuingDevice(0), EnqueuingDevice(1)], LinkTurns([(0, 1)])
    with pytest.raises(ConnectionError), turns.turn(0, devices[0], 0):
        raise ConnectionError
    assert take(turns, devices, 1, 0) == []


def test_a_device_far_behind_waits_for_nothing_and_nothing_piles_up():
    devices, turns = [EnqueuingDevice(0), EnqueuingDevice(1)], LinkTurns([(0, 1)])
    for window in range(REMEMBERED + 1):
        take(turns, devices, 0, window)
    assert take(turns, devices, 1, 0) == [] and take(turns, devices, 1, 1) == ["cpu:0 2"]


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize(("num_devices", "groups"), [(2, [(0, 1)]), (4, [(0, 1), (2, 3)]), (3, [(0, 1, 2)])])
def test_training_gives_the_same_bits_in_turns(num_devices, groups, policy):
    batches, states, losses = toy_batches(4, MICRO_BATCHES), [], []
    for turns in ((), groups):
        model = toy_model()
        store = toy_store(model, policy=policy)
        with toy_engine(model, store, FINEST, num_devices, turns=turns) as engine:
            losses.append(train(engine, batches))
        states.append(store.named_views())
    assert losses[0] == losses[1]
    assert_same_state(states[1], states[0])


def test_training_in_turns_equals_a_plain_loop():
    model, batches = toy_model(), toy_batches(3, MICRO_BATCHES)
    store = toy_store(model)
    plain = Reference.of(model, store)
    with toy_engine(model, store, FINEST, 3, turns=[(0, 1, 2)]) as engine:
        assert train(engine, batches) == plain.train(batches)
    assert_same_state(store.named_views(), plain.state())


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("partition", ["one layer a stage", "backward coarser"])
def test_no_race_in_turns(partition, rounds, policy):
    assert races(PARTITIONS[partition], policy, rounds=rounds) == []


def test_turns_do_not_stand_in_for_an_ordering_rule(monkeypatch):
    monkeypatch.setattr(Ordering, "before_upload", lambda *_: None)
    assert races(PARTITIONS["forward coarser"], SYNC)


def races(partition, policy, **settings):
    log, model = AccessLog(), toy_model()
    options = {"observer": log, "wrap": lambda device: watched(device, log), "turns": [(0, 1), (2, 3)]}
    with toy_engine(model, toy_store(model, policy=policy), partition, 4, **options, **settings) as engine:
        train(engine, toy_batches(3, MICRO_BATCHES))
    return find_races(log.entries)


class LinkRecorder(DeviceWatcher):
    """A watcher that logs, for each upload of weights, a read of the byte of `ruler` at its window's number.

    Nothing is computed before all stage slots are `dispatched`, so that each window finds the next slot's
    weights to upload. Goes before `log` among the watchers.
    """

    def __init__(self, log, ruler, current, dispatched):
        self.log, self.ruler, self.current, self.dispatched = log, ruler, current, dispatched

    def begins(self, device, stream, reads, writes, copied_bytes):
        if not copied_bytes:
            self.dispatched.wait()
        elif stream is Stream.WEIGHT_UPLOAD:
            self.log.begins(device, stream, [self.ruler[self.current.window]], [], copied_bytes)


def unordered_uploads(monkeypatch, groups):
    """Return the pairs of windows `(device 0's, device 1's)` of one step whose chunks nothing orders."""
    log, current, dispatched, original = AccessLog(), threading.local(), threading.Event(), LinkTurns.turn
    ruler = torch.zeros(1000, dtype=torch.uint8)

    def turn(turns, index, device, window):
        current.window = window
        return original(turns, index, device, window)

    def wrap(device):
        return watched(watched(device, LinkRecorder(log, ruler, current, dispatched)), log)

    monkeypatch.setattr(LinkTurns, "turn", turn)
    model = toy_model()
    with toy_engine(model, toy_store(model), FINEST, 2, observer=log, wrap=wrap, turns=groups) as engine:
        [micro_batches] = toy_batches(1, MICRO_BATCHES)
        engine.forward_backward(micro_batches)
        dispatched.set()
        engine.step(1e-2)
        engine.drain()
    first, second = (uploads_of(log.entries, f"cpu:{index} weight upload", ruler) for index in range(2))
    return [
        (one.window, other.window)
        for one in first
        for other in second
        if one.clock.get(other.actor, 0) < other.clock[other.actor]
        and other.clock.get(one.actor, 0) < one.clock[one.actor]
    ]


class Upload(NamedTuple):
    """An upload of weights. `clock` counts, for each actor, the actions that are known to come before it."""

    actor: str
    window: int
    clock: dict


def uploads_of(entries, actor, ruler):
    clocks, signals, found = defaultdict(Counter), {}, []
    for entry in entries:
        clock = clocks[entry.actor]
        clock[entry.actor] += 1
        if entry.action == "signal":
            signals[entry.token] = clock.copy()
        elif entry.action == "wait":
            clock |= signals[entry.token]
        elif entry.actor == actor and entry.reads[0].allocation == ruler.data_ptr():
            found.append(Upload(actor, entry.reads[0].start, dict(clock)))
    return found


def out_of_turn(pairs):
    """Return the pairs of chunks that are further apart than threads can get ahead of each other.

    With 2 devices and M windows a stage, device 0's stages start at windows 0, M, 2M, .., device 1's one
    later. When a thread has come to window p >= 1 of a stage, window p - 1 of the stage before is enqueued,
    whose output it needs: that was two windows before for device 1, M before for device 0.
    """
    return [
        (first, second)
        for first, second in pairs
        if (second - first >= 2 and (second - 1) % MICRO_BATCHES >= 1)
        or (first - second >= MICRO_BATCHES and first % MICRO_BATCHES >= 1)
    ]


def test_the_windows_of_devices_on_one_link_alternate(monkeypatch):
    assert out_of_turn(unordered_uploads(monkeypatch, [(0, 1)])) == []


def test_without_turns_the_windows_do_not_alternate(monkeypatch):
    assert out_of_turn(unordered_uploads(monkeypatch, []))


class DyingDevice(CpuDevice):
    """A device that raises in the middle of its `last` upload of weights."""

    def __init__(self, index, last):
        super().__init__(index)
        self.left = last

    def _copy(self, stream, destination, source):
        if stream is Stream.WEIGHT_UPLOAD:
            self.left -= 1
            if self.left == 0:
                raise ConnectionError("the link is gone")
        super()._copy(stream, destination, source)


@pytest.mark.parametrize("last", [1, 2, 9, 30])
@pytest.mark.parametrize("dying", [0, 1])
def test_a_worker_that_dies_in_its_turn_is_named_and_no_other_waits_for_it(dying, last):
    model = toy_model()
    store = toy_store(model)

    def wrap(device):
        return DyingDevice(dying, last) if device.name == f"cpu:{dying}" else device

    with (
        pytest.raises(PipelineError, match=f"device cpu:{dying}.*the link is gone") as raised,
        toy_engine(model, store, FINEST, 2, wrap=wrap, turns=[(0, 1)]) as engine,
    ):
        train(engine, toy_batches(3, MICRO_BATCHES))
    assert isinstance(raised.value.__cause__, ConnectionError)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchround")]
    assert store.is_consistent


class SlowDevice(CpuDevice):
    def _copy(self, stream, destination, source):
        if stream is Stream.WEIGHT_UPLOAD:
            time.sleep(0.003)
        super()._copy(stream, destination, source)


def test_a_slow_device_on_the_link_changes_no_bit():
    losses = []
    for wrap in (lambda device: device, lambda device: SlowDevice(1) if device.name == "cpu:1" else device):
        model = toy_model()
        with toy_engine(model, toy_store(model), FINEST, 2, wrap=wrap, turns=[(0, 1)]) as engine:
            losses.append(train(engine, toy_batches(2, MICRO_BATCHES)))
    assert losses[0] == losses[1]
