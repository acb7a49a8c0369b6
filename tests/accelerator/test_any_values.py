"""Nested values between layers on an accelerator: training, outputs and constants are those of the CPU or of a plain loop."""

from tests.support.any_layers import any_batches, any_model, assert_same_value, outputs
from tests.support.device_toy import device_engine
from tests.support.reference import Reference
from tests.support.toy import assert_same_state, toy_store, train
from torchround.planning.partition import Partition

PARTITION = Partition((2, 2), 2, (3, 1))
WORKERS = (3, 1)


def test_training_is_bitwise_that_of_a_plain_loop_on_the_device(kind):
    model, steps = any_model(), [any_batches(3)] * 3  # the first pass measures the sizes
    store = toy_store(model, pinned=True)
    loop = Reference.of(model, store, device=kind)
    with device_engine(kind, model, store, PARTITION, *WORKERS) as engine:
        assert train(engine, steps) == loop.train(steps)
    assert_same_state(store.named_views(), loop.state())
    store.close()


def test_a_frozen_model_gives_its_outputs(kind):
    model, batches = any_model(outputs, trained=False), any_batches(4)
    store = toy_store(model, pinned=True)
    expected = [Reference.of(model, store, device=kind).outputs(batch)[-1] for batch in batches]
    with device_engine(kind, model, store, PARTITION, *WORKERS) as engine:
        first = engine.forward(batches)
        found = engine.forward(batches).outputs()
        assert len(first.outputs()) == len(batches)
    for output, wanted in zip(found, expected, strict=True):
        assert output["logits"].device.type == "cpu"
        assert_same_value(output, wanted)
    store.close()
