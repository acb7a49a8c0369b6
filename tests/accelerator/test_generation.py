"""Text from an engine on accelerators: the same as on virtual devices, and device memory given back at the end."""

import gc

import pytest
import torch

from tests.support.toy_texts import STOP, own_model, prompts, their_model, their_texts
from torchround.engine.device import AcceleratorDevice
from torchround.generation import Sampling, TextEngine, inference_store

MAX_TOKENS = 6


def engine_on(kind, family, workers, dtype=torch.float32, **options):
    count = min(workers, torch.accelerator.device_count())
    devices = [AcceleratorDevice(f"{kind}:{index % count}", index) for index in range(workers)]
    model, store = own_model(family, devices)
    if dtype != torch.float32:
        rounded = inference_store(model, dtype, devices)
        rounded.write_weights(store.weights())
        store = rounded
    return TextEngine(model, store, devices, **{"batch_size": 8, "tokens": 96} | options)


@pytest.mark.parametrize(("family", "workers"), [("llama3", 1), ("qwen3", 2), ("gpt_oss", 3)])
def test_texts_equal_those_of_transformers(kind, family, workers):
    expected = their_texts(their_model(family), prompts(12), MAX_TOKENS, STOP)
    with engine_on(kind, family, workers) as engine:
        assert engine.generate(prompts(12), max_tokens=MAX_TOKENS, stop_tokens=[STOP]) == expected


@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])
def test_a_cache_does_not_change_drawn_texts(kind, family):
    sampling = Sampling(0.9, top_p=0.9, seed=2)
    with engine_on(kind, family, 2) as engine:
        kept = engine.generate(prompts(6), max_tokens=MAX_TOKENS, sampling=sampling)
        engine.cache_bytes = 0
        assert engine.generate(prompts(6), max_tokens=MAX_TOKENS, sampling=sampling) == kept


def test_sixteen_bits_run_with_and_without_a_cache(kind):
    with engine_on(kind, "llama3", 2, torch.bfloat16) as engine:
        for cache_bytes in (None, 0):
            engine.cache_bytes = cache_bytes
            texts = engine.generate(prompts(6), max_tokens=MAX_TOKENS)
            assert [len(text) for text in texts] == [MAX_TOKENS] * 6


def test_keys_and_values_leave_the_device(kind):
    block = own_model("llama3", [AcceleratorDevice(f"{kind}:0", 0)])[0].layers[1]
    one_text = block.cache_bytes(1, max(map(len, prompts(6))) + MAX_TOKENS, element_bytes=4)
    with engine_on(kind, "llama3", 1) as engine:
        used = []
        for _ in range(3):
            engine.generate(prompts(6), max_tokens=MAX_TOKENS)
            gc.collect()
            used.append(torch.accelerator.memory_allocated())
    # A worker may still hold some small tensors of its last micro-batch, which come from no cache.
    assert abs(used[2] - used[1]) < one_text
