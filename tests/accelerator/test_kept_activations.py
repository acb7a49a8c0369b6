"""Blocks that are recomputed from kept activations on an accelerator, which has kernels and functions of its own."""

from dataclasses import replace

import pytest
import torch

from tests.support.kept_blocks import (
    CASES,
    CHOICES,
    IDS,
    an_input,
    as_the_engine_binds,
    differing_choices,
    kept_by,
    kernels,
    model_with_adapters,
)
from torchround.engine.worker.slots import Packing
from torchround.keeping import replaying
from torchround.layer import KEEPABLE, MicroBatch, most_documents

TOKENS = 32


def batch_on(kind, lengths):
    positions = torch.stack([torch.cat([torch.arange(one) for one in row]) for row in lengths])
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    integers = (torch.zeros_like(positions), torch.zeros_like(positions), positions, ids)
    batch = MicroBatch(*(part.to(kind) for part in integers), max_documents=most_documents(ids))
    return replace(batch, dropout_seed=7)


@pytest.mark.parametrize("lengths", [[[12, 20], [32]], [[32], [32]]], ids=["packed", "single"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_any_choice_of_parts_gives_the_bits_of_a_full_recomputation(kind, case, lengths):
    block = as_the_engine_binds(model_with_adapters(*case).layers[1], torch.bfloat16, kind)
    batch = batch_on(kind, lengths)
    hidden = an_input(block, batch, torch.bfloat16)
    choices = CHOICES if lengths[0] != [32] else [KEEPABLE, ("attention",)]
    assert differing_choices(block, hidden, batch, choices) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_parts_keep_the_counted_bytes_and_their_kernels_do_not_run(kind, case, dtype):
    block = as_the_engine_binds(model_with_adapters(*case).layers[1], dtype, kind)
    batch = batch_on(kind, [[12, 20], [32]])
    hidden, work = an_input(block, batch, dtype), block.work(2, TOKENS, dtype.itemsize, kind)
    for part in work.keepable:
        kept = kept_by(block, hidden, batch, [part.name])
        assert part.nbytes == Packing.of(tuple(kept)).nbytes, part.name
    tensors = kept_by(block, hidden, batch, KEEPABLE)
    with kernels() as seen, replaying(KEEPABLE, tensors):
        block(hidden, batch)
    assert len(seen) == hasattr(block.mlp, "router"), seen


@pytest.mark.parametrize("case", CASES[:4], ids=IDS[:4])
def test_tokens_that_kernels_pad_are_counted_from_above(kind, case):
    for dtype in (torch.bfloat16, torch.float32):
        block = as_the_engine_binds(model_with_adapters(*case).layers[1], dtype, kind)
        batch = batch_on(kind, [[7, 13], [20]])
        hidden = an_input(block, batch, dtype)
        for part in block.work(2, 20, dtype.itemsize, kind).keepable:
            kept = kept_by(block, hidden, batch, [part.name])
            assert 0 < Packing.of(tuple(kept)).nbytes <= part.nbytes, part.name
        assert differing_choices(block, hidden, batch, [KEEPABLE]) == []
