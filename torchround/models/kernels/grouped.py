"""Products of rows sorted by expert with each expert's matrix, and the gradient of these matrices.

PyTorch's `grouped_mm` is one kernel on a few cards only. Elsewhere it needs the offsets on the host, which waits for the
device. These two operations read the offsets on the device. The second one adds to a gradient that exists already, in the
gradient's dtype, and leaves experts without rows alone.

Shapes: R rows sorted by expert, E experts, A inputs, Z outputs. `ends [E]` int32 is one past each expert's last row.
"""

from itertools import pairwise

import torch
from torch import Tensor

from torchround.models.kernels.operation import no_result, operation, uses_triton


def _rows_shape(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[2]))


@operation("grouped_rows(Tensor rows, Tensor weights, Tensor ends) -> Tensor", _rows_shape)
def grouped_rows(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows with its matrix, `[R, A] x [E, A, Z] -> [R, Z]`, in any strides."""
    if uses_triton(rows):
        from torchround.models.kernels.grouped_triton import launch_rows

        return launch_rows(rows, weights, ends)
    return reference_rows(rows, weights, ends)


@operation("grouped_gradient_(Tensor rows, Tensor grad, Tensor ends, Tensor(a!) total) -> ()", no_result)
def grouped_gradient_(rows: Tensor, grad: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add each expert's `rows [., A].T @ grad [., Z]` to its matrix of `total [E, A, Z]`, rounded once."""
    if uses_triton(rows):
        from torchround.models.kernels.grouped_triton import launch_gradient

        launch_gradient(rows, grad, ends, total)
    else:
        reference_gradient_(rows, grad, ends, total)


def reference_rows(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Compute `grouped_rows` by PyTorch's own operations. Brings the offsets to the host."""
    bounds = pairwise([0, *ends.tolist()])
    return torch.cat([rows[start:stop] @ weights[index] for index, (start, stop) in enumerate(bounds)])


def reference_gradient_(rows: Tensor, grad: Tensor, ends: Tensor, total: Tensor) -> None:
    """Compute `grouped_gradient_` by PyTorch's own operations. Brings the offsets to the host."""
    for index, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
        if start < stop:
            total[index] += rows[start:stop].float().T @ grad[start:stop].float()
