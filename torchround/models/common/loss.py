"""The sum of token cross entropies from hidden states, without ever holding all logits.

Both gradients are computed in the forward, chunk by chunk, while a chunk's logits exist. The head runs in the fused
stage, where forward and backward are one, so nothing is recomputed. Besides the result, memory holds one chunk of
logits and the gradients themselves.

`torch.nn.functional.linear_cross_entropy` (torch 2.13) does the same and is used for fp32 on the CPU, where it is as
good. For bf16 it rounds the loss to bf16, which is useless for a sum over thousands of tokens. On CUDA it adds weight
gradients atomically, in no fixed order, so that two equal runs differ.

Shapes: N tokens of the whole micro-batch, D model width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.layer import IGNORED_LABEL

# fp32 logits of a chunk. Larger chunks read and write the weight's gradient less often.
CHUNK_BYTES = 1 << 28
BLOCK_ROWS = 16384


def token_loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Add up `-log softmax(hidden @ weight.T)[label]` over tokens, to fp32 `[]`; ignored labels add nothing.

    `hidden` is `[N, D]`, `weight` `[V, D]` of the same dtype, `labels` `[N]` int64. May be differentiated
    once, with respect to `hidden` and `weight`.
    """
    if torch.compiler.is_compiling():
        return _OpaqueLoss.apply(hidden, weight, labels)
    if (
        hidden.device.type == "cpu"
        and hidden.dtype == torch.float32
        and hasattr(nn, "LinearCrossEntropyOptions")
    ):
        return torch_loss_sum(hidden, weight, labels)
    return chunked_loss_sum(hidden, weight, labels)


def torch_loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute `token_loss_sum` through `torch.nn.functional.linear_cross_entropy`, for fp32 on the CPU."""
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens(weight.shape[0]))
    return F.linear_cross_entropy(
        hidden, weight, labels, reduction="sum", ignore_index=IGNORED_LABEL, options=options
    )


def chunked_loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute `token_loss_sum` by our own loop over chunks, for every device and dtype."""
    return _ChunkedLoss.apply(hidden, weight, labels, torch.is_grad_enabled())


def chunk_tokens(vocab_size: int) -> int:
    """Return the tokens of one chunk: the largest power of two whose fp32 logits fit `CHUNK_BYTES`, at least 16.

    It depends on V alone, so the order of additions does not depend on the micro-batch.
    """
    return 1 << max(4, (CHUNK_BYTES // (4 * vocab_size)).bit_length() - 1)


def loss_workspace_bytes(
    num_tokens: int, vocab_size: int, width: int, element_bytes: int, trained: bool
) -> int:
    """Count the scratch of `chunked_loss_sum`: a chunk's logits, their gradient, a `trained` weight's fp32 gradient."""
    chunk_elements = min(num_tokens, chunk_tokens(vocab_size)) * vocab_size
    gradient_bytes = 4 * vocab_size * width if trained else 0
    if element_bytes == 4:
        return 4 * chunk_elements + gradient_bytes
    block_bytes = min(vocab_size, BLOCK_ROWS) * width * element_bytes if trained else 0
    return (4 + 2 * element_bytes) * chunk_elements + gradient_bytes + block_bytes


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, grad_enabled: bool) -> Tensor:
        wants = tuple(grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        loss, ctx.grad_hidden, ctx.grad_weight = _loss_and_gradients(hidden, weight, labels, *wants)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        found = (ctx.grad_hidden, ctx.grad_weight)
        if found == (None, None):
            raise RuntimeError("this loss was already differentiated; its gradients are handed out only once")
        ctx.grad_hidden = ctx.grad_weight = None
        grad_hidden, grad_weight = (None if grad is None else grad.mul_(grads[0]) for grad in found)
        return grad_hidden, grad_weight, None, None


class _OpaqueLoss(torch.autograd.Function):
    """The same loss for a compiler, as one operation that it does not look into: it would keep all chunks' logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        wants = ctx.needs_input_grad[:2]
        loss, *gradients = _opaque_loss(hidden, weight, labels, *wants)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_hidden, grad_weight = (
            found * grads[0] if wanted else None
            for found, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        return grad_hidden, grad_weight, None


@torch.library.custom_op("torchround::loss_and_gradients", mutates_args=())
def _opaque_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss, *gradients = _loss_and_gradients(hidden, weight, labels, wants_hidden, wants_weight)
    return loss, *(loss.new_empty(0) if found is None else found for found in gradients)  # type: ignore[return-value]


@_opaque_loss.register_fake
def _opaque_loss_shapes(
    hidden: Tensor, weight: Tensor, labels: Tensor, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden) if wants_hidden else loss.new_empty(0)
    grad_weight = torch.empty_like(weight, dtype=torch.float32) if wants_weight else loss.new_empty(0)
    return loss, grad_hidden, grad_weight


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the loss `[]`, its gradients for `hidden [N, D]` and, in fp32, for `weight [V, D]`."""
    grad_hidden = torch.empty_like(hidden) if wants_hidden else None
    # fp32, because chunks are added up; autograd casts to the dtype of the leaf's gradient.
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
    losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
    step = chunk_tokens(weight.shape[0])
    for start in range(0, len(labels), step):
        rows = slice(start, start + step)
        grad_rows = grad_hidden[rows] if grad_hidden is not None else None
        losses[rows] = _run_chunk(hidden[rows], weight, labels[rows], grad_rows, grad_weight)
    return losses.sum(), grad_hidden, grad_weight


def _run_chunk(
    hidden: Tensor, weight: Tensor, labels: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None
) -> Tensor:
    """Return the losses `[n]` fp32 of one chunk; write `grad_hidden [n, D]` and add to `grad_weight [V, D]`."""
    logits = (hidden @ weight.T).float()  # [n, V], overwritten by its own gradient below
    counted = labels != IGNORED_LABEL
    index = labels.where(counted, 0)[:, None]
    logits -= logits.amax(dim=-1, keepdim=True)  # so that no exponential overflows
    chosen = logits.gather(1, index)
    sums = logits.exp_().sum(dim=-1, keepdim=True)
    if grad_hidden is not None or grad_weight is not None:
        logits /= sums
        # softmax - onehot(label). Each row gets one entry, so the scatter has no order that could vary.
        logits.scatter_(1, index, logits.gather(1, index) - 1.0)
        grad_logits = logits.mul_(counted[:, None]).to(weight.dtype)
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden)
        if grad_weight is not None:
            _add_product_(grad_weight, grad_logits, hidden)
    return (sums.log() - chosen)[:, 0].where(counted, 0.0)


def _add_product_(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add `grad_logits [n, V].T @ hidden [n, D]` to `total [V, D]` fp32, with scratch for `BLOCK_ROWS` rows only."""
    if grad_logits.dtype == total.dtype:
        total.addmm_(grad_logits.T, hidden)
        return
    for start in range(0, len(total), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        total[rows] += grad_logits[:, rows].T @ hidden
