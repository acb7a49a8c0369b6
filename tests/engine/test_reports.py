"""Device time, its waits and the bytes that cross the link are measured, and add up."""

import time

import pytest
import torch

from tests.support.toy import PARTITIONS, ToyBlock, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine import optimizer_worker

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(4, micro_batches=4)


def run(num_devices=2, model=None, **settings):
    """Results of all steps, dispatched one after the other."""
    model = model or toy_model()
    results = []
    with toy_engine(model, toy_store(model), PARTITION, num_devices, **settings) as engine:
        for micro_batches in BATCHES:
            results.append(engine.forward_backward(micro_batches))
            engine.step(1e-2)
            results[-1].collect()
    return results


def busy_s(result):
    return sum(report.busy_s for report in result.reports())


def input_waits_s(result, num_devices):
    return result.by_device(lambda slot: slot.input_wait_s, num_devices)


def test_busy_time_is_the_time_spent_in_layers(monkeypatch):
    """Each of the 5 blocks sleeps 2 ms in 4 forwards and, below the fused stage, 4 recomputes."""
    forward = ToyBlock.forward

    def slow(self, hidden, micro_batch):
        time.sleep(0.002)
        return forward(self, hidden, micro_batch)

    monkeypatch.setattr(ToyBlock, "forward", slow)
    for result in run():
        assert busy_s(result) >= 5 * 2 * 4 * 0.002


def test_the_wait_for_a_slow_optimizer_is_measured_apart(monkeypatch):
    update = optimizer_worker.OptimizerWorker._update

    def slow(self, step, lr):
        time.sleep(0.3)
        update(self, step, lr)

    monkeypatch.setattr(optimizer_worker.OptimizerWorker, "_update", slow)
    model = toy_model()
    with toy_engine(model, toy_store(model), PARTITION, 1) as engine:
        results = []
        for micro_batches in BATCHES:
            results.append(engine.forward_backward(micro_batches))
            engine.step(1e-2)
        engine.drain()
    for result in results[1:]:
        [optimizer_wait_s] = result.by_device(lambda slot: slot.optimizer_wait_s, 1)
        assert optimizer_wait_s > max(0.25, *input_waits_s(result, 1))


def test_the_wait_for_the_stage_before_is_measured_apart(monkeypatch):
    """Stages of 2, 3 and no blocks of 10 ms: in the second pass the last device waits 30 ms for the middle one."""
    forward = ToyBlock.forward

    def slow(self, hidden, micro_batch):
        time.sleep(0.01)
        return forward(self, hidden, micro_batch)

    monkeypatch.setattr(ToyBlock, "forward", slow)
    model = toy_model()
    with toy_engine(model, toy_store(model), PARTITION, 3) as engine:
        results = [engine.evaluate(BATCHES[0][:1]) for _ in range(2)]
        first_s, _, last_s = input_waits_s(results[1], 3)
        _, middle_busy_s, last_busy_s = results[1].by_device(lambda slot: slot.busy_s, 3)
    assert last_s > 0.02
    assert last_busy_s < middle_busy_s
    assert first_s < last_s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_up_once_a_stage_and_gradients_come_down_once(dtype):
    """Weights go up once per forward or fused stage and once per backward stage; gradients down once."""
    model = toy_model()
    store = toy_store(model, dtype)
    with toy_engine(model, store, PARTITION, 1) as engine:
        train(engine, BATCHES)
        [device] = engine.devices
    by_layer = [sum(store.bundles[b].numel for b in store.layer_bundles(layer)) for layer in range(7)]
    fused = by_layer[6]
    weights = (2 * sum(by_layer) - fused) * dtype.itemsize * len(BATCHES)
    gradients = sum(by_layer) * dtype.itemsize * len(BATCHES)
    activations = 16 * 2**10 * len(BATCHES) * 8  # no more than this: 4 micro-batches, a few boundaries each
    assert weights < device.uploaded_bytes < weights + activations
    assert gradients < device.downloaded_bytes < gradients + activations


def test_frozen_weights_never_travel_down():
    model = toy_model()
    for layer in model.layers[1:-1]:
        layer.requires_grad_(False)
    frozen = toy_store(model)
    with toy_engine(model, frozen, PARTITION, 1) as engine:
        train(engine, BATCHES)
        partly = engine.devices[0].downloaded_bytes
    blocks = sum(bundle.numel for bundle in frozen.bundles if not bundle.trainable) * 4 * len(BATCHES)
    whole = toy_model()
    with toy_engine(whole, toy_store(whole), PARTITION, 1) as engine:
        train(engine, BATCHES)
        assert engine.devices[0].downloaded_bytes - partly == blocks


def test_nothing_is_allocated_on_a_device_after_the_second_step():
    model = toy_model()
    with toy_engine(model, toy_store(model), PARTITION, 2) as engine:
        train(engine, BATCHES[:2])
        before = [device.num_allocations for device in engine.devices]
        train(engine, toy_batches(6, micro_batches=4))
        assert [device.num_allocations for device in engine.devices] == before
