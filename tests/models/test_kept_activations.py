"""Blocks that are recomputed from kept activations: the same bits, and the bytes and FLOPs that `work` counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.kept_blocks import (
    CASES,
    CHOICES,
    IDS,
    PAIRS,
    an_input,
    as_the_engine_binds,
    differing_choices,
    forward_and_backward,
    kept_by,
    kernels,
    model_with_adapters,
    with_dropout,
)
from torchround.engine.worker.slots import Packing
from torchround.keeping import replaying
from torchround.layer import KEEPABLE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = 32


def blocks(case, dtype):
    """Return both blocks of a model; of GPT-OSS's the first one has a window."""
    return [as_the_engine_binds(layer, dtype) for layer in model_with_adapters(*case).layers[1:3]]


@pytest.fixture
def batch(tools):
    return with_dropout(tools.micro_batch([[12, 20], [32]], 50))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_any_choice_of_parts_gives_the_bits_of_a_full_recomputation(case, dtype, batch):
    block, _ = blocks(case, dtype)
    choices = CHOICES + PAIRS if dtype is torch.bfloat16 else CHOICES
    assert differing_choices(block, an_input(block, batch, dtype), batch, choices) == []


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_without_packed_documents_and_with_a_load_to_add_up_the_bits_are_the_same_too(case, tools):
    single = with_dropout(tools.micro_batch([[TOKENS]] * 2, 50))
    first, second = blocks(case, torch.bfloat16)
    hidden = an_input(first, single, torch.bfloat16)
    hidden = (hidden, torch.rand(2, 2, second.load_experts)) if second.load_experts else hidden
    assert differing_choices(second, hidden, single, [KEEPABLE, ("attention",)]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_each_part_keeps_the_bytes_that_its_work_counts(case, dtype, batch):
    for block in blocks(case, dtype):
        hidden, work = an_input(block, batch, dtype), block.work(2, TOKENS, dtype.itemsize, "cpu")
        assert tuple(part.name for part in work.keepable) == KEEPABLE
        for part in work.keepable:
            kept = kept_by(block, hidden, batch, [part.name])
            assert part.nbytes == Packing.of(tuple(kept)).nbytes, part.name
        assert sum(part.activation_bytes for part in work.keepable) <= work.activation_bytes


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_each_part_saves_the_flops_that_its_work_counts(case, batch):
    block, _ = blocks(case, torch.float32)
    hidden, work = an_input(block, batch, torch.float32), block.work(2, TOKENS, 4, "cpu")
    whole = counted_flops(block, hidden, batch, ())
    for part in work.keepable:
        saved = whole - counted_flops(block, hidden, batch, (part.name,))
        # torch does not count its CPU attention kernel: two products of all pairs.
        heads = block.attention.num_heads * block.attention.head_dim
        assert part.flops == (4 * 2 * TOKENS**2 * heads if part.name == "attention" else saved), part.name


def counted_flops(block, hidden, batch, names):
    tensors = kept_by(block, hidden, batch, names)
    with FlopCounterMode(display=False) as counter, replaying(names, tensors):
        block(hidden, batch)
    return counter.get_total_flops()


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_with_all_parts_kept_no_kernel_runs_but_the_routers_product(case, batch):
    block, _ = blocks(case, torch.float32)
    hidden = an_input(block, batch, torch.float32)
    tensors = kept_by(block, hidden, batch, KEEPABLE)
    with kernels() as seen, replaying(KEEPABLE, tensors):
        block(hidden, batch)
    assert len(seen) == hasattr(block.mlp, "router")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_backward_reads_as_much_of_the_kept_memory_as_is_counted(case, dtype, batch):
    """So much less memory do the activations of the recomputation take beside the kept ones."""
    for block in blocks(case, dtype):
        hidden, work = an_input(block, batch, dtype), block.work(2, TOKENS, dtype.itemsize, "cpu")
        for part in work.keepable:
            tensors = kept_by(block, hidden, batch, [part.name])
            held = saved_addresses(block, hidden, batch, part.name, tensors)
            same = sum(one.nbytes for one in tensors if one.untyped_storage().data_ptr() in held)
            assert part.activation_bytes == same, part.name


def saved_addresses(block, hidden, batch, name, tensors):
    """Return the memory that autograd holds for the backward of a replay."""
    held = set()

    def note(tensor):
        held.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), replaying([name], tensors):
        block(hidden.detach().requires_grad_(), batch)
    return held


def test_a_planted_difference_in_a_kept_tensor_is_seen(batch):
    """The comparison of bits above can fail."""
    block, _ = blocks(CASES[0], torch.float32)
    hidden = an_input(block, batch, torch.float32)
    tensors = kept_by(block, hidden, batch, KEEPABLE)
    plain = forward_and_backward(block, hidden, batch)
    for tensor in tensors:
        first = tensor.view(-1)[:1].clone()
        tensor.view(-1)[0] = first * (1 + 2**-10)
        found = forward_and_backward(block, hidden, batch, replaying(KEEPABLE, tensors))
        assert not all(map(torch.equal, found, plain))
        tensor.view(-1)[:1] = first
