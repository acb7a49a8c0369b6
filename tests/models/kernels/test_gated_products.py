"""The plain references of the fused gated products."""

import pytest
import torch

from tests.support import gated_cases
from tests.support.interpreted import assert_rounded, random
from torchround.models.kernels.gated_products import add_expert_bias, clamped_product, fused_gated_product

TERMS = gated_cases.TERMS


def gradients_of(function, inputs, upstream):
    """Return the result for leaves made of `inputs`, and their gradients, of fp32 where autograd allows it."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    for leaf in leaves:
        leaf.grad_dtype = torch.float32
    result = function(*leaves)
    result.backward(upstream.to(result.dtype))
    return result.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", gated_cases.DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("weighs", [False, True], ids=["plain", "weighted"])
def test_the_reference_of_gated_products_is_that_of_float64(weighs, activation, dtype):
    gate, up, upstream = random(3, 9, 20, dtype=dtype)
    inputs = [gate, up, *([random(9)] if weighs else [])]
    rest = [] if weighs else [None]
    result, gradients = gradients_of(lambda *leaves: fused_gated_product(*leaves, *rest, activation), inputs, upstream)
    wide = gated_cases.wide(*inputs)
    exact = gated_cases.exact_gated_product(*wide, *rest, activation)
    expected = torch.autograd.grad(exact, wide, upstream.double())
    assert_rounded(result, exact.detach(), TERMS)
    for one, other in zip(gradients, expected, strict=True):
        assert_rounded(one.to(dtype), other, TERMS, 800.0)


def test_the_references_of_gpt_oss_are_those_of_float64():
    rows, width = 40, 12
    experts, ends = gated_cases.routed(rows, 4)
    inputs = [2 * random(rows, 2 * width), random(4, 2 * width), random(rows)]
    upstream = random(rows, width, seed=1)
    limits = (gated_cases.LIMIT, gated_cases.ALPHA)
    result, gradients = gradients_of(
        lambda x, bias, weights: clamped_product(x, bias, experts, ends, weights, *limits), inputs, upstream
    )
    wide = gated_cases.wide(*inputs)
    exact = gated_cases.exact_clamped_product(wide[0], wide[1], experts, wide[2])
    expected = torch.autograd.grad(exact, wide, upstream.double())
    assert_rounded(result, exact.detach(), TERMS)
    for one, other in zip(gradients, expected, strict=True):
        assert_rounded(one, other, TERMS + rows, 20.0 * rows)


def test_the_reference_of_experts_biases_is_that_of_float64():
    experts, ends = gated_cases.routed(40, 4)
    inputs, upstream = [random(40, 12), random(4, 12), random(40)], random(40, 12, seed=1)
    result, gradients = gradients_of(
        lambda rows, bias, weights: add_expert_bias(rows, bias, experts, ends, weights), inputs, upstream
    )
    wide = gated_cases.wide(*inputs)
    exact = wide[0] + wide[1][experts] * wide[2][:, None]
    expected = torch.autograd.grad(exact, wide, upstream.double())
    assert_rounded(result, exact.detach(), 4, 20.0)
    for one, other in zip(gradients, expected, strict=True):
        assert_rounded(one, other, 64, 20.0 * 40)
