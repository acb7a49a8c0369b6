"""The measurements of a step by devices and the optimizer."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchround.engine.device import Mark, Span
from torchround.planning.partition import StageTask


@dataclass
class UpdateReport:
    """The outcome of an update, which its tasks fill in. `seconds` is the time the optimizer was busy on this step.

    `grad_norm` is the norm of the unscaled gradient before clipping. `loss_scale` is the factor of this step's loss (1 except
    in float16). `fault` says why the update was skipped, if not because of an overflow under a loss scale that can fall.
    `not_finite` lists the micro-batches whose loss is not finite. `left_out` names the layers without an update in a step
    that updated others (`bounded`). `loss` and norm are those of all machines, `bundles` this machine's own.
    `peers_wait_s` is how long the optimizer waited for other machines. `directions` are those that this machine's devices
    have computed for it, each with the device's index.
    """

    grad_norm: float = math.nan
    skipped: bool = True
    seconds: float = 0.0
    bundles: tuple[Span, ...] = ()
    loss_scale: float = 1.0
    fault: str = "not decided"
    not_finite: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    loss: float = math.nan
    peers_wait_s: float = 0.0
    directions: tuple[tuple[int, Span], ...] = ()


class IdleSeconds(NamedTuple):
    """The seconds in which a device waited for an input or gradient, the upload of weights, or their update."""

    input: float
    weights: float
    optimizer: float


@dataclass(frozen=True)
class StageReport:
    """The measurements of one stage slot on its device. Reading a time waits until the device has passed the slot.

    `idle_since` is the end of the slot before it on the same device, None for the first. `weights_ready` marks the arrival of
    its weights. `update_wait_s` is how long the device's thread waited for the optimizer to write them. The bytes crossed the
    link while the device worked on the slot. Busy and idle times add up to the span from `idle_since` to the slot's end.
    """

    task: StageTask
    idle_since: Mark | None
    weights_ready: Mark
    update_wait_s: float
    spans: tuple[Span, ...]
    uploaded_bytes: int
    downloaded_bytes: int

    @cached_property
    def busy_s(self) -> float:
        return sum(span.seconds for span in self.spans)

    @cached_property
    def idle_s(self) -> IdleSeconds:
        before_s = weights_s = 0.0
        if self.idle_since is not None:
            before_s = max(self.spans[0].start.seconds_since(self.idle_since), 0.0)
            weights_s = min(max(self.weights_ready.seconds_since(self.idle_since), 0.0), before_s)
        # The thread may wait for an update while its device still computes: only the idle part counts.
        optimizer_s = min(self.update_wait_s, weights_s)
        # All weights arrived before the first span: a gap between two spans is a wait for an activation or gradient.
        between_s = sum(
            max(later.start.seconds_since(earlier.end), 0.0)
            for earlier, later in zip(self.spans, self.spans[1:], strict=False)
        )
        return IdleSeconds(before_s - weights_s + between_s, weights_s - optimizer_s, optimizer_s)


def layer_times(reports: Iterable[StageReport]) -> dict[tuple[str, int], list[float]]:
    """Collect the seconds of each layer's spans by kind, for `measured_costs`. Each span must be of one layer."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for span in (span for report in reports for span in report.spans):
        assert len(span.layers) == 1, f"a span of {span.layers} says nothing about single layers"
        times[span.kind.value, span.layers.start].append(span.seconds)
    return times
