"""The reference that accelerators are compared with equals the engine on the CPU too, in fp32 and in bf16."""

import pytest
import torch

from tests.support.device_toy import DeviceLoop
from tests.support.toy import (
    PARTITIONS,
    assert_same_state,
    fp32_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine.store.bundles import ASYNC

LR = 1e-2


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_devices", "rounds"), [(1, 1), (3, 1), (2, 2)])
def test_training_is_bitwise_that_of_the_loop_with_compute_on_a_device(num_devices, rounds, dtype, tied):
    model, batches = toy_model(tied), toy_batches(10, micro_batches=5)
    store = toy_store(model, dtype)
    weights = {name: view.clone() for name, view in store.weights().items()}
    loop = DeviceLoop(model, weights, tied, "cpu", dtype, rounds)
    with toy_engine(model, store, PARTITIONS["forward coarser"], num_devices, rounds=rounds) as engine:
        losses = train(engine, batches)
    assert losses == loop.train(batches)
    assert_same_state(fp32_state(store), loop.state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_devices", "rounds"), [(1, 1), (3, 1), (2, 2)])
def test_async_training_is_bitwise_that_of_the_loop_one_update_late(num_devices, rounds, dtype):
    """The update reads the newest halves and writes the others; the residual stays in place."""
    model, batches = toy_model(tied=True), toy_batches(6, micro_batches=5)
    store = toy_store(model, dtype, policy=ASYNC)
    weights = {name: view.clone() for name, view in store.weights().items()}
    loop = DeviceLoop(model, weights, True, "cpu", dtype, rounds)
    with toy_engine(model, store, PARTITIONS["forward coarser"], num_devices, rounds=rounds) as engine:
        losses = train(engine, batches)
    expected, late = [], None
    for micro_batches in batches:
        loss, gradients = loop.gradients(micro_batches)
        expected.append(loss)
        if late is not None:
            loop.update(late, LR)
        late = gradients
    loop.update(late, LR)
    assert losses == expected
    found = fp32_state(store)
    assert_same_state({name: found[name] for name in loop.state()}, loop.state())
