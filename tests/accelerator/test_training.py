"""Losses and weights on an accelerator equal a plain loop's on the same device bit for bit, however the run is cut.

The tests compute as `training.deterministic` does and switch TF32 off. The engine leaves both alone.
"""

from dataclasses import replace

import pytest
import torch

from tests.support.device_toy import DeviceLoop, device_engine
from tests.support.toy import PARTITIONS, assert_same_state, fp32_state, toy_batches, toy_model, toy_store, train
from torchround.engine.store.bundles import ASYNC
from torchround.layer import MicroBatch, longest_document, with_dropout_seeds
from torchround.models import FAMILIES
from torchround.models.common import packed_attention
from torchround.models.common.lora import LoraShape, add_adapters
from torchround.pipeline.partition import Partition

STEPS = 3
LR = 1e-2
# Workers, and the devices that they share. A machine with one card runs the cases of one device.
WORKERS = [(1, 1), (4, 1), (3, 2)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = [
    ("one stage", False, "float32"),
    ("one layer a stage", False, "float32"),
    ("one layer a stage", True, "bfloat16"),
    ("forward coarser", True, "float32"),
    ("forward coarser", False, "bfloat16"),
    ("backward coarser", False, "float32"),
]
MODELS = [("llama3", "debug"), ("qwen3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")]


@pytest.fixture(params=WORKERS, ids=lambda workers: "{} on {}".format(*workers))
def workers(request, kind):
    if request.param[1] > 1:
        request.getfixturevalue("two_devices")
    return request.param


def device_loop(model, store, tied, kind, dtype):
    weights = {name: view.float().clone() for name, view in store.weights().items()}
    return DeviceLoop(model, weights, tied, kind, dtype)


@pytest.mark.parametrize(("partition", "tied", "dtype"), CASES)
def test_sync_training_is_bitwise_that_of_a_plain_loop_on_the_device(kind, workers, partition, tied, dtype):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=4)
    store = toy_store(model, DTYPES[dtype], pinned=True)
    loop = device_loop(model, store, tied, kind, DTYPES[dtype])
    with device_engine(kind, model, store, PARTITIONS[partition], *workers) as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(fp32_state(store), loop.state())
    store.close()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_async_training_is_bitwise_a_plain_loop_that_applies_gradients_one_step_late(kind, workers, dtype, tied):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=4)
    store = toy_store(model, DTYPES[dtype], policy=ASYNC, pinned=True)
    loop = device_loop(model, store, tied, kind, DTYPES[dtype])
    with device_engine(kind, model, store, PARTITIONS["backward coarser"], *workers) as engine:
        losses = train(engine, batches, LR)
    expected, waiting = [], None
    for micro_batches in batches:
        loss, gradients = loop.gradients(micro_batches)  # at the weights before the last update
        expected.append(loss)
        if waiting is not None:
            loop.update(waiting, LR)
        waiting = gradients
    loop.update(waiting, LR)
    assert losses == expected
    found = fp32_state(store)
    assert_same_state({name: found[name] for name in loop.state()}, loop.state())
    store.close()


@pytest.mark.parametrize("options", [{"rounds": 2}, {"layerwise_recompute": True}], ids=str)
def test_rounds_and_layerwise_recompute_do_not_depend_on_the_number_of_workers(kind, options):
    states = []
    for workers in (1, 2, 4):
        model = toy_model(tied=True)
        store = toy_store(model, torch.bfloat16, pinned=True)
        with device_engine(kind, model, store, PARTITIONS["forward coarser"], workers, **options) as engine:
            train(engine, toy_batches(STEPS, micro_batches=5), LR)
        states.append(store.named_views())
    for state in states[1:]:
        assert_same_state(state, states[0])


def test_workers_that_take_turns_to_upload_give_the_same_bits(kind, workers):
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=4)
    store = toy_store(model, pinned=True)
    loop = device_loop(model, store, False, kind, torch.float32)
    turns = [range(workers[0])]
    partition = PARTITIONS["one layer a stage"]
    with device_engine(kind, model, store, partition, *workers, turns=turns) as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(fp32_state(store), loop.state())
    store.close()


def test_micro_batches_that_grow_and_shrink_give_the_same_bits(kind):
    """Staging buffers are outgrown and replaced while other streams still use the old ones."""
    model = toy_model()
    generator = torch.Generator().manual_seed(1)
    batches = [[tokens(size, length, generator) for size in (1, 4, 2)] for length in (4, 24, 8, 48, 16)]
    store = toy_store(model, pinned=True)
    loop = device_loop(model, store, False, kind, torch.float32)
    with device_engine(kind, model, store, PARTITIONS["forward coarser"], 2) as engine:
        losses = []
        for micro_batches in batches:
            losses += train(engine, [micro_batches], LR)
            assert engine.evaluate(micro_batches[:1]).loss() > 0
    assert losses == loop.train(batches, LR)
    assert_same_state(fp32_state(store), loop.state())


def test_an_evaluation_between_two_steps_has_the_loss_of_a_plain_loop(kind, workers):
    """Each evaluation runs beside the next step, which must not overwrite the weights that it reads."""
    model, batches = toy_model(tied=True), toy_batches(STEPS, micro_batches=4)
    [held_out] = toy_batches(1, micro_batches=3, seed=1)
    store = toy_store(model, torch.bfloat16, pinned=True)
    loop = device_loop(model, store, True, kind, torch.bfloat16)
    results = []
    with device_engine(kind, model, store, PARTITIONS["forward coarser"], *workers) as engine:
        for micro_batches in batches:
            results.append((engine.evaluate(held_out), engine.forward_backward(micro_batches)))
            engine.step(LR)
        losses = [(before.loss(), step.loss()) for before, step in results]
    assert losses == [(loop.evaluate(held_out), loop.step(micro_batches, LR)) for micro_batches in batches]
    assert_same_state(fp32_state(store), loop.state())


def tokens(size, length, generator):
    drawn = torch.randint(37, (size, length + 1), generator=generator)
    positions = torch.arange(length).expand(size, length).contiguous()
    return MicroBatch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), positions, torch.zeros_like(positions))


def packed(sizes, seed):
    """Make a micro-batch `[B, T]` of documents of the given sizes, one list for each sequence."""
    generator = torch.Generator().manual_seed(seed)
    length = sum(sizes[0])
    drawn = torch.randint(50, (len(sizes), length + 1), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in sizes])
    documents = torch.stack(
        [torch.cat([torch.full((size,), index) for index, size in enumerate(row)]) for row in sizes]
    )
    return MicroBatch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), positions, documents, max_documents=2)


@pytest.mark.parametrize(("tied", "dtype"), [(False, "bfloat16"), (True, "float32")])
@pytest.mark.parametrize(("family", "flavor"), MODELS, ids=map("-".join, MODELS))
def test_a_real_model_gives_the_bits_of_a_plain_loop_however_it_is_cut(kind, family, flavor, tied, dtype):
    """Each family takes the branches of an accelerator: attention by offsets, grouped products, fused kernels."""
    config = FAMILIES[family].config_from_flavor(flavor, vocab_size=50, num_layers=2, tied_embeddings=tied)
    batches = [[packed([[12, 20], [16, 16]], seed=step), packed([[32, 0]], seed=10 + step)] for step in range(2)]
    for workers, partition in ((1, Partition((), 4, ())), (3, Partition((1, 2), 1, (2, 1)))):
        model = FAMILIES[family].build(config)
        store = toy_store(model, DTYPES[dtype], pinned=True)
        loop = device_loop(model, store, tied, kind, DTYPES[dtype])
        with device_engine(kind, model, store, partition, workers) as engine:
            losses = train(engine, batches, 1e-3)
        assert losses == loop.train(batches, 1e-3)
        assert_same_state(fp32_state(store), loop.state())
        store.close()


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_many_short_documents_train_with_a_kernel_that_is_told_the_longest(kind, monkeypatch, family):
    """Flash attention starts blocks up to that length for each document, and its scratch grows with their number."""
    told, at_once = set(), set()
    forward, backward = packed_attention._forward_kernel, packed_attention._backward_kernel

    def seen_forward(*arguments):
        told.add(arguments[4])
        return forward(*arguments)

    def seen_backward(*arguments):
        told.add(arguments[7])
        at_once.add(len(arguments[6]) - 1)
        return backward(*arguments)

    monkeypatch.setattr(packed_attention, "_forward_kernel", seen_forward)
    monkeypatch.setattr(packed_attention, "_backward_kernel", seen_backward)
    batches = [
        [
            replace(part, max_documents=33, longest_document=longest_document(part.document_ids))
            for part in (packed(2 * [[4, 12] * 16 + [256]], seed=seed) for seed in (step, 10 + step))
        ]
        for step in range(2)
    ]
    config = FAMILIES[family].config_from_flavor("debug", vocab_size=50, num_layers=2)
    model = FAMILIES[family].build(config)
    store = toy_store(model, torch.bfloat16, pinned=True)
    loop = device_loop(model, store, config.tied_embeddings, kind, torch.bfloat16)
    with device_engine(kind, model, store, Partition((1, 2), 1, (2, 1)), 2) as engine:
        losses = train(engine, batches, 1e-3)
    assert told == {256}, "sequences have 512 tokens"
    assert at_once == {2, 8}, "1024 tokens have 8 blocks, and 66 documents"
    assert losses == loop.train(batches, 1e-3)
    assert_same_state(fp32_state(store), loop.state())
    store.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("family", "flavor"), MODELS, ids=map("-".join, MODELS))
def test_adapters_with_dropout_get_the_bits_of_a_plain_loop_however_it_is_cut(kind, family, flavor, dtype):
    """Frozen products take other branches than trained ones, and masks must not depend on the cut."""
    config = FAMILIES[family].config_from_flavor(flavor, vocab_size=50, num_layers=2)
    targets = ("q_proj", "v_proj", "down_proj")
    batches = [
        with_dropout_seeds([packed([[12, 20], [16, 16]], seed=step), packed([[32, 0]], seed=10 + step)], 0, step)
        for step in range(3)
    ]
    for workers, partition in ((1, Partition((), 4, ())), (3, Partition((1, 2), 1, (2, 1)))):
        model = FAMILIES[family].build(config)
        add_adapters(model, FAMILIES[family].hf_names(config), LoraShape(8, 16.0, 0.25, targets))
        store = toy_store(model, DTYPES[dtype], pinned=True)
        before = {name: view.clone() for name, view in fp32_state(store).items()}
        loop = device_loop(model, store, config.tied_embeddings, kind, DTYPES[dtype])
        with device_engine(kind, model, store, partition, workers) as engine:
            losses = train(engine, batches, 1e-2)
        assert losses == loop.train(batches, 1e-2)
        after, trained = fp32_state(store), loop.state()
        assert any("lora" in name for name in trained) and all("lora" in name for name in trained)
        assert_same_state(after, before | trained)
        assert any(not torch.equal(after[name], before[name]) for name in trained)
        store.close()


def test_the_callers_settings_and_streams_are_left_alone(kind):
    module = torch.get_device_module(kind)
    torch.backends.cuda.matmul.allow_tf32 = True
    stream, before = torch.accelerator.current_stream(), module.get_rng_state()
    model = toy_model()
    store = toy_store(model, pinned=True)
    with device_engine(kind, model, store, PARTITIONS["one stage"], 2) as engine:
        train(engine, toy_batches(2, micro_batches=2), LR)
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.accelerator.current_stream() == stream and torch.accelerator.current_device_index() == 0
    assert torch.equal(module.get_rng_state(), before)
