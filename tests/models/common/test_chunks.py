"""Feed-forwards in chunks of tokens: gradients, dropout, kept parts, memory, and no compiler for blocks of several."""

from dataclasses import replace

import pytest
import torch

from tests.support.kept_blocks import (
    CASES,
    CHOICES,
    DENSE,
    an_input,
    as_the_engine_binds,
    as_tuple,
    differing_choices,
    kept_by,
    model_with_adapters,
    with_dropout,
)
from tests.support.rounding import BF16, FP32, assert_close_in_sums
from torchround.accelerators import CudaKind, as_if_on
from torchround.engine.board import Board
from torchround.engine.compiled import LayerCompiler
from torchround.engine.worker.slots import Packing
from torchround.keeping import replaying, without_output
from torchround.layer import KEEPABLE, MicroBatch
from torchround.models import FAMILIES
from torchround.models.borrowed.counted_work import Meter
from torchround.models.common import chunks
from torchround.planning.cards import find_device
from torchround.planning.rates import CardRates, costs_from_work

CHUNK, TOKENS = 24, 64  # the last chunk has 16 tokens
UNITS = {torch.float32: FP32, torch.bfloat16: BF16}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", CHUNK)


def block_of(case, dtype, tools):
    block = as_the_engine_binds(model_with_adapters(*case).layers[1], dtype)
    batch = with_dropout(tools.micro_batch([[12, 20], [32]], 50))
    return block, an_input(block, batch, dtype), batch


def passed(mlp, x, upstream):
    trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad.zero_()
    leaf = x.clone().requires_grad_()
    output = mlp(leaf)
    output.backward(upstream)
    return [output.detach(), leaf.grad, *(parameter.grad.clone() for parameter in trained)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES[:6], ids=str)
def test_gradients_of_chunks_are_those_of_the_whole_but_for_rounding(case, dtype, tools, request):
    block, x, _ = block_of(case, dtype, tools)
    upstream = torch.randn(x.shape).to(dtype)
    whole = passed(block.mlp, x, upstream)
    request.getfixturevalue("small_chunks")
    # Sums over the width, the experts' or the inner width, and the tokens, in forward and backward.
    terms = 4 * (sum(max(block.mlp.parameters(), key=torch.numel).shape[-2:]) + TOKENS)
    for found, expected in zip(passed(block.mlp, x, upstream), whole, strict=True):
        # A router has gradients that nearly cancel.
        assert_close_in_sums(found, expected, terms, unit=UNITS[dtype], scale=1 + expected.abs().max().item())


@pytest.mark.usefixtures("small_chunks")
def test_weights_get_the_bits_of_a_micro_batch_for_each_chunk(tools):
    block, x, _ = block_of(("llama3", "debug", DENSE), torch.bfloat16, tools)
    flat, upstream = x.flatten(0, 1), torch.randn(TOKENS, x.shape[-1]).bfloat16()
    whole = passed(block.mlp, flat[None], upstream[None])
    parts = [passed(block.mlp, *pair) for pair in zip(flat.split(CHUNK), upstream.split(CHUNK), strict=True)]
    for place, found in enumerate(whole):
        of_parts = [part[place] for part in parts]
        assert torch.equal(found.flatten(0, -2), torch.cat(of_parts) if place < 2 else sum(of_parts))


@pytest.mark.usefixtures("small_chunks")
def test_each_chunk_drops_other_inputs_and_the_backward_drops_the_same(tools):
    block, x, _ = block_of(("llama3", "debug", DENSE), torch.float32, tools)
    same = x[:1, :1].repeat(1, 2 * CHUNK, 1)
    for part in block.modules():
        if hasattr(part, "seed"):
            part.seed = 7
    first, second = block.mlp(same).flatten(0, 1).split(CHUNK)
    assert not torch.allclose(first, second)
    # The gradient along the input is the output's change: masks drawn anew in the backward would give another one.
    leaf = same.double().requires_grad_()
    block.mlp.double()
    output = block.mlp(leaf)
    output.sum().backward()
    step = 1e-6 * torch.randn_like(leaf)
    with torch.no_grad():
        change = (block.mlp(leaf + step) - block.mlp(leaf - step)).sum() / 2
    assert change.item() == pytest.approx((leaf.grad * step).sum().item(), rel=1e-3)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("case", [CASES[4], CASES[5], CASES[7]], ids=str)
def test_kept_parts_of_chunks_give_the_same_bits_and_take_the_counted_bytes(case, tools):
    block, hidden, batch = block_of(case, torch.bfloat16, tools)
    assert differing_choices(block, hidden, batch, CHOICES) == []
    with replaying(KEEPABLE, kept_by(block, hidden, batch, KEEPABLE)), without_output():
        block(hidden.clone().requires_grad_(), batch)  # it takes all that was kept
    for part in block.work(2, TOKENS // 2, 2, "cpu").keepable:
        assert part.nbytes == Packing.of(tuple(kept_by(block, hidden, batch, [part.name]))).nbytes, part.name


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_a_recomputation_for_its_graph_alone_computes_as_much_as_one_of_the_whole(case, tools, request):
    block, hidden, batch = block_of(case, torch.float32, tools)
    flops = []
    for _ in range(2):
        leaf = hidden.clone().requires_grad_()
        with Meter() as meter:
            with without_output():
                outputs = as_tuple(block(leaf, batch))
            torch.autograd.backward(outputs, tuple(map(torch.ones_like, outputs)))
        flops.append(meter.flops)
        request.getfixturevalue("small_chunks")
    assert flops[0] == flops[1]


MODELS = [("qwen3", "1.7B"), ("llama3", "3.1-8B"), ("gpt_oss", "20B"), ("qwen3", "32B"), ("qwen3", "235B-A22B")]


@pytest.mark.parametrize(("family", "flavor"), MODELS)
@pytest.mark.parametrize("tokens", [8192, 16400, pytest.param(40960, marks=pytest.mark.nightly)])
def test_a_block_of_a_published_model_takes_no_more_of_a_card_than_it_counts(family, flavor, tokens):
    """By the tensors that its kernels would read and write; a kernel's own scratch comes on top."""
    config = replace(FAMILIES[family].config_from_flavor(flavor), num_layers=1)
    block = FAMILIES[family].build(config).layers[1].bfloat16()
    for parameter in block.parameters():
        parameter.grad_dtype, parameter.grad = torch.float32, torch.empty_like(parameter, dtype=torch.float32)
    integers = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    hidden = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, device="meta").requires_grad_()
    weights = [*block.parameters()]
    given = {one.untyped_storage()._cdata for one in (integers, hidden, *weights, *(one.grad for one in weights))}
    with as_if_on(CudaKind((8, 9))), _Alive(given) as meter:
        output = block(hidden, MicroBatch(integers, integers, integers, integers, max_documents=2))
        output.backward(torch.empty_like(output))
    work = block.work(1, tokens, 2, "cuda")
    counted = work.activation_bytes + work.workspace_bytes
    assert 0.3 * counted < meter.peak_bytes < counted


class _Alive(Meter):
    """Counts tensors that were made inside, and not views of those that were there before."""

    def __init__(self, given):
        super().__init__()
        self._given = given

    def _count(self, result):
        leaves = (one for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, torch.Tensor))
        super()._count([one for one in leaves if one.untyped_storage()._cdata not in self._given])


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_chunks_take_the_predicted_time_of_the_whole(case, tools, request):
    block, _, _ = block_of(case, torch.float32, tools)
    seconds, card = [], CardRates.of(find_device("rtx4090"), "bfloat16")
    for _ in range(2):
        work = block.work(1, TOKENS, 4, "cuda")
        costs = costs_from_work(["block"], [work], [(0, 0)], card)
        seconds.append((costs.layers[0].forward_s, costs.layers[0].backward_s))
        request.getfixturevalue("small_chunks")
    assert seconds[0] == seconds[1]


@pytest.mark.usefixtures("small_chunks")
def test_a_block_of_several_chunks_is_not_compiled(tools):
    model = model_with_adapters("llama3", "debug", ())
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    block, batch = as_the_engine_binds(model.layers[1], torch.float32), tools.micro_batch([[12], [12]], 50)
    call = LayerCompiler(model, backend).compiled(1, block, Board())
    long = tools.micro_batch([[13], [13]], 50)
    assert torch.equal(
        call(an_input(block, long, torch.float32), long), block(an_input(block, long, torch.float32), long)
    )
    assert not compiled
    call(an_input(block, batch, torch.float32), batch)
    assert compiled
