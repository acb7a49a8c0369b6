"""Measured costs: each layer's own times, from steps that ran with one layer a stage.

In such steps every stage slot is a layer's forward, its recomputation or its backward, so the devices' reports
are the layers' costs without any further measuring, and the optimizer reports each layer's update anyway. Medians,
not one sample (DESIGN section 5).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from torchround.engine.optimizer_worker import BundleUpdate
from torchround.engine.reports import SlotReport
from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import Partition
from torchround.pipeline.timeline import TaskKind


def one_layer_a_stage(num_layers: int) -> Partition:
    """The partition that costs are measured with; also the one that needs the least device memory."""
    return Partition((1,) * (num_layers - 1), 1, (1,) * (num_layers - 1))


def measured_costs(
    counted: Costs, reports: Iterable[SlotReport], updates: Iterable[Sequence[BundleUpdate]] = ()
) -> Costs:
    """`counted` with the seconds of the reports, which are of steps under `one_layer_a_stage`.

    `updates`: the bundles that each step's update updated, none where it was skipped.

    A forward and a recomputation are the same work; the head, whose slot runs both ways in one go, keeps the
    counted proportion between its two parts.
    """
    samples: dict[tuple[TaskKind, int], list[float]] = defaultdict(list)
    for report in reports:
        for piece in report.pieces:
            kind = TaskKind.FORWARD if piece.kind is TaskKind.RECOMPUTE else piece.kind
            samples[kind, report.task.stage.start].append(piece.end.seconds_since(piece.start))
    seconds = {key: median(values) for key, values in samples.items()}
    last = counted.num_layers - 1
    layers = [
        replace(
            layer,
            forward_s=seconds[TaskKind.FORWARD, index],
            backward_s=seconds[TaskKind.BACKWARD, index],
        )
        for index, layer in enumerate(counted.layers[:last])
    ]
    head = counted.layers[last]
    whole_s = seconds[TaskKind.FUSED, last]
    share = head.forward_s / (head.forward_s + head.backward_s)
    head = replace(head, forward_s=whole_s * share, backward_s=whole_s * (1 - share))
    return _with_updates(replace(counted, layers=(*layers, head)), [step for step in updates if step])


def _with_updates(costs: Costs, updates: Sequence[Sequence[BundleUpdate]]) -> Costs:
    """The optimizer's seconds, a shared bundle's with its first layer: that one's upload waits for it."""
    if not updates:
        return costs
    seconds = [[0.0] * len(updates) for _ in costs.layers]
    for step, bundles in enumerate(updates):
        for bundle in bundles:
            seconds[bundle.layer][step] += bundle.end_s - bundle.start_s
    layers = (replace(c, optimizer_s=median(s)) for c, s in zip(costs.layers, seconds, strict=True))
    return replace(costs, layers=tuple(layers))
