"""The plain references of the fused norms and rotations."""

import pytest
import torch

from tests.support import norm_cases
from tests.support.interpreted import assert_rounded, random
from torchround.models.kernels.norms import normed_sum
from torchround.models.kernels.rotary import rotate_heads

EPS = norm_cases.EPS


@pytest.mark.parametrize("dtype", norm_cases.DTYPES, ids=str)
@pytest.mark.parametrize("adds", [False, True], ids=["norm", "sum and norm"])
def test_the_reference_of_norms_and_its_gradients_are_those_of_float64(adds, dtype):
    tokens, width = 700, 24
    stream, update, upstream, upstream_total = random(4, 2, tokens // 2, width, dtype=dtype)
    weight = random(width, dtype=dtype)
    inputs = [stream, *([update] if adds else []), weight]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    for tensor in leaves:
        tensor.grad_dtype = torch.float32
    total, normed = normed_sum(leaves[0], leaves[1] if adds else None, leaves[-1], EPS)
    torch.autograd.backward((total, normed), (upstream_total, upstream))
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    exact_total = wide[0] + wide[1] if adds else wide[0]
    # The norm is of the rounded sum.
    rounded = exact_total + (total.double() - exact_total).detach()
    exact = norm_cases.exact_norm(rounded, wide[-1])
    expected = torch.autograd.grad((exact_total, exact), wide, (upstream_total.double(), upstream.double()))
    assert_rounded(total, exact_total.detach(), 2)
    assert_rounded(normed, exact.detach(), width + 8)
    for leaf, grad in zip(leaves[:-1], expected, strict=False):
        # No row of normal numbers is so small that its scale is above 2.
        assert_rounded(leaf.grad.to(dtype), grad, width + 8, 2 * 16.0 * (1 + width))
    assert_rounded(leaves[-1].grad, expected[-1], tokens + width, 20.0 * tokens)


def test_a_frozen_norm_gets_no_gradient_and_adds_none_up():
    x, weight = random(3, 8).requires_grad_(), random(8)
    _, normed = normed_sum(x, None, weight, EPS)
    normed.sum().backward()
    assert weight.grad is None and x.grad is not None


def test_a_sum_whose_norm_is_not_used_passes_its_gradient_on():
    stream, update = random(2, 3, 8).unbind()
    stream.requires_grad_(), update.requires_grad_()
    total, _ = normed_sum(stream, update, random(8), EPS)
    (total * 3).sum().backward()
    assert torch.equal(stream.grad, torch.full((3, 8), 3.0)) and torch.equal(update.grad, stream.grad)


@pytest.mark.parametrize("norms", [False, True], ids=["rotation", "norm and rotation"])
def test_the_reference_of_rotations_and_its_gradients_are_those_of_float64(norms):
    heads, upstream = random(2, 2, 5, 3, 6)
    weight = random(6)
    positions = torch.tensor([[0, 1, 2, 0, 1], [7, 1000, 100000, 3, 4]])
    turn = (positions, torch.linspace(1.0, 0.01, 3), 1.3)
    leaves = [tensor.clone().requires_grad_() for tensor in (heads, *([weight] if norms else []))]
    rotated = rotate_heads(leaves[0], *turn, *((leaves[1], EPS) if norms else ()))
    gradients = torch.autograd.grad(rotated, leaves, upstream)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    exact = norm_cases.exact_rotation(norm_cases.exact_norm(*wide) if norms else wide[0], *turn)
    expected = torch.autograd.grad(exact, wide, upstream.double())
    assert_rounded(rotated.detach(), exact.detach(), 24, 20.0)
    for one, other in zip(gradients, expected, strict=True):
        assert_rounded(one, other, 64, 200.0)
