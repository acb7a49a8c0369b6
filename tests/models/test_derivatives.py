"""The derivatives written by hand, against finite differences in fp64."""

import torch

from torchround.models.common.feed_forward import _WeightedSwiGLU, swiglu
from torchround.models.gpt_oss.layers import _ClampedSwiGLU, _WeightedLookup

ROWS, WIDTH = 6, 5


def random(*shape, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()


def test_clamped_swiglu():
    gate_up = random(ROWS, 2 * WIDTH, scale=3.0)  # many beyond the limit of 2, on either side
    assert (gate_up > 2).any() and (gate_up < -2).any()
    weights = random(ROWS)
    assert torch.autograd.gradcheck(
        lambda *inputs: _ClampedSwiGLU.apply(*inputs, 2.0, 1.7), (gate_up, weights), atol=1e-4
    )


def test_weighted_swiglu():
    assert torch.autograd.gradcheck(
        _WeightedSwiGLU.apply, (random(ROWS, WIDTH), random(ROWS, WIDTH), random(ROWS)), atol=1e-4
    )


def test_swiglu():
    assert torch.autograd.gradcheck(swiglu, (random(ROWS, WIDTH), random(ROWS, WIDTH)))


def test_weighted_lookup():
    index = torch.tensor([0, 0, 2, 2, 2, 3])
    inputs = (random(4, WIDTH), random(ROWS))
    assert torch.autograd.gradcheck(
        lambda table, weights: _WeightedLookup.apply(table, index, weights), inputs, atol=1e-4
    )
