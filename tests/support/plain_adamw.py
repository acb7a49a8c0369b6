"""AdamW over loose fp32 buffers, for loops that have no store: the plain pass with exact state."""

from torch import Tensor

from torchround.optim import EXACT, UpdateBuffers, UpdateProgress, predict_, update_
from torchround.optim.rules.adamw import AdamWRule


def adamw_update_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    device_weight: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction_step: int,
    gradient_scale: float = 1.0,
    progress: UpdateProgress | None = None,
    predicts: bool = False,
) -> None:
    """Update flat fp32 buffers in place, and write the device weights, which may be `weight` itself."""
    update_(
        loose_buffers(AdamWRule(betas, eps, weight_decay), weight, exp_avg, exp_avg_sq, gradient, device_weight),
        lr=lr,
        update=bias_correction_step,
        gradient_scale=gradient_scale,
        progress=progress,
        predicts=predicts,
    )


def adamw_predict_(
    device_weight: Tensor,
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    bias_correction_step: int,
) -> None:
    """Write the device weights that `adamw_update_` with `predicts` wrote, from the state that it left."""
    buffers = loose_buffers(AdamWRule(betas, eps, 0.0), weight, exp_avg, exp_avg_sq, None, device_weight)
    predict_(buffers, lr=lr, update=bias_correction_step)


def loose_buffers(
    rule: AdamWRule, weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor | None, device_weight: Tensor
) -> UpdateBuffers:
    """Return loose buffers as a segment."""
    parts = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return UpdateBuffers(rule, EXACT, weight, None, None, device_weight, parts, gradient)
