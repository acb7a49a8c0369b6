"""Devices that share a link take turns to upload weights: in order, never waiting for a dead one. `test_rows.py` has the bits.

The tests judge order by waits and events alone, so no verdict depends on timing.
"""

import threading

import pytest

from tests.support.faults import Bomb
from tests.support.toy import PARTITIONS, toy_batches, toy_engine, train, watched
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.errors import PipelineError
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


@pytest.mark.parametrize(("dying", "last"), [(0, 1), (1, 9), (0, 30)])
def test_a_worker_that_dies_in_its_turn_is_named_and_no_other_waits_for_it(dying, last):

    def wrap(device):
        bomb = Bomb(Stream.WEIGHT_UPLOAD, ConnectionError, hit=last)
        return watched(device, bomb) if device.name == f"cpu:{dying}" else device

    with (
        pytest.raises(PipelineError, match=f"device cpu:{dying}.*ConnectionError: planted") as raised,
        toy_engine(FINEST, 2, wrap=wrap, turns=[(0, 1)]) as engine,
    ):
        train(engine, toy_batches(3, MICRO_BATCHES))
    assert isinstance(raised.value.__cause__, ConnectionError)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchround")]
    assert engine.store.is_consistent
