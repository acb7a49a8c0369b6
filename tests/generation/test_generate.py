"""Continuations of models, also in the middle of training: those of `transformers`, on any devices and cuts."""

import logging
import re

import pytest
import torch

from tests.models.conftest import borrowed_models
from tests.support import toy_texts
from tests.support.borrowed_toys import toy_model
from tests.support.small_decoders import packed_decoder, write_base
from tests.support.toy import toy_batches, toy_store
from tests.support.toy_texts import STOP, own_model, prompts, text_engine, their_model, their_texts
from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.errors import EngineUsageError
from torchround.generation import Sampling, TextEngine, generate, inference_store
from torchround.generation.inference import cut_evenly
from torchround.models import FAMILIES
from torchround.models.common.feed_forward import MoEShape
from torchround.planning.partition import Partition
from torchround.planning.update_modes import ASYNC_PREDICT

__all__ = ["borrowed_models"]
OWN = list(toy_texts.OWN)
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def expected():
    return {family: their_texts(their_model(family), prompts(7), MAX_TOKENS, STOP) for family in OWN}


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize(("num_devices", "cache_bytes"), [(1, None), (3, 0)], ids=["cache", "whole text"])
def test_prompts_continue_as_in_transformers_on_any_devices_and_memory(expected, family, num_devices, cache_bytes):
    assert len({tuple(text) for text in expected[family]}) > 5, "a test of one text would say little"
    with text_engine(family, num_devices, batch_size=7) as engine:
        engine.cache_bytes = cache_bytes
        found = engine.generate(prompts(7), max_tokens=MAX_TOKENS, stop_tokens=[STOP])
    assert found == expected[family]


def test_drawn_texts_do_not_depend_on_devices_groups_or_order():
    texts, sampling = [*prompts(5), [5, 6], [5, 6]], Sampling(0.8, top_p=0.9, top_k=30, seed=4)
    found = []
    for num_devices, batch_size in ((1, 1), (3, 4)):
        with text_engine("llama3", num_devices, batch_size=batch_size) as engine:
            found.append(engine.generate(texts, max_tokens=4, sampling=sampling))
            backwards = engine.generate(texts[:5][::-1], max_tokens=4, sampling=sampling)
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
        with pytest.raises(ValueError, match="prompt 1 has no tokens"):
            engine.generate([[1], []], max_tokens=1)


def test_continuations_upload_only_the_experts_of_their_tokens():
    texts, uploaded = [], []
    # With little memory all layers come up for each token. With much they stay, and experts are added to what is there.
    for by_need, device_bytes in ((False, 2_400_000), ("auto", 2_400_000), (True, None)):
        model = packed_decoder("nf4", ("qwen3", "debug_moe"), moe=MoEShape(16, 1, 128))
        device = CpuDevice(0)
        store = inference_store(model, torch.float32, [device])
        store.initialize(model, 0)
        write_base(store)
        # One sequence in each of the two groups.
        with TextEngine(
            *(model, store, [device]), batch_size=2, tokens=16, device_bytes=device_bytes, experts_by_need=by_need
        ) as engine:
            texts.append(engine.generate([[1, 2], [3, 4]], max_tokens=8))
            uploaded.append(device.uploaded_bytes)
    assert texts[0] == texts[1] == texts[2]
    assert uploaded[2] < uploaded[1] < 0.5 * uploaded[0]


def test_too_little_memory_for_keys_and_values_is_said_once(caplog, expected):
    with text_engine("llama3", batch_size=4) as engine, caplog.at_level(logging.WARNING):
        engine.cache_bytes = 5000
        assert engine.generate(prompts(7), max_tokens=MAX_TOKENS, stop_tokens=[STOP]) == expected["llama3"]
    [record] = caplog.records
    assert "keys and values of one sequence" in record.getMessage()


def test_little_memory_leaves_fewer_sequences_under_way(expected):
    with text_engine("llama3", num_devices=2, batch_size=16) as engine:
        engine.cache_bytes = 3 * 2 * 4 * 2 * 8 * (64 + MAX_TOKENS) * 2  # three sequences of two blocks, fp32
        counts, forward = [], engine.forward

        def counted(batches):
            counts.append(sum(len(batch.tokens) for batch in batches))
            return forward(batches)

        engine.forward = counted
        assert engine.generate(prompts(7), max_tokens=MAX_TOKENS, stop_tokens=[STOP]) == expected["llama3"]
    assert counts[0] == 3


def test_a_model_larger_than_a_device_runs_in_more_stages(expected):
    model, store = own_model("llama3")
    sizes = [sum(p.numel() for p in layer.parameters()) * 4 for layer in model.layers]
    devices = [CpuDevice(0, 10**9), CpuDevice(1, 10**9)]
    with TextEngine(model, store, devices, batch_size=4, tokens=64) as roomy:
        assert len(roomy.partition.forward) + 1 == 4
    devices = [CpuDevice(0), CpuDevice(1)]
    with pytest.raises(EngineUsageError) as refused:
        TextEngine(model, store, devices, batch_size=4, tokens=64, device_bytes=sum(sizes))
    # The least that is enough: stages of one layer, whose weights come up in each pass.
    device_bytes = int(float(re.search(r"need ([0-9.]+) MiB", str(refused.value))[1]) * 2**20) + 10_000
    devices = [CpuDevice(0, device_bytes), CpuDevice(1, device_bytes)]
    with TextEngine(model, store, devices, batch_size=4, tokens=64, device_bytes=device_bytes) as engine:
        assert engine.partition.forward == (1,) * 5
        assert engine.generate(prompts(7), max_tokens=MAX_TOKENS, stop_tokens=[STOP]) == expected["llama3"]


@pytest.mark.parametrize(
    ("sizes", "count", "largest"),
    [([1] * 6, 3, 2), ([9, 1, 1, 1, 9], 3, 9), ([5, 1, 1], 3, 5), ([1, 2, 3, 4, 5], 2, 9), ([0, 0, 3], 2, 3)],
)
def test_the_largest_run_of_an_even_cut_is_as_small_as_can_be(sizes, count, largest):
    lengths = cut_evenly(sizes, count)
    assert len(lengths) == count and min(lengths) > 0 and sum(lengths) == len(sizes)
    starts = [sum(lengths[:index]) for index in range(count)]
    assert max(sum(sizes[start : start + n]) for start, n in zip(starts, lengths, strict=True)) == largest


def test_weights_that_fit_go_up_once():
    with text_engine("llama3", num_devices=2) as engine:
        devices = engine.devices
        uploaded = []
        for max_tokens in (1, 1, 5):
            before = sum(device.uploaded_bytes for device in devices)
            engine.generate([[1, 2, 3]], max_tokens=max_tokens)
            uploaded.append(sum(device.uploaded_bytes for device in devices) - before)
        weight_bytes = sum(bundle.device_weights[0].nbytes for bundle in engine.store.bundles)
    assert uploaded[0] > weight_bytes
    assert max(uploaded[1:]) < weight_bytes / 2


VOCAB = 61
KINDS = ["qwen2", "gemma2", "qwen3_moe", "gpt_neox", "qwen3_next", "olmo_hybrid"]


@pytest.fixture(scope="module")
def made():
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
SETTINGS = {"gemma2": {"sliding_window": 9}}
SETTINGS |= {kind: {"moe_intermediate_size": 16} for kind in ("qwen3_moe", "qwen3_next")}


def texts(count):
    return [[token % VOCAB for token in text] for text in prompts(count)]


@pytest.mark.parametrize(
    ("kind", "num_devices", "count", "max_tokens"),
    [
        ("gemma2", 2, 5, 5),
        *(
            pytest.param(kind, devices, 50, MAX_TOKENS, marks=pytest.mark.nightly)
            for kind in KINDS
            for devices in (1, 3)
        ),
    ],
)
def test_texts_equal_those_of_transformers_with_a_warning_that_each_token_reads_all(
    made, kind, num_devices, count, max_tokens, caplog
):
    theirs, engine = made(kind, num_devices, tokens=32 if count < 10 else 64)
    with engine:
        found = engine.generate(texts(count), max_tokens=max_tokens)
    assert found == their_texts(theirs, texts(count), max_tokens)
    assert any("cannot keep keys and values" in text for text in caplog.messages)


def test_a_prompt_that_is_too_long_for_the_table_of_positions_is_refused(made, monkeypatch):
    _, engine = made("gemma2", 1, tokens=32)
    monkeypatch.setattr(engine.model.layers[0].shell, "longest", (40, "a reason"))
    with engine:
        assert len(engine.generate([[5] * 30], max_tokens=2)[0]) == 2
        # The second is short enough, and its padding is not.
        for length, max_tokens in ((32, 9), (32, 2)):
            with pytest.raises(ValueError, match="this model takes sequences of 40 tokens"):
                engine.generate([[5] * length], max_tokens=max_tokens)


UNCUT = Partition((), 6, ()), 1


def run(partition, num_devices, with_samples):
    llama3 = FAMILIES["llama3"]
    model = llama3.build(llama3.config_from_flavor("debug", num_layers=4, vocab_size=90))
    store = toy_store(model, seed=3, mode=ASYNC_PREDICT)
    devices = [CpuDevice(index) for index in range(num_devices)]
    samples, losses = [], []
    with Engine(model, store, devices, partition, optimizer=AdamWTable()) as engine:
        for batches in toy_batches(3, 2):
            result = engine.forward_backward(batches)
            engine.step(lr=3e-2)
            if with_samples:
                with engine.true_device_weights():
                    samples += generate(engine, texts(3), max_tokens=4)
            losses.append(result.loss())
    return samples, losses


@pytest.fixture(scope="module")
def uncut():
    return run(*UNCUT, with_samples=True)


def test_samples_do_not_depend_on_the_partition_or_the_devices(uncut):
    assert run(Partition((1,) * 5, 1, (1,) * 5), 4, with_samples=True) == uncut
    assert uncut[0][:3] != uncut[0][3:6], "the weights of each step are read"


def test_samples_change_no_later_step(uncut):
    assert run(*UNCUT, with_samples=False)[1] == uncut[1]
