"""Devices that are slow or starved: the same results."""

import time

import pytest

from tests.support.faults import engine_threads
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
from torchround.engine.device import DeviceWatcher, Stream
from torchround.engine.store.bundles import POLICIES

BATCHES = toy_batches(4, micro_batches=4)
PARTITION = PARTITIONS["forward coarser"]


class Slowdown(DeviceWatcher):
    """A watcher that halves a device's speed: operations on some queues take twice as long, and a millisecond more."""

    def __init__(self, *streams):
        self._slow, self._started_s = streams, {}

    def begins(self, device, stream, reads, writes, copied_bytes):
        self._started_s[stream] = time.perf_counter()

    def ends(self, device, stream, copied_bytes):
        if stream in self._slow:
            time.sleep(time.perf_counter() - self._started_s[stream] + 1e-3)


def trained(update, num_devices, wrap=lambda device: device):
    store = toy_store(toy_model(), policy=POLICIES[update])
    with toy_engine(toy_model(), store, PARTITION, num_devices, wrap=wrap) as engine:
        losses = train(engine, BATCHES)
    assert engine_threads() == []
    return losses, store.named_views()


@pytest.mark.parametrize(
    ("update", "streams"),
    [
        ("sync", (Stream.COMPUTE,)),
        ("async", (Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_UPLOAD)),
        ("sync", (Stream.GRADIENT_DOWNLOAD,)),
    ],
    ids=["computes slowly", "is starved", "delivers slowly"],
)
def test_one_of_eight_devices_that_is_slow_changes_no_bit(update, streams):
    slow = Slowdown(*streams)
    losses, state = trained(update, 8, lambda device: watched(device, slow) if device.name == "cpu:3" else device)
    expected_losses, expected = trained(update, 1)
    assert losses == expected_losses
    assert_same_state(state, expected)
