"""Continuations by the engine: those of `transformers`, however the model, the prompts and the devices are cut."""

import logging
import re

import pytest

from tests.support import toy_texts
from tests.support.toy_texts import STOP, own_model, prompts, text_engine, their_model, their_texts
from torchround.engine.device import CpuDevice
from torchround.engine.errors import EngineUsageError
from torchround.generation import Sampling, TextEngine
from torchround.generation.inference import cut_evenly

FAMILIES = list(toy_texts.OWN)
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def expected():
    return {family: their_texts(their_model(family), prompts(10), MAX_TOKENS, STOP) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("num_devices", "cache_bytes"), [(1, None), (3, 0)], ids=["cache", "whole text"])
def test_prompts_continue_as_in_transformers_on_any_devices_and_memory(expected, family, num_devices, cache_bytes):
    assert len({tuple(text) for text in expected[family]}) > 8, "a test of one text would say little"
    with text_engine(family, num_devices, batch_size=7) as engine:
        engine.cache_bytes = cache_bytes
        found = engine.generate(prompts(10), max_tokens=MAX_TOKENS, stop_tokens=[STOP])
    assert found == expected[family]


def test_drawn_texts_do_not_depend_on_devices_groups_or_order():
    texts, sampling = [*prompts(5), [5, 6], [5, 6]], Sampling(0.8, top_p=0.9, top_k=30, seed=4)
    found = []
    for num_devices, batch_size in ((1, 1), (3, 4)):
        with text_engine("llama3", num_devices, batch_size=batch_size) as engine:
            found.append(engine.generate(texts, max_tokens=6, sampling=sampling))
            backwards = engine.generate(texts[:5][::-1], max_tokens=6, sampling=sampling)
            assert backwards[::-1] == found[-1][:5]
    assert found[0] == found[1]
    assert found[0][-1] != found[0][-2], "equal prompts draw different texts"


def test_a_text_ends_behind_its_stop_token_or_at_the_most_tokens():
    with text_engine("llama3") as engine:
        free = engine.generate([[1, 2, 3]], max_tokens=9)[0]
        assert len(free) == 9
        stop = free[4]
        assert engine.generate([[1, 2, 3]], max_tokens=9, stop_tokens=[stop])[0] == free[: free.index(stop) + 1]
        assert engine.generate([[1, 2, 3]], max_tokens=0) == [[]]
        assert engine.generate([], max_tokens=5) == []


def test_too_little_memory_for_keys_and_values_is_said_once(caplog, expected):
    with text_engine("llama3", batch_size=4) as engine, caplog.at_level(logging.WARNING):
        engine.cache_bytes = 5000
        assert engine.generate(prompts(10), max_tokens=MAX_TOKENS, stop_tokens=[STOP]) == expected["llama3"]
    [record] = caplog.records
    assert "keys and values of one sequence" in record.getMessage()


def test_little_memory_leaves_fewer_sequences_under_way(expected):
    with text_engine("llama3", num_devices=2, batch_size=16) as engine:
        engine.cache_bytes = 3 * 2 * 4 * 2 * 8 * (64 + MAX_TOKENS) * 2  # three sequences of two blocks, fp32
        counts = []
        forward = engine.engine.forward

        def counted(batches):
            counts.append(sum(len(batch.tokens) for batch in batches))
            return forward(batches)

        engine.engine.forward = counted
        assert engine.generate(prompts(10), max_tokens=MAX_TOKENS, stop_tokens=[STOP]) == expected["llama3"]
    assert counts[0] == 3


def test_a_model_larger_than_a_device_runs_in_more_stages(expected):
    model, store = own_model("llama3")
    sizes = [sum(p.numel() for p in layer.parameters()) * 4 for layer in model.layers]
    devices = [CpuDevice(0, 10**9), CpuDevice(1, 10**9)]
    with TextEngine(model, store, devices, batch_size=4, tokens=64) as roomy:
        assert len(roomy.engine.partition.forward) + 1 == 4
    devices = [CpuDevice(0), CpuDevice(1)]
    with pytest.raises(EngineUsageError) as refused:
        TextEngine(model, store, devices, batch_size=4, tokens=64, device_bytes=sum(sizes))
    # The least that is enough: stages of one layer, whose weights come up in each pass.
    device_bytes = int(float(re.search(r"need ([0-9.]+) MiB", str(refused.value))[1]) * 2**20) + 10_000
    devices = [CpuDevice(0, device_bytes), CpuDevice(1, device_bytes)]
    with TextEngine(model, store, devices, batch_size=4, tokens=64, device_bytes=device_bytes) as engine:
        assert engine.engine.partition.forward == (1,) * 5
        assert engine.generate(prompts(10), max_tokens=MAX_TOKENS, stop_tokens=[STOP]) == expected["llama3"]


@pytest.mark.parametrize(
    ("sizes", "count", "largest"),
    [([1] * 6, 3, 2), ([9, 1, 1, 1, 9], 3, 9), ([5, 1, 1], 3, 5), ([1, 2, 3, 4, 5], 2, 9), ([0, 0, 3], 2, 3)],
)
def test_the_largest_run_of_an_even_cut_is_as_small_as_can_be(sizes, count, largest):
    lengths = cut_evenly(sizes, count)
    assert len(lengths) == count
    assert min(lengths) > 0
    assert sum(lengths) == len(sizes)
    starts = [sum(lengths[:index]) for index in range(count)]
    assert max(sum(sizes[start : start + n]) for start, n in zip(starts, lengths, strict=True)) == largest


def test_an_empty_prompt_is_refused():
    with text_engine("llama3") as engine, pytest.raises(ValueError, match="prompt 1 has no tokens"):
        engine.generate([[1], []], max_tokens=1)


def test_weights_that_fit_go_up_once():
    with text_engine("llama3", num_devices=2) as engine:
        devices = engine.engine.devices
        uploaded = []
        for max_tokens in (1, 1, 5):
            before = sum(device.uploaded_bytes for device in devices)
            engine.generate([[1, 2, 3]], max_tokens=max_tokens)
            uploaded.append(sum(device.uploaded_bytes for device in devices) - before)
        weight_bytes = sum(bundle.device_weights[0].nbytes for bundle in engine.engine.store.bundles)
    assert uploaded[0] > weight_bytes
    assert max(uploaded[1:]) < weight_bytes / 2
