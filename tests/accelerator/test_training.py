"""Losses and weights on an accelerator equal a plain loop's on the same device bit for bit, however the run is cut.

The tests compute as `training.deterministic` does and switch TF32 off. The engine leaves both alone.
"""

from dataclasses import replace

import pytest
import torch

from tests.engine.test_packed_weights import ROWS as PACKED_ROWS
from tests.support.device_toy import device_engine, workers_of
from tests.support.engine_rows import BUGS, ROWS, assert_same
from tests.support.reference import Reference
from tests.support.small_decoders import decoder
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_model, toy_store, train
from torchround.layer import MicroBatch, longest_document, with_dropout_seeds
from torchround.planning.partition import Partition

LR = 1e-2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODELS = [("llama3", "debug"), ("qwen3", "debug"), ("qwen3", "debug_moe"), ("gpt_oss", "debug")]


# Stacks of experts are orthogonalised in one batched product there, which adds in another order than the reference.
ROWS_HERE = [
    pytest.param(row, id=name)
    for name, row in (ROWS | BUGS | PACKED_ROWS).items()
    if row.compiled == "no" and row.machines == 1 and not (row.experts and row.optimizer.startswith("muon"))
]


@pytest.mark.parametrize("row", ROWS_HERE)
def test_a_row_has_the_bits_of_the_reference_on_the_device(kind, row):
    num_devices = min(torch.accelerator.device_count(), 1 + row.devices % 2)
    found = row.run_all(pinned=True, wrap=workers_of(kind, num_devices))
    assert_same(found, row.reference(kind))


def test_micro_batches_that_grow_and_shrink_give_the_same_bits(kind):
    """Staging buffers are outgrown and replaced while other streams still use the old ones."""
    model = toy_model()
    generator = torch.Generator().manual_seed(1)
    batches = [[tokens(size, length, generator) for size in (1, 4, 2)] for length in (4, 24, 8, 48, 16)]
    store = toy_store(model, pinned=True)
    loop = Reference.of(model, store, device=kind)
    with device_engine(kind, model, store, PARTITIONS["forward coarser"], 2) as engine:
        losses = []
        for micro_batches in batches:
            losses += train(engine, [micro_batches], LR)
            assert engine.evaluate(micro_batches[:1]).loss() > 0
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())


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


@pytest.mark.parametrize(
    ("tied", "dtype", "adapted"),
    [(False, "bfloat16", False), (True, "float32", False), (False, "bfloat16", True), (False, "float32", True)],
)
@pytest.mark.parametrize(("family", "flavor"), MODELS, ids=map("-".join, MODELS))
def test_a_real_model_gives_the_bits_of_a_plain_loop_however_it_is_cut(kind, family, flavor, tied, dtype, adapted):
    """Each family takes the branches of an accelerator: attention by offsets, grouped products, the loss in large chunks.

    With adapters, frozen products take other branches than trained ones, and masks of dropout must not depend on the cut.
    """
    batches = [
        with_dropout_seeds([packed([[12, 20], [16, 16]], seed=step), packed([[32, 0]], seed=10 + step)], 0, step)
        for step in range(2)
    ]
    for workers, partition in ((1, Partition((), 4, ())), (3, Partition((1, 2), 1, (2, 1)))):
        targets = ("q_proj", "v_proj", "down_proj") if adapted else ()
        model = decoder(family, flavor, targets, vocab_size=50, num_layers=2, tied_embeddings=tied)
        store = toy_store(model, DTYPES[dtype], pinned=True)
        loop = Reference.of(model, store, device=kind)
        assert loop.weights and all("lora" in name for name in loop.weights) is adapted
        with device_engine(kind, model, store, partition, workers) as engine:
            losses = train(engine, batches, LR)
        assert losses == loop.train(batches, LR)
        assert_same_state(store.named_views(), loop.state())
        store.close()


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_many_short_documents_give_the_bits_of_a_plain_loop(kind, family):
    """Flash attention starts blocks up to the longest one's length for each, and its scratch grows with their number."""
    batches = [
        [
            replace(part, max_documents=33, longest_document=longest_document(part.document_ids))
            for part in (packed(2 * [[4, 12] * 16 + [256]], seed=seed) for seed in (step, 10 + step))
        ]
        for step in range(2)
    ]
    model = decoder(family, "debug", vocab_size=50, num_layers=2)
    store = toy_store(model, torch.bfloat16, pinned=True)
    loop = Reference.of(model, store, device=kind)
    with device_engine(kind, model, store, Partition((1, 2), 1, (2, 1)), 2) as engine:
        losses = train(engine, batches, 1e-3)
    assert losses == loop.train(batches, 1e-3)
    assert_same_state(store.named_views(), loop.state())
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
