"""The sum of token losses of a head whose logits are the model's own matter: capped, scaled, biased.

As in the loss of our own models, both gradients are made in the forward, chunk by chunk, so that memory holds one
chunk of logits.

Shapes: N tokens of the micro-batch, n of a chunk, D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchround.layer import IGNORED_LABEL
from torchround.models.common.loss import DIFFERENTIATED, chunk_tokens

LogitsOf = Callable[[Tensor], Tensor]


def any_loss_sum(
    logits_of: LogitsOf,
    hidden: Tensor,
    labels: Tensor,
    weights: Sequence[Tensor],
    loss_factor: float | None = None,
) -> Tensor:
    """Add up `-log softmax(logits)[label]` over tokens to fp32 `[]`; ignored labels add nothing.

    `logits_of` maps `[1, n, D]` to `[1, n, V]` and may use only `weights`. `hidden` is `[N, D]`, `labels` `[N]` int64.
    May be differentiated once. `loss_factor` promises that the gradient of the result is this number: gradients are
    then computed with it from the start, because unscaled ones are too small for float16.
    """
    return _AnyLoss.apply(logits_of, loss_factor, torch.is_grad_enabled(), labels, hidden, *weights)


class _AnyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_of: LogitsOf,
        loss_factor: float | None,
        grad_enabled: bool,
        labels: Tensor,
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        wants = [grad_enabled and needed for needed in ctx.needs_input_grad[4:]]
        ctx.is_scaled = loss_factor is not None
        factor = None
        if loss_factor is not None:
            factor = torch.full((), loss_factor, dtype=torch.float32, device=hidden.device)
        trained = [weight for weight, wanted in zip(weights, wants[1:], strict=True) if wanted]
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        # fp32, because chunks are added up; autograd casts to the dtype of the leaf's gradient.
        totals = [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]
        losses, step = [], None
        start = 0
        while start < len(labels):
            rows = slice(start, start + (step or 16))
            chunk = hidden[rows].detach().requires_grad_(wants[0])
            with torch.set_grad_enabled(any(wants)):
                logits = logits_of(chunk[None])[0].float()
                loss = F.cross_entropy(logits, labels[rows], ignore_index=IGNORED_LABEL, reduction="sum")
            losses.append(loss.detach())
            if any(wants):
                leaves = [*([chunk] if wants[0] else []), *trained]
                found = list(torch.autograd.grad(loss, leaves, factor, allow_unused=True))
                if grad_hidden is not None:
                    grad_hidden[rows] = found.pop(0)
                for total, grad in zip(totals, found, strict=True):
                    if grad is not None:
                        total += grad
            start = rows.stop
            # The first chunk tells how many logits a token has.
            step = chunk_tokens(logits.shape[-1])
            del logits, loss
        numbers = iter(totals)
        ctx.gradients = [grad_hidden, *(next(numbers) if wanted else None for wanted in wants[1:])]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise RuntimeError(DIFFERENTIATED)
        if not ctx.is_scaled:
            found = [None if grad is None else grad.mul_(grads[0]) for grad in found]
        return None, None, None, None, *found
