"""Continuations of models that `transformers` defines: the ones of `transformers`, with a cache and without."""

import pytest
import torch

from tests.support.borrowed_toys import toy_model
from tests.support.toy_texts import prompts, their_texts
from torchround.engine.device import CpuDevice
from torchround.generation import TextEngine, inference_store
from torchround.generation.decoding_cache import can_decode
from torchround.models import FAMILIES

VOCAB = 61
MAX_TOKENS = 8
KINDS = ["qwen2", "gemma2", "qwen3_moe", "gpt_neox", "qwen3_next", "olmo_hybrid"]


@pytest.fixture(scope="module")
def made():
    """Return what makes an engine for a kind of toy, each model built once."""
    models = {}

    def make(kind, num_devices, **options):
        if kind not in models:
            theirs = toy_model(kind, **SETTINGS.get(kind, {}))
            family = FAMILIES["transformers"]
            config = family.config_from_hf(theirs.config.to_dict())
            models[kind] = theirs, family.build(config), family.module_names(config)
        theirs, model, names = models[kind]
        devices = [CpuDevice(index) for index in range(num_devices)]
        store = inference_store(model, torch.float32, devices)
        weights = theirs.state_dict()
        store.write_weights({name: weights[names[name]] for name in store.weights()})
        return theirs, TextEngine(model, store, devices, **{"batch_size": 8, "tokens": 64} | options)

    return make


# A window shorter than the texts; and experts whose rows have the 16 bytes that PyTorch's grouped product wants.
SETTINGS = {"gemma2": {"sliding_window": 9}} | {
    kind: {"moe_intermediate_size": 16} for kind in ("qwen3_moe", "qwen3_next")
}


def texts(count):
    return [[token % VOCAB for token in text] for text in prompts(count)]


@pytest.mark.parametrize("kind", [pytest.param("qwen2", marks=pytest.mark.nightly), "gemma2"])
def test_texts_equal_those_of_transformers_with_a_cache_and_without(made, kind):
    theirs, engine = made(kind, 2)
    expected = their_texts(theirs, texts(6), 5)
    with engine:
        assert can_decode(engine.engine.model.layers)
        assert engine.generate(texts(6), max_tokens=5) == expected
        engine.cache_bytes = 0
        assert engine.generate(texts(6), max_tokens=5) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_texts_equal_those_of_transformers(made, kind, num_devices):
    theirs, engine = made(kind, num_devices)
    assert can_decode(engine.engine.model.layers)
    with engine:
        found = engine.generate(texts(50), max_tokens=MAX_TOKENS)
    assert found == their_texts(theirs, texts(50), MAX_TOKENS)


def test_a_prompt_that_is_too_long_for_the_table_of_positions_is_refused(made):
    _, engine = made("olmo2", 1)  # a model of this test alone
    engine.engine.model.layers[0].shell.longest = (40, "a reason")
    with engine:
        assert len(engine.generate([[5] * 32], max_tokens=8)[0]) == 8
        # The second is short enough, and its padding is not.
        for length, max_tokens in ((32, 9), (33, 2)):
            with pytest.raises(ValueError, match="this model takes sequences of 40 tokens"):
                engine.generate([[5] * length], max_tokens=max_tokens)
