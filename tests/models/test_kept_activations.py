"""Blocks that are recomputed from kept activations: the same bits, and the bytes and FLOPs that `work` counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.kept_blocks import (
    CASES,
    CHOICES,
    DENSE,
    PAIRS,
    STACKED,
    an_input,
    as_the_engine_binds,
    differing_choices,
    kept_by,
    kernels,
    model_with_adapters,
    with_dropout,
)
from torchround.engine.worker.slots import Packing
from torchround.keeping import replaying
from torchround.layer import KEEPABLE

LLAMA3, MIXTURE, GPT_OSS = ("llama3", "debug", DENSE), ("qwen3", "debug_moe", DENSE), ("gpt_oss", "debug", STACKED)
PLAIN_QWEN3, PLAIN_GPT_OSS = ("qwen3", "debug", ()), ("gpt_oss", "debug", ())
DORA, DORA_BESIDE_BIASES = CASES[-2:]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOKENS = 32
NIGHT = pytest.mark.nightly


def blocks(case, dtype):
    """Return both blocks of a model; of GPT-OSS's the first one has a window."""
    return [as_the_engine_binds(layer, dtype) for layer in model_with_adapters(*case).layers[1:3]]


@pytest.fixture
def batch(tools):
    return with_dropout(tools.micro_batch([[12, 20], [32]], 50))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((LLAMA3, F32), (MIXTURE, BF16), (GPT_OSS, F16), (PLAIN_QWEN3, BF16), (PLAIN_GPT_OSS, F32)),
        *((DORA, BF16), (DORA_BESIDE_BIASES, F16)),
        *(pytest.param(case, dtype, marks=NIGHT) for case in CASES for dtype in (F32, BF16, F16)),
    ],
)
def test_any_choice_of_parts_gives_the_bits_of_a_full_recomputation(case, dtype, batch, request):
    block, _ = blocks(case, dtype)
    choices = CHOICES + PAIRS if request.node.get_closest_marker("nightly") else CHOICES
    assert differing_choices(block, an_input(block, batch, dtype), batch, choices) == []


@pytest.mark.parametrize("case", [LLAMA3, MIXTURE, GPT_OSS])
def test_without_packed_documents_and_with_a_load_to_add_up_the_bits_are_the_same_too(case, tools):
    single = with_dropout(tools.micro_batch([[TOKENS]] * 2, 50))
    first, second = blocks(case, BF16)
    hidden = an_input(first, single, BF16)
    hidden = (hidden, torch.rand(2, 2, second.load_experts)) if second.load_experts else hidden
    assert differing_choices(second, hidden, single, [KEEPABLE, ("attention",)]) == []


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(LLAMA3, F32), (MIXTURE, BF16), (GPT_OSS, F32), (DORA, BF16), pytest.param(PLAIN_GPT_OSS, BF16, marks=NIGHT)],
)
def test_each_part_keeps_the_bytes_and_saves_the_flops_that_its_work_counts(case, dtype, batch):
    made = blocks(case, dtype)
    for block in made if case[0] == "gpt_oss" else made[1:]:  # the blocks of the others are alike
        hidden, work = an_input(block, batch, dtype), block.work(2, TOKENS, dtype.itemsize, "cpu")
        assert tuple(part.name for part in work.keepable) == KEEPABLE
        assert sum(part.activation_bytes for part in work.keepable) <= work.activation_bytes
        whole = counted_flops(block, hidden, batch, (), [])
        # torch does not count its CPU attention kernel: two products of all pairs.
        attention = 4 * 2 * TOKENS**2 * block.attention.num_heads * block.attention.head_dim
        for part in work.keepable:
            kept = kept_by(block, hidden, batch, [part.name])
            assert part.nbytes == Packing.of(tuple(kept)).nbytes, part.name
            saved = whole - counted_flops(block, hidden, batch, (part.name,), kept)
            assert part.flops == (attention if part.name == "attention" else saved), part.name
            # So much less memory do the activations of the recomputation take beside the kept ones.
            held = saved_addresses(block, hidden, batch, part.name, kept)
            same = sum(one.nbytes for one in kept if one.untyped_storage().data_ptr() in held)
            assert part.activation_bytes == same, part.name
        tensors = kept_by(block, hidden, batch, KEEPABLE)
        with kernels() as seen, replaying(KEEPABLE, tensors):
            block(hidden, batch)
        assert len(seen) == hasattr(block.mlp, "router"), "with all parts kept no kernel runs but the router's"


def counted_flops(block, hidden, batch, names, tensors):
    with FlopCounterMode(display=False) as counter, replaying(names, tensors):
        block(hidden, batch)
    return counter.get_total_flops()


def saved_addresses(block, hidden, batch, name, tensors):
    held = set()

    def note(tensor):
        held.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), replaying([name], tensors):
        block(hidden.detach().requires_grad_(), batch)
    return held
