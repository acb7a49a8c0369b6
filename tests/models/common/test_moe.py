"""Mixture of experts: routing, products, and the balance penalty, against direct computation."""

import sys
import types
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.support.rounding import assert_close_in_sums
from tests.support.small_decoders import decoder
from torchround.models import FAMILIES, ModelConfigError
from torchround.models.common.experts import GatedExperts, combine, dispatch, make_routes, sort_pairs
from torchround.models.common.feed_forward import MoE, MoEShape
from torchround.models.kernels import grouped

D, EXPERTS, F_EXPERT = 6, 5, 4


def make_moe(num_chosen=2, normalised=True):
    shape = MoEShape(EXPERTS, num_chosen, F_EXPERT, normalised)
    moe = MoE(D, shape, GatedExperts)
    generator = torch.Generator().manual_seed(0)
    fill(moe, lambda shape: torch.randn(shape, generator=generator))
    return moe


def fill(module, numbers):
    for path, parameter in list(module.named_parameters()):
        owner, _, name = path.rpartition(".")
        setattr(
            module.get_submodule(owner), name, torch.nn.Parameter(numbers(parameter.shape), parameter.requires_grad)
        )


def token_by_token(moe, x):
    mixed = []
    for token in x.flatten(0, 1):
        probabilities = (moe.router.weight @ token).softmax(0)
        chosen = probabilities.topk(moe.shape.num_chosen).indices
        weights = probabilities[chosen]
        if moe.shape.normalised:
            weights = weights / weights.sum()
        outputs = [
            moe.experts.down[e] @ (F.silu(moe.experts.gate[e] @ token) * (moe.experts.up[e] @ token)) for e in chosen
        ]
        mixed.append(sum(w * output for w, output in zip(weights, outputs, strict=True)))
    return torch.stack(mixed).view_as(x)


@pytest.mark.parametrize("num_chosen, normalised", [(1, False), (2, True), (3, False), (EXPERTS, True)])
def test_output_and_gradients_equal_token_by_token_computation(num_chosen, normalised):
    moe, x = make_moe(num_chosen, normalised), torch.randn(2, 9, D, requires_grad=True)
    upstream = torch.randn(2, 9, D)
    inputs = [x, *moe.parameters()]
    found = torch.autograd.grad(moe(x), inputs, upstream)
    expected = torch.autograd.grad(token_by_token(moe, x), inputs, upstream)
    # Sums over the width, the experts' width, the experts and the tokens; the backward has each three times.
    terms = 2 * D + F_EXPERT + EXPERTS + 18
    assert_close_in_sums(moe(x), token_by_token(moe, x), terms)
    for one, other in zip(found, expected, strict=True):
        assert_close_in_sums(one, other, 4 * terms)


@pytest.fixture(params=["loop", "kernels"])
def products(request, monkeypatch):
    """Experts on an accelerator's way run the loop over experts, or stand-ins of the kernels."""

    def rows_loop(rows, weights, ends):
        parts = zip(pairwise([0, *ends.tolist()]), weights, strict=True)
        return torch.cat([rows[start:stop] @ weight for (start, stop), weight in parts])

    def gradient_loop(rows, grad, ends, total):
        for matrix, (start, stop) in zip(total, pairwise([0, *ends.tolist()]), strict=True):
            matrix += rows[start:stop].float().T @ grad[start:stop].float()

    monkeypatch.setattr(grouped, "uses_triton", lambda tensor: request.param == "kernels")
    kernels = types.ModuleType("grouped_triton")
    kernels.launch_rows, kernels.launch_gradient = rows_loop, gradient_loop
    monkeypatch.setitem(sys.modules, "torchround.models.kernels.grouped_triton", kernels)


@pytest.mark.parametrize("has_sums", [False, True], ids=["no sums", "sums"])
@pytest.mark.usefixtures("products", "fused")
def test_an_accelerators_way_gives_the_output_and_gradients_of_token_by_token_computation(has_sums):
    moe, x = make_moe(num_chosen=1), torch.randn(2, 9, D, requires_grad=True)
    upstream = torch.randn(2, 9, D)
    expected = torch.autograd.grad(token_by_token(moe, x), [x, *moe.parameters()], upstream)
    for parameter in moe.parameters():
        parameter.grad = torch.ones_like(parameter) if has_sums else None
    output = moe(x)
    output.backward(upstream)
    terms = 2 * D + F_EXPERT + EXPERTS + 18
    assert_close_in_sums(output, token_by_token(moe, x), terms)
    for parameter, gradient in zip([x, *moe.parameters()], expected, strict=True):
        before = 1.0 if has_sums and parameter is not x else 0.0
        scale = 1.0 + gradient.abs().max().item()
        if parameter is moe.router.weight:
            # The lone expert's weight is 1 whatever the router says: terms of this size add up to nothing.
            scale += ((upstream * output).abs().sum(dim=-1).max() * x.abs().max()).item()
        assert_close_in_sums(parameter.grad - before, gradient, 4 * terms, scale=scale)


def adapted_block(family, flavor):
    """A block with random adapters of a rank that 8 does not divide on all its experts' matrices, and an input."""
    targets = {"qwen3": ("gate_proj", "up_proj", "down_proj"), "gpt_oss": ("gate_up_proj", "down_proj")}
    block = decoder(family, flavor, targets[family], (3, 6.0, 0.25), num_layers=1, vocab_size=50).layers[1]
    moe = block.mlp
    generator = torch.Generator().manual_seed(0)
    fill(moe, lambda shape: 0.1 * torch.randn(shape, generator=generator))
    moe.experts.seed = 7
    return moe, torch.randn(2, 9, block.hidden_size, generator=generator)


@pytest.mark.parametrize(("family", "flavor"), [("qwen3", "debug_moe"), ("gpt_oss", "debug")])
@pytest.mark.usefixtures("products")
def test_adapters_on_an_accelerators_way_get_the_gradients_of_the_plain_one(family, flavor, request):
    moe, x = adapted_block(family, flavor)
    found = []
    for fused in (False, True):
        if fused:
            request.getfixturevalue("fused")
        for parameter in moe.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        leaf = x.clone().requires_grad_()
        output = moe(leaf)
        output.sum().backward()
        trained = [parameter.grad for parameter in moe.parameters() if parameter.requires_grad]
        found.append([output.detach(), leaf.grad, *trained])
    assert len(found[0]) > 5
    for one, other in zip(*found, strict=True):
        assert_close_in_sums(one, other, 4 * (x.shape[-1] + moe.shape.ffn_size + 18))


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(1, 6))
def test_routes_sort_pairs_by_expert_and_combine_undoes_dispatch(data, num_tokens, num_experts):
    choices = data.draw(st.integers(1, num_experts))
    orders = [data.draw(st.permutations(range(num_experts)))[:choices] for _ in range(num_tokens)]
    chosen = torch.tensor(orders)
    routes = make_routes(chosen, num_experts)
    assert torch.equal(routes.experts, chosen.flatten()[routes.pairs])
    assert (routes.experts.diff() >= 0).all()
    assert torch.equal(routes.ends, torch.bincount(chosen.flatten(), minlength=num_experts).cumsum(0).int())
    tokens = torch.randn(num_tokens, 3, dtype=torch.float64, requires_grad=True)
    rows = dispatch(tokens, routes)
    assert torch.equal(rows, tokens[routes.pairs // choices])
    numbers = torch.arange(num_tokens * choices, dtype=torch.float64).view(num_tokens, choices)
    assert torch.equal(sort_pairs(numbers, routes), routes.pairs.double())
    # At most 6 equal terms added in fp32: 6 roundings of 2^-24.
    torch.testing.assert_close(combine(rows, routes), choices * tokens, rtol=1e-6, atol=0)
    (combine(rows, routes) * tokens.detach()).sum().backward()
    torch.testing.assert_close(tokens.grad, choices * tokens.detach(), rtol=1e-6, atol=0)


def balanced_model(tools):
    family = FAMILIES["qwen3"]
    config = family.config_from_flavor("debug_moe", num_layers=2)
    config = replace(config, moe=replace(config.moe, balance_coefficient=0.5))
    model = tools.materialise(family.build(config))
    with torch.no_grad():
        for layer in model.layers[1:-1]:
            layer.mlp.router.weight.mul_(50)  # fresh routers are nearly balanced
    return model, config


def test_loss_with_penalty_does_not_depend_on_how_the_batch_was_cut(tools):
    model, config = balanced_model(tools)
    batch = tools.micro_batch([[16], [10, 6], [16]], config.vocab_size)
    whole = tools.loss_sum(model, batch)
    parts = [
        tools.loss_sum(model, type(batch)(*(tensor[row : row + 1] for tensor in batch.tensors()))) for row in range(3)
    ]
    # 48 positive terms and their logits in another order: far below 168 roundings of 2^-24.
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=0)


def test_an_evaluation_leaves_the_penalty_out(tools):
    model, config = balanced_model(tools)
    batch = tools.micro_batch([[16], [16]], config.vocab_size)
    with torch.no_grad():
        evaluated = tools.loss_sum(model, batch)
        logits = tools.all_logits(model, batch).flatten(0, 1)
    expected = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
    # 32 positive terms and their logits in another order: far below 168 roundings of 2^-24.
    torch.testing.assert_close(evaluated, expected, rtol=1e-5, atol=0)
    penalty = (tools.loss_sum(model, batch) - expected) / batch.num_labels()
    assert penalty > 0.5 * config.moe.num_chosen  # the coefficient times more than perfect balance


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_chosen": 9}, "num_chosen = 9, must be 1 to num_experts = 8"),
        ({"ffn_size": 0}, "ffn_size = 0"),
        ({"balance_coefficient": -1.0}, "balance_coefficient = -1.0"),
    ],
)
def test_impossible_expert_shapes_are_refused_with_their_values(fields, message):
    with pytest.raises(ModelConfigError, match=message):
        MoEShape(**{"num_experts": 8, "num_chosen": 2, "ffn_size": 4, **fields})
