"""Modules of `transformers` in many threads at once: each device runs copies of its own, and gives the bits of one."""

import sys

import pytest

from tests.support.toy import assert_same_state
from tests.support.toy_decoders import VOCAB
from tests.support.transformers_loop import engine_of, make_pair, store_of, train
from torchround.pipeline.partition import Partition

BLOCKS, DEVICES, MICRO_BATCHES, REPEATS = 4, 8, 8, 2
# With one block a stage the devices always have stages of several micro-batches under way at the same time.
ONE_BLOCK_A_STAGE = Partition((1,) * (BLOCKS + 1), 1, (1,) * (BLOCKS + 1))
ONE_STAGE = Partition((), BLOCKS + 2, ())


@pytest.fixture(autouse=True)
def _threads_take_turns_often():
    """Let threads change within a call of a body, which is shorter than Python's usual turn."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])
def test_eight_devices_give_the_bits_of_one_each_time(model_type, tools):
    pair = make_pair(tools, model_type, num_hidden_layers=BLOCKS, layer_types=None)
    # Other documents in each micro-batch: arguments of one must not reach another.
    steps = [
        [
            tools.micro_batch([[1 + index, 11 - index]], VOCAB, seed=MICRO_BATCHES * step + index)
            for index in range(MICRO_BATCHES)
        ]
        for step in range(2)
    ]

    def trained(partition, num_devices):
        store = store_of(model := pair.build(), tools.stored_parameters(pair.ours))
        with engine_of(model, store, partition, num_devices) as engine:
            losses = train(engine, steps)
        return losses, store.named_views()

    losses, views = trained(ONE_STAGE, 1)
    for _ in range(REPEATS):
        again, found = trained(ONE_BLOCK_A_STAGE, DEVICES)
        assert again == losses
        assert_same_state(found, views)
