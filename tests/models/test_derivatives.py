"""The derivatives written by hand, against finite differences in fp64."""

import pytest
import torch

from torchround.models.common import chunks
from torchround.models.common.primitives import RMSNorm, gated_product, rotate
from torchround.models.gpt_oss import ClampedSwiGLU, WeightedBias

ROWS, WIDTH = 6, 5


def random(*shape, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()


EXPERTS = torch.tensor([0, 0, 2, 2, 2, 3])


def test_clamped_swiglu():
    gate_up, bias = random(ROWS, 2 * WIDTH, scale=3.0), random(4, 2 * WIDTH)
    biased = gate_up + bias[EXPERTS]  # many beyond the limit of 2, on either side
    assert (biased > 2).any() and (biased < -2).any()
    # Gradients of biases and weights are added up in fp32: an error of eps times the sum, far below 1e-4.
    assert torch.autograd.gradcheck(
        lambda gate_up, bias, weights: ClampedSwiGLU.apply(gate_up, bias, EXPERTS, weights, 2.0, 1.7),
        (gate_up, bias, random(ROWS)),
        atol=1e-4,
    )


@pytest.mark.parametrize("weights", [(), (random(ROWS),)], ids=["plain", "weighted"])
def test_gated_product(weights):
    inputs = (random(ROWS, WIDTH), random(ROWS, WIDTH), *weights)
    assert torch.autograd.gradcheck(gated_product, inputs, atol=1e-4 if weights else 1e-5)


def test_weighted_bias():
    inputs = (random(ROWS, WIDTH), random(4, WIDTH), random(ROWS))
    assert torch.autograd.gradcheck(
        lambda rows, bias, weights: WeightedBias.apply(rows, bias, EXPERTS, weights), inputs, atol=1e-4
    )


def norm_of(x, weight):
    norm = RMSNorm(x.shape[-1], 1e-5)
    norm.weight = weight
    return norm(x)


def rotated(heads, angles):
    return rotate(heads, angles.detach().cos()[:, :, None], angles.detach().sin()[:, :, None])


SLICED = {
    "norm": (norm_of, [(2, 9, 3, 8), (8,)]),
    "rotation": (rotated, [(2, 9, 3, 8), (2, 9, 4)]),
    "clamped": (
        lambda x, bias, weights: ClampedSwiGLU.apply(x, bias, EXPERTS.repeat(3), weights, 2.0, 1.7),
        [(18, 32), (4, 32), (18,)],  # whole vectors: the CPU computes sigmoids of the rest by other instructions
    ),
    "bias": (
        lambda x, bias, weights: WeightedBias.apply(x, bias, EXPERTS.repeat(3), weights),
        [(18, 8), (4, 8), (18,)],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SLICED)
def test_slices_of_rows_have_the_bits_of_the_whole(name, dtype, fused, monkeypatch):
    """Sums over rows are cut too: a norm's weight gets its gradient slice by slice."""
    function, shapes = SLICED[name]
    found = []
    for elements in (1 << 20, 64):  # slices of two or eight rows; the last one may be shorter
        monkeypatch.setattr(chunks, "SLICE_ELEMENTS", elements)
        inputs = [random(*shape).detach().to(dtype if len(shape) > 1 else torch.float32) for shape in shapes]
        leaves = [torch.nn.Parameter(one) for one in inputs]
        result = function(*leaves)
        result.backward(random(*result.shape).detach().to(dtype))
        found.append([result, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    whole, cut = found
    if name == "norm":
        # 54 rows of numbers below 10, added up in another order.
        torch.testing.assert_close(cut.pop(), whole.pop(), rtol=0, atol=54 * 100 * 2**-24)
    assert len(whole) > 1 and all(map(torch.equal, cut, whole))
