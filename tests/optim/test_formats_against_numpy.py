"""Split weights and 8-bit codes have the bits of the same formulas in NumPy, over the whole range of numbers."""

import pytest
import torch

from tests.support.reference import coded, coded_root, halves
from torchround.optim.formats import COMPACT, StateValue
from torchround.optim.split_weights import split


def numbers(size: float) -> torch.Tensor:
    """Return numbers of about this size, with blocks of zeros, wide blocks and a short last block."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(40_000, generator=generator) * size
    drawn[:256] *= torch.exp(3 * torch.randn(256, generator=generator))
    drawn[1024:1152] = 0.0
    return drawn.clamp(-3e38, 3e38)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-30, 1e-38, 1e-42, 1e30, 1e37])
@pytest.mark.parametrize("is_signed", [True, False], ids=["signed", "never negative"])
def test_codes_and_what_is_read_back(is_signed: bool, size: float) -> None:
    """A scale takes 256 values of a binade, so that each division by one is met."""
    value, given = StateValue("kept", is_signed), numbers(size) if is_signed else numbers(size).abs()
    codes, scales, read = (coded if is_signed else coded_root)(given.numpy())
    found = COMPACT.encode(value, given)
    assert torch.equal(found[0], torch.from_numpy(codes))
    assert torch.equal(found[1], torch.from_numpy(scales).bfloat16())
    assert torch.equal(COMPACT.decode(value, found), torch.from_numpy(read))


def test_a_number_between_two_codes_takes_the_one_that_a_single_division_gives() -> None:
    """The reciprocal of the scale, rounded before it is multiplied by 255, would give the other code."""
    generator = torch.Generator().manual_seed(1)
    given = torch.rand(3_000_000, generator=generator)
    codes, *_ = coded_root(given.numpy())
    assert torch.equal(COMPACT.encode(StateValue("kept", False), given)[0], torch.from_numpy(codes))


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-42, 1e37])
def test_halves(size: float) -> None:
    ours, theirs = halves(numbers(size)), split(numbers(size))
    assert torch.equal(ours[0].view(torch.int16), theirs[0].view(torch.int16))
    assert torch.equal(ours[1], theirs[1])
