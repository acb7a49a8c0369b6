"""Token losses from a chunk of logits, and the logits' gradient written over them.

A kind with Triton runs it as one kernel, which reads the logits from memory once and writes them once. Every other kind
computes it block by block in fp32.

Shapes: n tokens of the chunk, V vocabulary.
"""

import torch
from torch import Tensor

from torchround.layer import IGNORED_LABEL
from torchround.models.kernels.operation import operation, uses_triton

# fp32 scratch without Triton.
BLOCK_BYTES = 1 << 26


@operation(
    "softmax_loss_(Tensor(a!) logits, Tensor labels, Tensor(b!) losses, float factor, bool differentiate) -> ()",
    "softmax_loss_triton.launch_softmax_loss",
)
def _softmax_loss_result(*_: object) -> None:
    pass


def softmax_loss_(logits: Tensor, labels: Tensor, losses: Tensor, factor: float, differentiate: bool) -> None:
    """Write `losses [n]` fp32 of `logits [n, V]`, 0 for an ignored label. It uses up the logits.

    With `differentiate` they are replaced by their gradient times `factor`, rounded to their dtype once.
    """
    if uses_triton(logits):
        torch.ops.torchround.softmax_loss_(logits, labels, losses, factor, differentiate)
        return
    rows = max(1, BLOCK_BYTES // (4 * logits.shape[1]))
    for part, index, found in zip(logits.split(rows), labels.split(rows), losses.split(rows), strict=True):
        _block_loss_(part, index, found, factor, differentiate)


def _block_loss_(logits: Tensor, labels: Tensor, losses: Tensor, factor: float, differentiate: bool) -> None:
    counted = labels != IGNORED_LABEL
    index = labels.where(counted, 0)[:, None]
    wide = logits.float()
    wide -= wide.amax(dim=-1, keepdim=True)  # so that no exponential overflows
    chosen = wide.gather(1, index)
    sums = wide.exp_().sum(dim=-1, keepdim=True)
    losses.copy_((sums.log() - chosen)[:, 0].where(counted, 0.0))
    if differentiate:
        wide /= sums
        # softmax - onehot(label). Each row gets one entry, so the scatter has no order that could vary.
        wide.scatter_(1, index, wide.gather(1, index) - 1.0)
        logits.copy_(wide.mul_(counted[:, None] * factor))
