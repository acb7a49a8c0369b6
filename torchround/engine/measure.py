"""Measured costs: each layer's own times, from steps that ran with one layer a stage.

In such steps every stage slot is a layer's forward, its recomputation or its backward, so the devices' reports
are the layers' costs without any further measuring. Medians, not one sample (DESIGN section 5).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from torchround.engine.reports import SlotReport
from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import Partition
from torchround.pipeline.timeline import TaskKind


def one_layer_a_stage(num_layers: int) -> Partition:
    """The partition that costs are measured with; also the one that needs the least device memory."""
    return Partition((1,) * (num_layers - 1), 1, (1,) * (num_layers - 1))


def measured_costs(counted: Costs, reports: Iterable[SlotReport]) -> Costs:
    """`counted` with the seconds of the reports, which are of steps under `one_layer_a_stage`.

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
    return replace(counted, layers=(*layers, head))
