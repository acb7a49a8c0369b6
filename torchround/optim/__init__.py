"""The update of flat host memory: AdamW, gradient clipping, loss scaling, and the learning rate of each step."""

from torchround.optim.adamw import UpdateProgress, adamw_update_
from torchround.optim.host_optimizer import HostOptimizer, HostOptimizerError, SlowerOptimizerWarning
from torchround.optim.lr_schedule import LRSchedule
from torchround.optim.stability import (
    LossScaling,
    Spike,
    SpikeBounds,
    clip_scale,
    layer_max_norm,
    sum_of_squares,
)

__all__ = [
    "HostOptimizer",
    "HostOptimizerError",
    "LRSchedule",
    "LossScaling",
    "SlowerOptimizerWarning",
    "Spike",
    "SpikeBounds",
    "UpdateProgress",
    "adamw_update_",
    "clip_scale",
    "layer_max_norm",
    "sum_of_squares",
]
