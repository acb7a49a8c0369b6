"""Split weights: the round trip over all bit patterns that matter, and how the device weight is rounded."""

import torch

from torchround.optim.split_weights import join, split

# Around each of the 65,536 bf16 numbers: itself, its neighbours, and what is next to a tie on either side.
LOWER = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def every_upper_half():
    """Return fp32 numbers of all bit patterns that end in one of `LOWER`, infinities and NaN among them."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    return torch.cat([upper + lower for lower in LOWER]).view(torch.float32)


def bits(weight):
    return weight.view(torch.int32)


def test_every_weight_comes_back_bit_for_bit():
    weight = every_upper_half()
    device_weight, residual = split(weight)
    assert (device_weight.dtype, residual.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(bits(join(device_weight, residual)), bits(weight))


def test_the_device_weight_is_the_nearest_one_and_a_tie_goes_up_in_magnitude():
    weight = every_upper_half()
    weight = weight[weight.isfinite()]
    device_weight, _ = split(weight)
    is_tie = (bits(weight) & 0xFFFF) == 0x8000
    cast = weight.to(torch.bfloat16)
    assert torch.equal(device_weight[~is_tie].view(torch.int16), cast[~is_tie].view(torch.int16))
    towards_zero = (bits(weight) & ~0xFFFF).view(torch.float32)
    assert torch.all(device_weight[is_tie].float().abs() > towards_zero[is_tie].abs())
    # About half of the ties are rounded otherwise by PyTorch's cast, so the check above can fail.
    assert (device_weight[is_tie] != cast[is_tie]).float().mean() > 0.4
