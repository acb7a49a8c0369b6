"""The plain references of the fused operations, and their gradients, are those of float64."""

import pytest
import torch

from tests.support import gated_cases, norm_cases, sink_cases
from tests.support.interpreted import assert_rounded, random
from torchround.models.kernels.gated_products import add_expert_bias, clamped_product, fused_gated_product
from torchround.models.kernels.norms import normed_sum
from torchround.models.kernels.rotary import rotate_heads
from torchround.models.kernels.sink_scores import join_sinks, sinks_gradient

EPS, TERMS = norm_cases.EPS, gated_cases.TERMS


def gradients_of(function, inputs, upstream):
    """Return the result for leaves made of `inputs`, and their gradients, of fp32 where autograd allows it."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    for leaf in leaves:
        leaf.grad_dtype = torch.float32
    result = function(*leaves)
    torch.autograd.backward(result, [one.to(result[0].dtype) for one in upstream])
    return [one.detach() for one in result], [leaf.grad for leaf in leaves]


@pytest.mark.parametrize(("adds", "dtype"), [(False, torch.bfloat16), (True, torch.float32), (True, torch.bfloat16)])
def test_norms_and_sums(adds, dtype):
    tokens, width = 700, 24
    stream, update, upstream, upstream_total = random(4, 2, tokens // 2, width, dtype=dtype)
    inputs = [stream, *([update] if adds else []), random(width, dtype=dtype)]
    (total, normed), gradients = gradients_of(
        lambda *leaves: normed_sum(leaves[0], leaves[1] if adds else None, leaves[-1], EPS),
        inputs,
        (upstream_total, upstream),
    )
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    exact_total = wide[0] + wide[1] if adds else wide[0]
    # The norm is of the rounded sum.
    rounded = exact_total + (total.double() - exact_total).detach()
    exact = norm_cases.exact_norm(rounded, wide[-1])
    expected = torch.autograd.grad((exact_total, exact), wide, (upstream_total.double(), upstream.double()))
    assert_rounded(total, exact_total.detach(), 2)
    assert_rounded(normed, exact.detach(), width + 8)
    for grad, wanted in zip(gradients[:-1], expected, strict=False):
        # No row of normal numbers is so small that its scale is above 2.
        assert_rounded(grad.to(dtype), wanted, width + 8, 2 * 16.0 * (1 + width))
    assert_rounded(gradients[-1], expected[-1], tokens + width, 20.0 * tokens)


def test_a_frozen_norm_gets_no_gradient_and_a_sum_whose_norm_is_not_used_passes_its_own_on():
    x, weight = random(3, 8).requires_grad_(), random(8)
    normed_sum(x, None, weight, EPS)[1].sum().backward()
    assert weight.grad is None and x.grad is not None
    stream, update = (tensor.requires_grad_() for tensor in random(2, 3, 8).unbind())
    (normed_sum(stream, update, weight, EPS)[0] * 3).sum().backward()
    assert torch.equal(stream.grad, torch.full((3, 8), 3.0)) and torch.equal(update.grad, stream.grad)


@pytest.mark.parametrize("norms", [False, True], ids=["rotation", "norm and rotation"])
def test_rotations(norms):
    heads, upstream = random(2, 2, 5, 3, 6)
    inputs = [heads, *([random(6)] if norms else [])]
    turn = (torch.tensor([[0, 1, 2, 0, 1], [7, 1000, 100000, 3, 4]]), torch.linspace(1.0, 0.01, 3), 1.3)
    [rotated], gradients = gradients_of(
        lambda heads, *weight: [rotate_heads(heads, *turn, *((*weight, EPS) if norms else ()))], inputs, [upstream]
    )
    wide = gated_cases.wide(*inputs)
    exact = norm_cases.exact_rotation(norm_cases.exact_norm(*wide) if norms else wide[0], *turn)
    assert_rounded(rotated, exact.detach(), 24, 20.0)
    for one, other in zip(gradients, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        assert_rounded(one, other, 64, 200.0)


@pytest.mark.parametrize(
    ("weighs", "activation", "dtype"),
    [(False, "silu", torch.bfloat16), (True, "silu", torch.float32), (True, "gelu_tanh", torch.bfloat16)],
)
def test_gated_products(weighs, activation, dtype):
    gate, up, upstream = random(3, 9, 20, dtype=dtype)
    inputs, rest = [gate, up, *([random(9)] if weighs else [])], [] if weighs else [None]
    [result], gradients = gradients_of(
        lambda *leaves: [fused_gated_product(*leaves, *rest, activation)], inputs, [upstream]
    )
    wide = gated_cases.wide(*inputs)
    exact = gated_cases.exact_gated_product(*wide, *rest, activation)
    assert_rounded(result, exact.detach(), TERMS)
    for one, other in zip(gradients, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        assert_rounded(one.to(dtype), other, TERMS, 800.0)


def test_clamped_products_and_biases_of_experts():
    rows, width = 40, 12
    experts, ends = gated_cases.routed(rows, 4)
    upstream, limits = random(rows, width, seed=1), (gated_cases.LIMIT, gated_cases.ALPHA)
    for function, exact_function, inputs, terms in (
        (
            lambda x, bias, weights: [clamped_product(x, bias, experts, ends, weights, *limits)],
            lambda x, bias, weights: gated_cases.exact_clamped_product(x, bias, experts, weights),
            [2 * random(rows, 2 * width), random(4, 2 * width), random(rows)],
            (TERMS, None, TERMS + rows),
        ),
        (
            lambda x, bias, weights: [add_expert_bias(x, bias, experts, ends, weights)],
            lambda x, bias, weights: x + bias[experts] * weights[:, None],
            [random(rows, width), random(4, width), random(rows)],
            (4, 20.0, 64),
        ),
    ):
        [result], gradients = gradients_of(function, inputs, [upstream])
        wide = gated_cases.wide(*inputs)
        exact = exact_function(*wide)
        assert_rounded(result, exact.detach(), *terms[:2])
        for one, other in zip(gradients, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
            assert_rounded(one, other, terms[2], 20.0 * rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks(dtype):
    inputs = sink_cases.inputs_of(700, 3, 8, dtype)
    output, joined = join_sinks(*inputs)
    exact, exact_joined = sink_cases.exact_join(*(tensor.double() for tensor in inputs))
    assert_rounded(joined, exact_joined, 32, 20.0)
    assert_rounded(output, exact, 64, inputs[0].double().abs().max().item())
    grad = random(700, 3, 8, dtype=dtype, seed=1)
    gradient = sinks_gradient(grad, output, joined, inputs[2])
    expected = sink_cases.exact_gradient(grad.double(), output.double(), joined.double(), inputs[2].double())
    assert_rounded(gradient, expected, 64 + 8 + 700, 20.0 * 8 * 700)
