"""Every family through the engine: the bits of a plain loop, with ties, adapters, bounded updates and kept activations."""

import random
from dataclasses import replace

import pytest
import torch

from tests.support.bounded_loop import BoundedLoop
from tests.support.toy import PlainLoop, assert_same_state, toy_engine, toy_store, train
from torchround.engine.store.bundles import ASYNC, BOUNDED
from torchround.layer import KEEPABLE, with_dropout_seeds
from torchround.models import FAMILIES, LoraShape, add_adapters
from torchround.pipeline.partition import Partition

LLAMA3, QWEN3, MIXTURE, GPT_OSS = CASES = [
    *(("llama3", "debug"), ("qwen3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug"))
]
PARTITION = Partition((1, 2), 1, (1, 1, 1))  # embedding; two blocks; head, and back one by one
CUTS = [[[12, 20], [32]], [[32]], [[7, 25]]]  # documents of micro-batches; the second has one alone


def build(case, adapters=(), **fields):
    name, flavor = case
    config = FAMILIES[name].config_from_flavor(flavor, vocab_size=50, **{"num_layers": 2, **fields})
    model = FAMILIES[name].build(config)
    if adapters:
        add_adapters(model, FAMILIES[name].hf_names(config), LoraShape(2, 4.0, 0.25, adapters))
    return model


def batches_of(tools, steps, parts):
    return [
        with_dropout_seeds(
            [
                replace(tools.micro_batch(CUTS[part], 50, seed=10 * step + part), max_documents=2)
                for part in range(parts)
            ],
            seed=7,
            step=step,
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize(
    ("case", "tied"), [(LLAMA3, True), (MIXTURE, False), (GPT_OSS, True)], ids=["llama3 tied", "moe", "gpt_oss tied"]
)
def test_training_is_bitwise_that_of_a_plain_loop(case, tied, tools):
    model, batches = build(case, tied_embeddings=tied), batches_of(tools, 2, 3)
    store = toy_store(model)
    loop = PlainLoop(model, {name: view.clone() for name, view in store.weights().items()}, tied)
    with toy_engine(model, store, PARTITION, num_devices=2) as engine:
        losses = train(engine, batches)
    assert losses == loop.train(batches)
    assert_same_state(store.named_views(), loop.state())


BOUNDED_ROWS = [
    (LLAMA3, True, (), torch.bfloat16, 3),
    (QWEN3, False, ("q_proj", "v_proj"), torch.bfloat16, 1),
    (MIXTURE, False, (), torch.float32, 1),
    (GPT_OSS, True, ("q_proj", "v_proj"), torch.bfloat16, 3),
]


@pytest.mark.parametrize(("case", "tied", "adapters", "dtype", "stale_layers"), BOUNDED_ROWS)
def test_bounded_training_is_bitwise_that_of_its_plain_loop(case, tied, adapters, dtype, stale_layers, tools):
    """Each layer below a stale one starts its recomputation from its own input: with experts, adapters, dropout, ties."""
    model, batches = build(case, adapters, tied_embeddings=tied), batches_of(tools, 3, 2)
    store = toy_store(model, dtype, policy=BOUNDED)
    loop = BoundedLoop(model, {name: view.clone() for name, view in store.weights().items()}, stale_layers, dtype)
    partition = Partition((1, 2), 1, (2, 1))
    with toy_engine(model, store, partition, num_devices=2, stale_layers=stale_layers) as engine:
        losses = train(engine, batches)
    assert losses == loop.train(batches)
    frozen = {p.name for bundle in store.bundles if not bundle.trainable for p in bundle.parameters}
    views = {name: view for name, view in store.named_views().items() if name.split("/")[1] not in frozen}
    assert_same_state(views, loop.state())


BLOCKS = 4
PARTITIONS = (Partition((1, 2, 2), 1, (1, 2, 2)), Partition((3,), 3, (2, 1)), Partition((1,) * 5, 1, (1,) * 5))
FP32 = ({}, {})
LAYERWISE = ({"policy": ASYNC}, {"layerwise_recompute": True})
# Adapters on attention alone: experts have none.
ADAPTED = ({"dtype": torch.bfloat16, "adapters": ("q_proj", "v_proj", "o_proj")}, {})


def choices():
    """Return what the blocks keep: all, each part alone, and mixtures."""
    drawn = random.Random(0)
    mixed = [tuple(tuple(n for n in KEEPABLE if drawn.random() < 0.5) for _ in range(BLOCKS)) for _ in range(2)]
    each = tuple((name,) for name in KEEPABLE)
    return [(KEEPABLE,) * BLOCKS, each[:4], each[:0:-1], *mixed]


def trained(case, tools, partition, num_devices, kept, options, settings):
    options = dict(options)
    model = build(case, options.pop("adapters", ()), num_layers=BLOCKS)
    store = toy_store(model, options.pop("dtype", torch.float32), **options)
    with toy_engine(model, store, partition, num_devices, kept=kept, **settings) as engine:
        losses = train(engine, batches_of(tools, 2, 2))
        assert engine.pool.reserved_bytes == engine.pool.allocated_bytes, "a layer kept more than it declared"
    return losses, store.named_views()


@pytest.mark.parametrize(
    ("case", "kept", "partition", "devices", "setting"),
    [
        (LLAMA3, 0, 1, 2, LAYERWISE),
        (MIXTURE, 3, 0, 3, FP32),
        (QWEN3, 1, 2, 2, ADAPTED),
        (GPT_OSS, 2, 0, 8, LAYERWISE),
        (GPT_OSS, 4, 1, 3, ADAPTED),
        *(
            pytest.param(case, kept, kept % 3, (1, 2, 3, 8)[kept % 4], setting, marks=pytest.mark.nightly)
            for case in CASES
            for setting in (FP32, LAYERWISE, ADAPTED)
            for kept in range(5)
        ),
    ],
)
def test_kept_activations_give_the_bits_of_full_recomputation(case, kept, partition, devices, setting, tools):
    expected = trained(case, tools, PARTITIONS[partition], 1, (), *setting)
    found = trained(case, tools, PARTITIONS[partition], devices, ((), *choices()[kept], ()), *setting)
    assert found[0] == expected[0]
    assert_same_state(found[1], expected[1])
