"""GPT-OSS and Llama through the engine: the bits of a plain loop, with ties, adapters and bounded updates.

`tests/support/engine_rows.py` has Qwen3's and Llama's layers in every mode of the engine.
"""

from dataclasses import replace

import pytest
import torch

from tests.support.reference import Reference
from tests.support.toy import assert_same_state, toy_engine, toy_store, train
from torchround.engine.store.bundles import BOUNDED, SYNC
from torchround.layer import with_dropout_seeds
from torchround.models import FAMILIES, LoraShape, add_adapters
from torchround.pipeline.partition import Partition

ADAPTERS = ("q_proj", "v_proj")
CUTS = [[[12, 20], [32]], [[32]], [[7, 25]]]  # documents of micro-batches; the second has one alone


@pytest.mark.parametrize(
    ("name", "adapters", "dtype", "policy", "stale", "backward"),
    [
        ("gpt_oss", (), torch.float32, SYNC, 0, (1, 1, 1)),
        ("gpt_oss", ADAPTERS, torch.bfloat16, BOUNDED, 3, (2, 1)),
        ("llama3", (), torch.bfloat16, BOUNDED, 3, (2, 1)),
    ],
)
def test_training_of_tied_models_is_bitwise_that_of_a_plain_loop(name, adapters, dtype, policy, stale, backward, tools):
    """Each layer below a stale one starts its recomputation from its own input: with experts, adapters, dropout, ties."""
    config = FAMILIES[name].config_from_flavor("debug", vocab_size=50, num_layers=2, tied_embeddings=True)
    model = FAMILIES[name].build(config)
    if adapters:
        add_adapters(model, FAMILIES[name].hf_names(config), LoraShape(2, 4.0, 0.25, adapters))
    batches = []
    for step in range(3):
        parts = [tools.micro_batch(cut, 50, seed=10 * step + part) for part, cut in enumerate(CUTS)]
        batches.append(with_dropout_seeds([replace(part, max_documents=2) for part in parts], seed=7, step=step))
    store = toy_store(model, dtype, policy=policy)
    loop = Reference.of(model, store, **({"stale": stale} if stale else {}))
    partition = Partition((1, 2), 1, backward)
    with toy_engine(model, store, partition, num_devices=2, stale_layers=stale) as engine:
        losses = train(engine, batches)
    assert losses == loop.train(batches)
    assert_same_state(store.named_views(), loop.state())
