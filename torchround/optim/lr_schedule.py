"""The learning rate as a pure function of the step: a linear warm-up, then constant or a decay to a floor.

With t = step + 1 updates done after this one, W warm-up steps and S steps in all:

    t <= W   lr * t / W                     the first step's rate is above 0, step W has the full rate
    t > W    lr * (1 - (1 - floor) * (1 - shape(p))),  p = (t - W) / (S - W),  floor = min_lr_factor

so the last step's rate is the floor itself. A schedule keeps nothing between calls: a resumed run needs the step
alone.
"""

import math

from torchround.config import LRScheduleTable

# The last part of the run after the warm-up in which `wsd` (warmup-stable-decay, arXiv 2404.06395) decays.
WSD_DECAY_FRACTION = 0.2


class LRSchedule:
    """The learning rate of every step: `schedule(step)` is the rate of the update from `v(step)` to `v(step + 1)`."""

    def __init__(self, table: LRScheduleTable, lr: float, total_steps: int) -> None:
        self.table = table
        self.lr = lr
        self.total_steps = total_steps

    def __call__(self, step: int) -> float:
        """Compute the rate for `step`, counted from 0. From `total_steps` on it is the last step's rate."""
        updates = min(step + 1, self.total_steps)
        warmup = self.table.warmup_steps
        if updates <= warmup:
            return self.lr * updates / warmup
        if self.table.decay == "none":
            return self.lr
        progress = (updates - warmup) / (self.total_steps - warmup)
        floor = self.table.min_lr_factor
        return self.lr * (1.0 - (1.0 - floor) * (1.0 - _shape(self.table.decay, progress)))


def _shape(decay: str, progress: float) -> float:
    """Compute the share of the way from floor to full rate at `progress` in (0, 1]; 0 at the end."""
    if decay == "linear":
        return 1.0 - progress
    if decay == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return min(1.0, (1.0 - progress) / WSD_DECAY_FRACTION)
