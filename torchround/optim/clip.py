"""Gradient clipping by global norm, in parts that the engine can run as gradients land.

Each parameter contributes one `sum_of_squares`; the caller adds them in a fixed order, takes the root and
passes `clip_scale`'s factor on to the update, so no gradient is rewritten.
"""

import torch
from torch import Tensor

# Rows are summed one by one, so that the order of additions depends on the data's length alone and never
# on the number of threads, which torch.sum over a long vector splits by.
_ROW = 4096
# 256 Ki elements are 2 MiB of float64 scratch. Measured on 2 cores, bf16, Gelement/s by elements per chunk:
# 64 Ki 2.0, 256 Ki 2.8, 1 Mi 1.2 (one thread).
_CHUNK_ROWS = 64

# What torch.nn.utils.clip_grad_norm_ adds to the norm.
_NORM_EPS = 1e-6


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of squares of a 1-D tensor of any floating dtype, as a `[]` float64 tensor.

    Squared and added in float64: a finite 16-bit or 32-bit gradient never overflows to an infinite norm.
    Bitwise the same for any number of threads. At most 2 MiB of scratch.
    """
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    num_whole_rows = flat.numel() // _ROW
    rows = flat[: num_whole_rows * _ROW].view(num_whole_rows, _ROW)
    for chunk in rows.split(_CHUNK_ROWS):
        total += chunk.to(torch.float64, copy=True).square_().sum(dim=1).sum()
    total += flat[num_whole_rows * _ROW :].to(torch.float64, copy=True).square_().sum()
    return total


def clip_scale(total_norm: float | Tensor, max_norm: float) -> float:
    """The factor that brings gradients of norm `total_norm` to at most `max_norm`: `clip_grad_norm_`'s.

    `min(1, max_norm / (total_norm + 1e-6))`; 1 when `max_norm` is 0, which turns clipping off. A norm that is
    not finite has no useful factor (it gives 0 or nan): the caller skips such an update altogether.
    """
    if max_norm == 0:
        return 1.0
    factor = max_norm / (float(total_norm) + _NORM_EPS)
    return min(factor, 1.0)
