"""Devices that are slow or starved, and a loss that is not a number: the same results, or the documented skip."""

import threading
import time

import pytest
import torch

from tests.support.toy import (
    PARTITIONS,
    ToyHead,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
    watched,
)
from torchround.engine.device import CpuDevice, DeviceWatcher, Stream
from torchround.engine.store.bundles import ASYNC, POLICIES

BATCHES = toy_batches(4, micro_batches=4)
PARTITION = PARTITIONS["forward coarser"]


class Slowdown(DeviceWatcher):
    """A watcher that halves a device's speed: operations on some queues take twice as long, and a millisecond more."""

    def __init__(self, streams):
        self._slow = streams
        self._started_s = {}

    def begins(self, device, stream, reads, writes, copied_bytes):
        self._started_s[stream] = time.perf_counter()

    def ends(self, device, stream, copied_bytes):
        if stream in self._slow:
            time.sleep(time.perf_counter() - self._started_s[stream] + 1e-3)


def engine_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchround")]


def trained(update, num_devices, wrap=lambda device: device):
    store = toy_store(toy_model(), policy=POLICIES[update])
    with toy_engine(toy_model(), store, PARTITION, num_devices, wrap=wrap) as engine:
        losses = train(engine, BATCHES)
    assert engine_threads() == []
    return losses, store.named_views()


@pytest.mark.parametrize("update", ["sync", "async"])
@pytest.mark.parametrize(
    "streams",
    [(Stream.COMPUTE,), (Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_UPLOAD), (Stream.GRADIENT_DOWNLOAD,)],
    ids=["computes slowly", "is starved", "delivers slowly"],
)
def test_one_of_eight_devices_that_is_slow_changes_no_bit(update, streams):
    def slow(device: CpuDevice):
        return watched(device, Slowdown(streams)) if device.name == "cpu:3" else device

    losses, state = trained(update, 8, slow)
    expected_losses, expected = trained(update, 1)
    assert losses == expected_losses
    assert_same_state(state, expected)


@pytest.fixture
def nan_loss(monkeypatch):
    """Make the loss of micro-batch 2 of step 1 not a number."""
    forward, tokens = ToyHead.forward, BATCHES[1][2].tokens

    def failing(self, hidden, micro_batch):
        loss = forward(self, hidden, micro_batch)
        return loss * float("nan") if torch.equal(micro_batch.tokens, tokens) else loss

    monkeypatch.setattr(ToyHead, "forward", failing)


def skipping_run(num_devices, policy):
    model = toy_model()
    store = toy_store(model, policy=policy)
    reports = []
    with toy_engine(model, store, PARTITION, num_devices) as engine:
        for batch in BATCHES:
            result = engine.forward_backward(batch)
            engine.step(1e-2)
            reports.append(result.update())
    assert engine_threads() == []
    assert [report.skipped for report in reports] == [False, True, False, False]
    assert reports[1].not_finite == (2,) and (store.step, store.applied_updates) == (4, 3)
    return store.named_views()


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_a_loss_that_is_nan_at_one_micro_batch_skips_the_step_as_if_it_had_not_been(nan_loss, num_devices):
    store = toy_store(toy_model())
    with toy_engine(toy_model(), store, PARTITION, 1) as engine:
        train(engine, [BATCHES[0], *BATCHES[2:]])
    assert_same_state(skipping_run(num_devices, POLICIES["sync"]), store.named_views())


def test_in_async_too_the_skip_is_the_same_on_any_number_of_devices(nan_loss):
    states = [skipping_run(num_devices, ASYNC) for num_devices in (1, 2, 5)]
    assert_same_state(states[1], states[0])
    assert_same_state(states[2], states[0])
