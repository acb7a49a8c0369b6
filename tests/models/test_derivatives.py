"""The derivatives written by hand, against finite differences in fp64."""

import pytest
import torch

from torchround.models.common.primitives import ACTIVATIONS, gated_product, lookup
from torchround.models.gpt_oss.layers import ClampedSwiGLU

ROWS, WIDTH = 6, 5


def random(*shape, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()


def test_clamped_swiglu():
    gate_up = random(ROWS, 2 * WIDTH, scale=3.0)  # many beyond the limit of 2, on either side
    assert (gate_up > 2).any() and (gate_up < -2).any()
    weights = random(ROWS)
    assert torch.autograd.gradcheck(
        lambda *inputs: ClampedSwiGLU.apply(*inputs, 2.0, 1.7), (gate_up, weights), atol=1e-4
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weights", [(), (random(ROWS),)], ids=["plain", "weighted"])
def test_gated_product(activation, weights):
    # The weights' gradient is added up in fp32: an error of eps times the sum, far below 1e-4.
    inputs = (random(ROWS, WIDTH), random(ROWS, WIDTH), *weights)
    assert torch.autograd.gradcheck(
        lambda *given: gated_product(*given, activation=activation), inputs, atol=1e-4 if weights else 1e-5
    )


def test_weighted_lookup():
    index = torch.tensor([0, 0, 2, 2, 2, 3])
    inputs = (random(4, WIDTH), random(ROWS))
    # The gradients are added up in fp32, as above.
    assert torch.autograd.gradcheck(lambda table, factors: lookup(table, index, factors), inputs, atol=1e-4)
