"""A family of our own beside the same model as `transformers` defines it, from the same files."""

import pytest
import torch

from tests.support.toy_decoders import VOCAB, toy_config, toy_decoder
from tests.support.transformers_loop import engine_of, packed_steps, pair_of, store_of, train
from torchround.pipeline.partition import Partition

# The embedding of a padding token gets no gradient in transformers; our own families train it like any other token.
CASES = {
    "llama3": ("llama", {"pad_token_id": None}),
    "qwen3": ("qwen3", {"pad_token_id": None, "use_sliding_window": False}),
    "qwen3 with experts": ("qwen3_moe", {"pad_token_id": None}),
    "gpt_oss": ("gpt_oss", {"pad_token_id": None}),
}


@pytest.fixture(scope="module", params=CASES)
def both(request, tools):
    """Return the two pairs of one reference: in our own layers, and borrowed."""
    model_type, overrides = CASES[request.param]
    theirs = toy_decoder(toy_config(model_type, **overrides))
    return [pair_of(tools, theirs, name) for name in (request.param.split()[0], "transformers")]


def test_the_loss_of_packed_documents_is_the_same(both, tools):
    batch = tools.micro_batch([[13, 1, 10], [24]], VOCAB)
    own, borrowed = (tools.loss_sum(pair.ours, batch) for pair in both)
    torch.testing.assert_close(own, borrowed, rtol=1e-5, atol=0)


def test_training_gives_the_same_losses(both, tools):
    steps, losses = packed_steps(tools, 5, sequences=1), []
    for pair in both:
        store = store_of(model := pair.build(), tools.stored_parameters(pair.ours))
        with engine_of(model, store, Partition((1, 2), 3, (2, 1)), num_devices=2) as engine:
            losses.append(train(engine, steps))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
