"""Device time, its waits and the bytes that cross the link are measured, and add up."""

import threading
import time

import pytest
import torch

from tests.support.toy import PARTITIONS, planted_model, toy_batches, toy_engine, toy_model, toy_store, train

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(3, micro_batches=4)


def slow_model(seconds):
    def slow(hidden, micro_batch):
        time.sleep(seconds)
        return hidden

    return planted_model(slow)


def test_busy_time_is_the_time_spent_in_layers():
    """Each of the 5 blocks sleeps 2 ms in 4 forwards and, below the fused stage, 4 recomputes."""
    with toy_engine(PARTITION, 2, model=slow_model(0.002)) as engine:
        result = engine.forward_backward(BATCHES[0])
        engine.step(1e-2)
        assert sum(report.busy_s for report in result.reports()) >= 5 * 2 * 4 * 0.002


def test_the_wait_for_a_slow_update_is_measured_apart():
    """The update waits for a save, which takes 0.3 s after all of the step is computed."""
    model, computed = toy_model(), threading.Event()

    def slow(source):
        assert computed.wait(60)
        time.sleep(0.3)

    with toy_engine(PARTITION, 1, model=model) as engine:
        engine.save(slow).may_publish()
        results = []
        for micro_batches in BATCHES[:2]:
            results.append(engine.forward_backward(micro_batches))
            engine.step(1e-2)
        results[0].reports()
        computed.set()
        [optimizer_wait_s] = results[1].by_device(lambda slot: slot.idle_s.optimizer, 1)
        assert optimizer_wait_s > max(0.25, *results[1].by_device(lambda slot: slot.idle_s.input, 1))


def test_the_wait_for_the_stage_before_is_measured_apart():
    """Stages of 2, 3 and no blocks of 10 ms: in the second pass the last device waits 30 ms for the middle one."""
    with toy_engine(PARTITION, 3, model=slow_model(0.01)) as engine:
        results = [engine.evaluate(BATCHES[0][:1]) for _ in range(2)]
        first_s, _, last_s = results[1].by_device(lambda slot: slot.idle_s.input, 3)
        _, middle_busy_s, last_busy_s = results[1].by_device(lambda slot: slot.busy_s, 3)
    assert last_s > 0.02
    assert last_busy_s < middle_busy_s
    assert first_s < last_s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_up_once_a_stage_and_gradients_come_down_once_and_nothing_is_allocated_after_two_steps(dtype):
    with toy_engine(PARTITION, 1, dtype=dtype) as engine:
        train(engine, BATCHES[:2])
        [device] = engine.devices
        allocations = device.num_allocations
        train(engine, BATCHES[2:])
        assert device.num_allocations == allocations
    by_layer = [sum(bundle.numel for bundle in engine.store.layer_bundles(layer)) for layer in range(7)]
    # Weights once per forward or fused stage and once per backward stage.
    weights = (2 * sum(by_layer) - by_layer[6]) * dtype.itemsize * len(BATCHES)
    gradients = sum(by_layer) * dtype.itemsize * len(BATCHES)
    activations = 16 * 2**10 * len(BATCHES) * 8  # no more than this: 4 micro-batches, a few boundaries each
    assert weights < device.uploaded_bytes < weights + activations
    assert gradients < device.downloaded_bytes < gradients + activations


def test_frozen_weights_never_travel_down():
    downloaded = []
    for frozen in (True, False):
        model = toy_model()
        for layer in model.layers[1:-1]:
            layer.requires_grad_(not frozen)
        store = toy_store(model)
        blocks = sum(bundle.numel for bundle in store.bundles if not bundle.trainable) * 4 * len(BATCHES)
        with toy_engine(PARTITION, 1, model=model, store=store) as engine:
            train(engine, BATCHES)
            downloaded.append(engine.devices[0].downloaded_bytes + blocks)
    assert downloaded[0] == downloaded[1]
