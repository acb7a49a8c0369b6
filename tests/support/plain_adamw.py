"""AdamW over loose fp32 buffers, for loops that have no store: the plain pass with exact state."""

from torchround.optim import EXACT, UpdateBuffers, update_
from torchround.optim.rules.adamw import AdamWRule


def adamw_update_(
    weight, exp_avg, exp_avg_sq, gradient, device_weight, *, lr, betas, eps, weight_decay, bias_correction_step
):
    """Update flat fp32 buffers in place, and write the device weights, which may be `weight` itself."""
    rule, parts = AdamWRule(betas, eps, weight_decay), {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    update_(
        UpdateBuffers(rule, EXACT, weight, None, None, device_weight, parts, gradient),
        lr=lr,
        update=bias_correction_step,
        gradient_scale=1.0,
        progress=None,
        predicts=False,
    )
