"""Modules of `transformers` in many threads at once: each device runs copies of its own, and gives the bits of one."""

import sys

import pytest

from tests.support.toy import assert_same_state, toy_engine, train
from tests.support.toy_decoders import VOCAB
from tests.support.transformers_loop import make_pair, store_of
from torchround.planning.partition import Partition

BLOCKS, DEVICES, MICRO_BATCHES = 3, 8, 8


@pytest.fixture(autouse=True)
def _threads_take_turns_often():
    """Let threads change within a call of a body, which is shorter than Python's usual turn."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def test_eight_devices_give_the_bits_of_one(tools):
    pair = make_pair(tools, "qwen3_moe", num_hidden_layers=BLOCKS, layer_types=None)
    # Other documents in each micro-batch: arguments of one must not reach another.
    steps = [[tools.micro_batch([[1 + i, 11 - i]], VOCAB, seed=i) for i in range(MICRO_BATCHES)]]
    found = []
    # With one block a stage the devices always have stages of several micro-batches under way at the same time.
    one_each = (1,) * (BLOCKS + 1)
    for partition, devices in ((Partition((), BLOCKS + 2, ()), 1), (Partition(one_each, 1, one_each), DEVICES)):
        store = store_of(model := pair.build(), tools.stored_parameters(pair.ours))
        with toy_engine(partition, devices, model=model, store=store) as engine:
            found.append((train(engine, steps), store.named_views()))
    assert found[0][0] == found[1][0]
    assert_same_state(found[1][1], found[0][1])
