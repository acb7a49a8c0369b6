"""Table lookup whose gradient adds up in fp32: in bf16, a row met 256 times would stop counting.

`embedding_dense_backward` sorts on CUDA instead of adding atomically, so equal runs give equal bits. It is an
operation of its own so that a compiler does not take it apart: Inductor would make atomic additions of it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """`[..., D]`: rows of `table [V, D]` at `index [...]`."""
    return _Lookup.apply(table, index)


@torch.library.custom_op("torchround::lookup_gradient", mutates_args=())
def lookup_gradient(grad: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """`[V, D]` fp32: the gradients of looked-up rows, added up row by row."""
    return torch.ops.aten.embedding_dense_backward(grad.float(), index, num_rows, -1, False)


@lookup_gradient.register_fake
def _lookup_gradient_shape(grad: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty((num_rows, grad.shape[-1]), dtype=torch.float32)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = table.shape[0]
        return F.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return lookup_gradient(grads[0], index, ctx.num_rows), None
