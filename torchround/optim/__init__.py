"""What an update does to flat host memory: AdamW, gradient clipping, and the learning rate of each step."""

from torchround.optim.adamw import UpdateProgress, adamw_update_
from torchround.optim.clip import clip_scale, sum_of_squares
from torchround.optim.loss_scale import LossScaling
from torchround.optim.lr_schedule import LRSchedule
from torchround.optim.spikes import Spike, SpikeBounds
from torchround.optim.weight_decay import decayed_names

__all__ = [
    "LRSchedule",
    "LossScaling",
    "Spike",
    "SpikeBounds",
    "UpdateProgress",
    "adamw_update_",
    "clip_scale",
    "decayed_names",
    "sum_of_squares",
]
