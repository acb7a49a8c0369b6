"""The measurements of a step by devices and the optimizer, and the planner's costs that follow from them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from statistics import median
from typing import NamedTuple

from torchround.engine.device import Mark, Stream
from torchround.planning.costs import Costs
from torchround.planning.partition import StageKind, StageTask


class SpanKind(str, Enum):
    """The kind of a span. FUSED is forward and backward in one, OFFLOAD and RELOAD are copies of activations."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FUSED = "fused"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    RELOAD = "reload"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    UPDATE = "update"
    ORTHOGONALISE = "orthogonalise"


@dataclass(frozen=True)
class Span:
    """One computation of `layers` for one micro-batch, or one copy, between two marks in its stream.

    Or one bundle's update, between two marks of the host; `layers` is then the first layer that uses it.
    """

    kind: SpanKind
    start: Mark
    end: Mark
    stream: Stream = Stream.COMPUTE
    micro_batch: int = 0
    layers: range = range(0)
    copied_bytes: int = 0

    @property
    def seconds(self) -> float:
        """The duration. Waits until the device has passed its end."""
        return self.end.seconds_since(self.start)


@dataclass
class UpdateReport:
    """The outcome of an update, which its tasks fill in. `seconds` is the time the optimizer was busy on this step.

    `grad_norm` is the norm of the unscaled gradient before clipping. `loss_scale` is the factor of this step's loss (1 except
    in float16). `fault` says why the update was skipped, if not because of an overflow under a loss scale that can fall.
    `not_finite` lists the micro-batches whose loss is not finite. `left_out` names the layers without an update in a step
    that updated others (`bounded`). `loss` and norm are those of all machines, `bundles` this machine's own.
    `peers_wait_s` is how long the optimizer waited for other machines, `sent_bytes` what went to them since the step before. `directions` are those that this machine's devices have computed for it, each with the device's index.
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
    sent_bytes: int = 0
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
        # All weights arrived before the first span, so a gap between two spans is a wait
        # for an activation or gradient.
        between_s = sum(
            max(later.start.seconds_since(earlier.end), 0.0)
            for earlier, later in zip(self.spans, self.spans[1:], strict=False)
        )
        return IdleSeconds(before_s - weights_s + between_s, weights_s - optimizer_s, optimizer_s)


def costs_from_reports(
    counted: Costs,
    reports: Iterable[StageReport],
    updates: Iterable[Sequence[Span]] = (),
    recompute: str = "stage",
) -> Costs:
    """Return `counted` with measured seconds in place of counted ones.

    Each span of the reports is one layer's forward, recomputation or backward, or the head's forward and backward: the engine
    `times_layers`, or its stages have one layer each. `updates`
    gives, for each step, the bundles that its update changed; empty for a skipped update. With
    `recompute = "layer"` all layers but a stage's last run again before their backward, in the same span. `counted` also
    says what the layers kept in those steps: their recomputations were shorter than their forwards.
    """
    samples: dict[tuple[SpanKind, int], list[float]] = defaultdict(list)
    run_again: set[int] = set()
    for report in reports:
        stage = report.task.stage
        if recompute == "layer" and stage.kind is not StageKind.FORWARD:
            run_again |= set(range(stage.start, stage.stop - 1))
        for span in report.spans:
            assert len(span.layers) <= 1, f"a span of {span.layers} says nothing about single layers"
            index = span.layers.start if span.layers else stage.start
            if span.kind is SpanKind.RECOMPUTE and counted.layers[index].kept:
                continue
            # A recomputation of all is the same work as a forward.
            kind = SpanKind.FORWARD if span.kind is SpanKind.RECOMPUTE else span.kind
            samples[kind, index].append(span.seconds)
    # Medians, because the first step (caches, compilation) and other processes make
    # single samples far too long.
    seconds = {key: median(values) for key, values in samples.items()}
    layers = []
    for index, layer in enumerate(counted.layers[:-1]):
        forward_s, backward_s = seconds[SpanKind.FORWARD, index], seconds[SpanKind.BACKWARD, index]
        if index in run_again:
            again = layer.recompute_s / layer.forward_s if layer.kept else 1.0
            backward_s = max(backward_s - forward_s * again, 0.0)
        layers.append(layer.timed(forward_s, backward_s))
    # The head's slot runs forward and backward in one go: split it in the counted proportion.
    head = counted.layers[-1]
    whole_s = seconds[SpanKind.FUSED, counted.num_layers - 1]
    share = head.forward_s / (head.forward_s + head.backward_s)
    layers.append(head.timed(whole_s * share, whole_s * (1 - share)))
    if by_step := [step for step in updates if step]:  # otherwise the optimizer's counted seconds stay
        # A shared bundle counts with its first layer, whose upload waits for it.
        of_layers = [[0.0] * len(by_step) for _ in layers]
        for number, bundles in enumerate(by_step):
            for bundle in bundles:
                of_layers[bundle.layers.start][number] += bundle.seconds
        layers = [replace(c, optimizer_s=median(s)) for c, s in zip(layers, of_layers, strict=True)]
    return replace(counted, layers=tuple(layers), launch_s=0.0)
