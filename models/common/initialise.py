"""Initial weights, the same for fp32 and (rounded once) for 16-bit storage.

Numbers are drawn in fp32 in blocks of a fixed size, so a model of any size needs one block of scratch, and a
layer's weights depend on its generator and its shapes only.
"""

import torch
from torch import Tensor

STANDARD_DEVIATION = 0.02
CUT = 3.0  # truncated normals end at this many standard deviations
BLOCK_ELEMENTS = 1 << 22


def init_linear_(weight: Tensor, generator: torch.Generator, scale: float = 1.0) -> None:
    """Truncated normal with `0.02 * scale`, as GPT-2 and Llama-style trainers do.

    Projections that write to the residual stream pass `scale = 1 / sqrt(2 L)` (GPT-2), so that the stream's
    variance does not grow with the number of layers L.
    """
    _fill_normal_(weight, generator, STANDARD_DEVIATION * scale, truncated=True)


def init_embedding_(weight: Tensor, generator: torch.Generator) -> None:
    """Normal with standard deviation 0.02."""
    _fill_normal_(weight, generator, STANDARD_DEVIATION, truncated=False)


@torch.no_grad()
def _fill_normal_(weight: Tensor, generator: torch.Generator, std: float, *, truncated: bool) -> None:
    if not weight.is_contiguous():
        raise ValueError(f"initial weights need contiguous storage, got strides {weight.stride()}")
    for block in weight.view(-1).split(BLOCK_ELEMENTS):
        numbers = torch.empty(block.shape, dtype=torch.float32, device=generator.device)
        if truncated:
            torch.nn.init.trunc_normal_(numbers, std=std, a=-CUT * std, b=CUT * std, generator=generator)
        else:
            numbers.normal_(std=std, generator=generator)
        block.copy_(numbers)
