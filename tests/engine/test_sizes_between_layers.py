"""Buffers for values between layers: sizes that nothing tells are measured in the first pass of a shape, then reserved."""

import pytest
import torch

from tests.support.any_layers import any_batches, any_model, first, outputs
from tests.support.reference import Reference
from tests.support.toy import toy_engine
from torchround.engine.errors import PipelineError
from torchround.planning.partition import Partition

PARTITION = Partition((2, 2), 2, (3, 1))


def test_no_pass_after_the_first_of_a_shape_takes_memory_in_its_middle():
    with toy_engine(PARTITION, 2, model=any_model()) as engine:

        def taken_after(rows, steps):
            for step in range(steps):
                engine.forward_backward(any_batches(3, step, rows))
                engine.step(1e-3)
            engine.drain()
            return engine.pool.allocated_bytes - engine.pool.reserved_bytes

        for rows in (300, 900):
            after_first = taken_after(rows, steps=1)
            assert after_first
            assert taken_after(rows, steps=6) == after_first


@pytest.mark.parametrize("num_devices", [1, 3])
def test_outputs_leave_nothing_taken_and_take_no_new_memory(num_devices):
    with toy_engine(PARTITION, num_devices, model=any_model(outputs)) as engine:
        engine.forward(any_batches(4)).outputs()
        engine.forward(any_batches(4)).outputs()
        allocations = engine.pool.num_allocations
        for seed in range(6):
            result = engine.forward(any_batches(4, seed))
            if seed % 2:  # a caller may also drop a result
                result.outputs()
        engine.drain()
        assert engine.pool.num_allocations == allocations


def test_values_of_one_shape_may_differ_in_size():
    def growing(layer, hidden, batch):
        return {**first(layer, hidden, batch), "more": torch.ones(int(batch.targets[0]) * 2000)}

    model = any_model()
    model.layers[0].compute = growing
    batches = any_batches(6)
    for number, batch in enumerate(batches):
        batch.targets[0] = (3, 1, 5, 0, 7, 2)[number]
    with toy_engine(Partition((1,) * 5, 1, (1,) * 5), 2, model=model) as engine:
        expected = [Reference.of(model, engine.store).outputs(batch)[-1].item() for batch in batches]
        for _ in range(3):
            assert engine.evaluate(batches).loss_sums() == expected
        taken = engine.pool.num_allocations
        for _ in range(3):
            engine.evaluate(batches[::-1]).loss()
        assert engine.pool.num_allocations == taken


@pytest.mark.parametrize("call", ["forward_backward", "evaluate"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda value: (value, value), "must return its loss.*tuple"),
        (lambda value: value.expand(3), r"must return its loss.*float32 \[3\]"),
        (lambda value: value.long(), "must return its loss.*int64"),
        (lambda value: None, "returned None"),
    ],
)
def test_a_loss_that_is_no_number_is_named(wrong, says, call):
    engine = toy_engine(PARTITION, 2, model=any_model(lambda layer, hidden, batch: wrong(hidden[0].sum())))
    with pytest.raises(PipelineError, match=rf"layer\.5.*{says}"):
        getattr(engine, call)(any_batches(2)).loss()
