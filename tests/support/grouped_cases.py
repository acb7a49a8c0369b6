"""Cases for Triton's interpreter: products of rows with their expert's matrix, and the gradient of the matrices."""

from itertools import pairwise, product

import torch
from torch import Tensor

from tests.support.interpreted import UNITS, assert_rounded, random

# Ends of the experts' rows. Tiles have 128 rows: one expert; empty ones first, in the middle and last; tiles that are
# just full and one row more; more experts than rows; no rows at all.
ENDS = ([5], [0, 7, 7, 150, 160, 160], [128, 257], [0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 0])
# Inputs and outputs: neither a power of two nor a multiple of 8; an adapter's rank; more than a tile.
SIZES = ((40, 33), (3, 130), (130, 5))


def shapes() -> list[tuple[Tensor, int, int, torch.dtype]]:
    """Every combination of ends, inputs, outputs and dtype."""
    return [
        (torch.tensor(ends, dtype=torch.int32), *sizes, dtype) for ends, sizes, dtype in product(ENDS, SIZES, UNITS)
    ]


def exact_rows(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    parts = pairwise([0, *ends.tolist()])
    return torch.cat([rows[start:stop] @ weights[index] for index, (start, stop) in enumerate(parts)])


def case_rows_times_matrices_in_any_strides() -> None:
    from torchround.models.kernels.grouped_triton import launch_rows

    for ends, inputs, outputs, dtype in shapes():
        num_rows, num_experts = int(ends[-1]), len(ends)
        wide_rows = random(num_rows, inputs + 3, dtype=dtype)
        stack = random(num_experts, outputs, inputs, dtype=dtype)
        adapter = random(outputs, inputs * num_experts, dtype=dtype)
        for rows, weights in (
            (wide_rows[:, :inputs], stack.transpose(1, 2)),
            (wide_rows[:, 1 : 1 + inputs].contiguous(), stack.transpose(1, 2).contiguous()),
            (wide_rows[:, :inputs], adapter.unflatten(1, (inputs, num_experts)).permute(2, 1, 0)),
        ):
            found = launch_rows(rows, weights, ends)
            assert found.dtype == dtype and found.is_contiguous()
            if num_rows:
                # Normal numbers: no product of two is above 25.
                assert_rounded(found, exact_rows(rows.double(), weights.double(), ends), inputs, 25.0 * inputs)


def case_a_gradient_is_added_in_float32() -> None:
    from torchround.models.kernels.grouped_triton import launch_gradient

    for ends, inputs, outputs, dtype in shapes():
        num_rows, num_experts = int(ends[-1]), len(ends)
        rows, grad = random(num_rows, inputs, dtype=dtype), random(num_rows, outputs, dtype=dtype, seed=1)
        before = random(num_experts, outputs, inputs, seed=2)
        total = before.clone()
        launch_gradient(rows, grad, ends, total.transpose(1, 2))
        for index, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
            added = grad[start:stop].double().T @ rows[start:stop].double()
            if start == stop:
                assert torch.equal(total[index], before[index]), "an expert without rows is left alone"
            else:
                terms = stop - start + 1
                assert_rounded(total[index], before[index].double() + added, terms, 25.0 * terms)


def case_a_gradient_is_added_to_a_sum_of_16_bits() -> None:
    from torchround.models.kernels.grouped_triton import launch_gradient

    ends = torch.tensor([0, 7, 40], dtype=torch.int32)
    rows, grad = random(40, 24, dtype=torch.bfloat16), random(40, 8, dtype=torch.bfloat16, seed=1)
    total = torch.ones(3, 24, 8, dtype=torch.bfloat16)
    launch_gradient(rows, grad, ends, total)
    exact = 1.0 + rows[7:].double().T @ grad[7:].double()
    assert_rounded(total[2], exact, 34, 25.0 * 34)
    assert torch.equal(total[0], torch.ones(24, 8, dtype=torch.bfloat16))
