"""The kernel of `softmax_loss_` in Triton: one program for each token.

A program passes over its row of logits twice. The first pass keeps the maximum and the sum of exponentials of each lane in
fp32; lanes are combined in a fixed order. The second pass writes the gradient over the logits. A row of 150,000 logits
is 0.3 MB and as many rows are under way as a card has processors, so the second pass should find them in the
second-level cache. It has been run in Triton's interpreter, not on a card.

Shapes: n tokens of the chunk, V vocabulary.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchround.layer import IGNORED_LABEL

COLUMNS = 8192  # logits of one step of a program
WARPS = 16
# Below every finite logit. Minus infinity would make the difference of two empty lanes NaN.
LOWEST = tl.constexpr(-3.0e38)


def launch_softmax_loss(
    logits: Tensor, labels: Tensor, losses: Tensor, factor: float, differentiate: bool
) -> None:
    assert logits.stride(1) == 1 and labels.is_contiguous() and losses.is_contiguous(), "rows are contiguous"
    if len(logits) == 0:
        return  # a grid without programs is refused
    columns = min(COLUMNS, triton.next_power_of_2(logits.shape[1]))
    _softmax_loss[(len(logits),)](
        *(logits, labels, losses, factor, logits.stride(0), logits.shape[1]),
        IGNORED=IGNORED_LABEL,
        DIFFERENTIATE=differentiate,
        COLUMNS=columns,
        num_warps=max(1, min(WARPS, columns // 512)),
    )


@triton.jit
def _softmax_loss(
    logits: tl.tensor,
    labels: tl.tensor,
    losses: tl.tensor,
    factor: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    IGNORED: tl.constexpr,
    DIFFERENTIATE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    label = tl.load(labels + token)
    counted = label != IGNORED
    # Before the second pass overwrites it.
    chosen = tl.load(row + label, mask=counted, other=0.0).to(tl.float32)
    lanes = tl.arange(0, COLUMNS)
    top = tl.full([COLUMNS], LOWEST, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocab, COLUMNS):
        column = start + lanes
        x = tl.load(row + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        above = tl.maximum(top, x)
        total = total * tl.exp(top - above) + tl.exp(x - above)
        top = above
    highest = tl.max(top, axis=0)
    sums = tl.sum(total * tl.exp(top - highest), axis=0)
    loss = tl.log(sums) + (highest - chosen)
    tl.store(losses + token, tl.where(counted, loss, 0.0))
    if DIFFERENTIATE:
        scale = tl.where(counted, factor, 0.0)
        for start in range(0, vocab, COLUMNS):
            column = start + lanes
            inside = column < vocab
            x = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
            share = tl.exp(x - highest) / sums
            share = tl.where(column == label, share - 1.0, share)
            tl.store(row + column, (share * scale).to(logits.dtype.element_ty), mask=inside)
