"""The outcome of a step's update, as the optimizer's thread reports it."""

import math
from dataclasses import dataclass

from torchround.engine.direction_jobs import LandedDirection


@dataclass(frozen=True)
class BundleUpdate:
    """The time at which one bundle was updated, by `time.perf_counter`. `layer` is the first layer that uses it."""

    layer: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class UpdateReport:
    """The outcome of an update. `seconds` is the time the optimizer was busy on this step.

    `grad_norm` is the norm of the unscaled gradient before clipping. `loss_scale` is the factor of this
    step's loss (1 except in float16). `fault` says why the update was skipped; it is empty for an overflow
    under a loss scale that can still fall. `not_finite` lists the micro-batches whose loss is not finite.
    `waited_for_save_s` is how long bundles had to wait because a save beside training had not read them yet.
    `left_out` names the layers without an update in a step that updated others (`bounded`). `loss` is the mean loss
    of the step. On several machines it is that of all, like the norm; `bundles` are this machine's own.
    `peers_wait_s` is how long the optimizer waited for other machines, and `sent_bytes` what this machine has sent to
    them since the step before. `directions` are those that this machine's devices have computed for it.
    """

    grad_norm: float
    skipped: bool
    seconds: float
    bundles: tuple[BundleUpdate, ...] = ()
    loss_scale: float = 1.0
    fault: str = ""
    not_finite: tuple[int, ...] = ()
    waited_for_save_s: float = 0.0
    left_out: tuple[str, ...] = ()
    loss: float = math.nan
    peers_wait_s: float = 0.0
    sent_bytes: int = 0
    directions: tuple[LandedDirection, ...] = ()
