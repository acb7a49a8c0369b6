"""Kept activations of every family through the engine: the bits of full recomputation, for any choice of parts."""

import random
from dataclasses import replace

import pytest
import torch

from tests.support.toy import assert_same_state, toy_engine, toy_store, train
from torchround.engine.store.bundles import ASYNC
from torchround.layer import KEEPABLE, with_dropout_seeds
from torchround.models import FAMILIES, LoraShape, add_adapters
from torchround.pipeline.partition import Partition

CASES = [("llama3", "debug"), ("qwen3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")]
BLOCKS = 4
LAYERS = BLOCKS + 2
PARTITIONS = (Partition((1, 2, 2), 1, (1, 2, 2)), Partition((3,), 3, (2, 1)), Partition((1,) * 5, 1, (1,) * 5))
DEVICES = (1, 2, 3, 8)
# Adapters on attention alone: experts have none.
ADAPTERS = LoraShape(4, 8.0, 0.25, ("q_proj", "v_proj", "o_proj"))


def choices():
    """Return what the blocks keep: all, each part alone, and mixtures."""
    drawn = random.Random(0)
    mixed = [tuple(tuple(n for n in KEEPABLE if drawn.random() < 0.5) for _ in range(BLOCKS)) for _ in range(2)]
    each = tuple((name,) for name in KEEPABLE)
    return [(KEEPABLE,) * BLOCKS, each[:4], each[:0:-1], *mixed]


def trained(case, tools, partition, num_devices, kept=(), dtype=torch.float32, adapters=False, **settings):
    """Train two steps of two micro-batches. Returns losses and state."""
    name, flavor = case
    config = FAMILIES[name].config_from_flavor(flavor, vocab_size=50, num_layers=BLOCKS)
    model = FAMILIES[name].build(config)
    if adapters:
        add_adapters(model, FAMILIES[name].hf_names(config), ADAPTERS)
    batches = [
        with_dropout_seeds(
            [
                replace(tools.micro_batch(documents, 50, seed=10 * step + index), max_documents=2)
                for index, documents in enumerate([[[12, 20], [32]], [[7, 25]]])
            ],
            0,
            step,
        )
        for step in range(2)
    ]
    policy = {"policy": settings.pop("policy")} if "policy" in settings else {}
    store = toy_store(model, dtype, **policy)
    with toy_engine(model, store, partition, num_devices, kept=kept, **settings) as engine:
        losses = train(engine, batches)
        assert engine.pool.reserved_bytes == engine.pool.allocated_bytes, "a layer kept more than it declared"
    return losses, store.named_views()


SETTINGS = {
    "fp32": {},
    "async layerwise": {"policy": ASYNC, "layerwise_recompute": True},
    "adapters with dropout": {"adapters": True, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_choice_gives_the_bits_of_full_recomputation(case, setting, tools):
    options = SETTINGS[setting]
    expected = {}
    for index, kept in enumerate(choices()):
        partition = PARTITIONS[index % len(PARTITIONS)]
        num_devices = DEVICES[(index + len(setting)) % len(DEVICES)]
        if partition not in expected:
            expected[partition] = trained(case, tools, partition, 1, **options)
        losses, state = trained(case, tools, partition, num_devices, ((), *kept, ()), **options)
        assert losses == expected[partition][0], (partition, num_devices, kept)
        assert_same_state(state, expected[partition][1])
