"""MXFP4 against `transformers`' own dequantisation, and against numbers worked out by hand."""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from torchround.hf.mxfp4 import dequantise


def test_every_byte_and_scale_in_use_equals_transformers_bit_by_bit():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantise(blocks, scales).transpose(1, 2), expected)


def test_halves_of_a_byte_are_low_then_high_times_the_shared_power_of_two():
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, :3] = torch.tensor([0x21, 0xF7, 0x90])  # 0.5, 1; 6, -6; 0, -0.5
    numbers = dequantise(blocks, torch.tensor([130], dtype=torch.uint8))
    assert numbers[:6].tolist() == [4.0, 8.0, 48.0, -48.0, 0.0, -4.0]
    assert not numbers[6:].any()


def test_the_smallest_scale_is_kept_and_the_reserved_one_is_not_a_number():
    blocks = torch.full((2, 16), 0x22, dtype=torch.uint8)
    smallest, reserved = dequantise(blocks, torch.tensor([0, 255], dtype=torch.uint8)).unflatten(0, (2, 32))
    assert (smallest == 2.0**-127).all() and reserved.isnan().all()
