"""The update of flat host memory: optimizers, gradient clipping, loss scaling, and the learning rate of each step."""

from torchround.optim.formats import COMPACT, EXACT, StateFormat, StatePart, StateValue
from torchround.optim.host_optimizer import HostOptimizer, HostOptimizerError
from torchround.optim.lr_schedule import LRSchedule
from torchround.optim.optimizer import NO_STATE, Optimizer, ParameterFacts, UpdateRule, make_optimizer
from torchround.optim.stability import (
    LossScaling,
    Spike,
    SpikeBounds,
    clip_scale,
    layer_max_norm,
    sum_of_squares,
)
from torchround.optim.update_pass import UpdateBuffers, UpdateKernel, UpdateProgress, predict_, update_

__all__ = [
    "COMPACT",
    "EXACT",
    "NO_STATE",
    "HostOptimizer",
    "HostOptimizerError",
    "LRSchedule",
    "LossScaling",
    "Optimizer",
    "ParameterFacts",
    "Spike",
    "SpikeBounds",
    "StateFormat",
    "StatePart",
    "StateValue",
    "UpdateBuffers",
    "UpdateKernel",
    "UpdateProgress",
    "UpdateRule",
    "clip_scale",
    "layer_max_norm",
    "make_optimizer",
    "predict_",
    "sum_of_squares",
    "update_",
]
