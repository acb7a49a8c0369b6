"""The sum of token cross entropies from hidden states, without ever holding all logits.

Both gradients are computed in the forward, chunk by chunk, while a chunk's logits exist. The head runs in the fused
stage, where forward and backward are one, so nothing is recomputed. Besides the result, memory holds one chunk of
logits and the gradients themselves.

On an accelerator, memory traffic decides. Chunks are large, because each one reads and writes the weight's whole
gradient. Softmax, loss and the logits' gradient are one kernel. The weight's gradient is added to `weight.grad` in the
forward. So the forward has to know the factor that the backward will multiply by: `MicroBatch.loss_factor`.

`torch.nn.functional.linear_cross_entropy` (torch 2.13) does the same and is used for fp32 on the CPU, where it is as
good. For bf16 it rounds the loss to bf16, which is useless for a sum over thousands of tokens. On CUDA it adds weight
gradients atomically, in no fixed order, so that two equal runs differ.

Shapes: N tokens of the whole micro-batch, D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.accelerators import has_float32_products, is_accelerator
from torchround.layer import IGNORED_LABEL, LayerWork, Products
from torchround.models.kernels.operation import operation, uses_triton
from torchround.models.kernels.projections import add_product_

# fp32 logits of a chunk on the CPU. Larger chunks read and write the weight's gradient less often.
CHUNK_BYTES = 1 << 28
# Logits of a chunk on an accelerator, in the training dtype: 4352 tokens of Qwen3's vocabulary in 16 bits. Half as much
# would read and write 3.7 GB more per micro-batch of 8192 tokens of Qwen3-1.7B.
ACCELERATOR_CHUNK_BYTES = 5 << 28
TOKEN_MULTIPLE = 256  # no tile of a product is then partly empty
BLOCK_ROWS = 16384
BLOCK_BYTES = 1 << 26  # fp32 scratch of softmax and loss, without Triton


def token_loss_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, loss_factor: float | None = None
) -> Tensor:
    """Add up `-log softmax(hidden @ weight.T)[label]` over tokens, to fp32 `[]`; ignored labels add nothing.

    `hidden` is `[N, D]`, `weight` `[V, D]` of the same dtype, `labels` `[N]` int64. May be differentiated
    once, with respect to `hidden` and `weight`. `loss_factor` promises that the backward follows and that its gradient
    of the result is this number; an accelerator then adds to `weight.grad` here already. A compiler would keep all chunks'
    logits, so a layer that calls this is `never_compiled`.
    """
    if is_accelerator(hidden.device.type):
        step = accelerator_chunk_tokens(weight.shape[0], weight.element_size())
        return loss_in_chunks(hidden, weight, labels, step, loss_factor)
    step = chunk_tokens(weight.shape[0])
    if hidden.dtype == torch.float32 and hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=step)
        return F.linear_cross_entropy(
            hidden, weight, labels, reduction="sum", ignore_index=IGNORED_LABEL, options=options
        )
    return loss_in_chunks(hidden, weight, labels, step)


def loss_in_chunks(
    hidden: Tensor, weight: Tensor, labels: Tensor, step: int, loss_factor: float | None = None
) -> Tensor:
    """Compute `token_loss_sum` by our own loop over chunks of `step` tokens."""
    # A gradient that is not there yet, or that is no leaf's, is returned to autograd instead.
    total = weight.grad if weight.is_leaf and loss_factor is not None else None
    compute = partial(_losses_and_gradients, hidden, weight, labels, step, total)
    return loss_with_gradients(compute, loss_factor, hidden, weight)


def chunk_tokens(vocab_size: int) -> int:
    """Count the tokens of one chunk: the largest power of two whose fp32 logits fit `CHUNK_BYTES`, at least 16.

    It depends on V alone, so the order of additions does not depend on the micro-batch.
    """
    return 1 << max(4, (CHUNK_BYTES // (4 * vocab_size)).bit_length() - 1)


def accelerator_chunk_tokens(vocab_size: int, element_bytes: int) -> int:
    """Count the tokens of one chunk on an accelerator: the most whose logits fit `ACCELERATOR_CHUNK_BYTES`."""
    fitting = ACCELERATOR_CHUNK_BYTES // (element_bytes * vocab_size)
    return max(1, fitting // TOKEN_MULTIPLE) * TOKEN_MULTIPLE


def loss_work(
    num_tokens: int, vocab_size: int, width: int, element_bytes: int, trained: bool, device: str = "cpu"
) -> LayerWork:
    """Count `token_loss_sum` on a type of device. The scratch is a chunk's logits and what is made from them.

    On the CPU there are also their gradient, and a `trained` weight's fp32 gradient. An accelerator writes one over the
    logits and adds the other to the gradient that the engine holds.
    """
    product_bytes = min(vocab_size, BLOCK_ROWS) * width * element_bytes if trained else 0
    if is_accelerator(device):
        chunk = min(num_tokens, accelerator_chunk_tokens(vocab_size, element_bytes)) * vocab_size
        # fp32 logits are their own scratch.
        in_blocks = 0 if element_bytes == 4 else min(4 * chunk, max(BLOCK_BYTES, 4 * vocab_size))
        scratch = element_bytes * chunk + max(in_blocks, product_bytes)
    else:
        chunk = min(num_tokens, chunk_tokens(vocab_size)) * vocab_size
        scratch = 4 * chunk + (4 * vocab_size * width if trained else 0)
        scratch += 0 if element_bytes == 4 else 2 * element_bytes * chunk + product_bytes
    flops = 2.0 * num_tokens * vocab_size * width
    return LayerWork(
        products=(Products(flops, 0.0 if trained else flops, "head"),),
        # The gradient that the loss computes in its forward and keeps for its input.
        activation_bytes=num_tokens * width * element_bytes,
        boundary_bytes=4,
        workspace_bytes=scratch,
    )


# From what wants a gradient, and the factor on gradients: the loss, and a gradient or None for each tensor.
Gradients = Sequence[Tensor | None]
Compute = Callable[[Sequence[bool], float], tuple[Tensor, Gradients]]


def loss_with_gradients(compute: Compute, loss_factor: float | None, *tensors: Tensor) -> Tensor:
    """Compute the loss `[]`, and in the same forward the gradients for `tensors`.

    `compute` is a `partial`: after a fault, tensors in a closure would stay on the device. May be differentiated once.
    With a `loss_factor` gradients are scaled where they are made: a pass over the finished ones would cost as much as
    adding a chunk, and unscaled ones are too small for float16.
    """
    return _ReadyGradients.apply(compute, loss_factor, torch.is_grad_enabled(), *tensors)


class _ReadyGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Compute, loss_factor: float | None, grad_enabled: bool, *tensors: Tensor
    ) -> Tensor:
        wants = [grad_enabled and needed for needed in ctx.needs_input_grad[3:]]
        ctx.is_scaled = loss_factor is not None
        loss, ctx.gradients = compute(wants, 1.0 if loss_factor is None else loss_factor)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise RuntimeError("this loss was already differentiated; its gradients are handed out only once")
        if not ctx.is_scaled:
            found = [None if grad is None else grad.mul_(grads[0]) for grad in found]
        return None, None, None, *found


def _losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    step: int,
    total: Tensor | None,
    wants: Sequence[bool],
    factor: float,
) -> tuple[Tensor, Gradients]:
    wants_hidden, wants_weight = wants
    grad_hidden = torch.empty_like(hidden) if wants_hidden else None
    grad_weight, into = None, total
    if wants_weight and total is None:
        # fp32, because chunks are added up; autograd casts to the dtype of the leaf's gradient.
        into = grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
    # One buffer for all chunks: two of them would be alive while a name is bound anew.
    scratch = hidden.new_empty((min(step, len(labels)), weight.shape[0]))
    for start in range(0, len(labels), step):
        rows = slice(start, start + step)
        part = hidden[rows]
        logits = torch.mm(part, weight.T, out=scratch[: len(part)])  # [n, V], overwritten by its gradient
        softmax_loss_(logits, labels[rows], losses[rows], factor, any(wants))
        if grad_hidden is not None:
            torch.mm(logits, weight, out=grad_hidden[rows])
        if wants_weight:
            assert into is not None, "a weight that wants a gradient has a sum to add to"
            _add_product_(into, logits, part)
    return losses.sum(), (grad_hidden, grad_weight)


def _add_product_(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add `grad_logits [n, V].T @ hidden [n, D]` to `total [V, D]`, with scratch for `BLOCK_ROWS` rows at most."""
    if grad_logits.dtype == total.dtype:
        total.addmm_(grad_logits.T, hidden)
        return
    if total.dtype == torch.float32 and has_float32_products(total.device.type, grad_logits.dtype):
        add_product_(total, grad_logits.T, hidden)
        return
    for start in range(0, len(total), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        total[rows] += grad_logits[:, rows].T @ hidden


# Token losses from a chunk of logits, and the logits' gradient written over them. A kind with Triton runs one kernel, which
# reads the logits from memory once and writes them once. Every other kind computes block by block in fp32.


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
