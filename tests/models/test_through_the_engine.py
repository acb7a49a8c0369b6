"""GPT-OSS and Llama through the engine: the bits of a plain loop, with ties, adapters and bounded updates.

`tests/support/engine_rows.py` has Qwen3's and Llama's layers in every mode of the engine.
"""

import pytest
import torch

from torchround.engine.store.bundles import BOUNDED, SYNC
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
def test_training_of_tied_models_is_bitwise_that_of_a_plain_loop(
    name, adapters, dtype, policy, stale, backward, train_as_a_loop
):
    """Each layer below a stale one starts its recomputation from its own input: with experts, adapters, dropout, ties."""
    config = FAMILIES[name].config_from_flavor("debug", vocab_size=50, num_layers=2, tied_embeddings=True)
    model = FAMILIES[name].build(config)
    if adapters:
        add_adapters(model, FAMILIES[name].hf_names(config), LoraShape(2, 4.0, 0.25, adapters))
    partition = Partition((1, 2), 1, backward)
    train_as_a_loop(model, partition, CUTS, steps=3, stale=stale, dtype=dtype, policy=policy)
