"""What a plan moves over PCIe, against what the link carries: the roofline of RoundPipe appendix C.

Uploads and downloads go on at the same time, so the busier direction counts. A stage's weights move once a
round, activations with every micro-batch: more micro-batches per round hide the weights.
"""

from dataclasses import dataclass

from torchround.pipeline.costs import Costs, LayerCost, stage_seconds
from torchround.pipeline.partition import Stage, StageKind
from torchround.pipeline.plan import Plan


@dataclass(frozen=True)
class Transfers:
    """Bytes of a whole step over all devices, and loads as shares of the nominal link rate.

    `up_load`, `down_load`: mean over the step. `busiest_load`: the stage whose transfers fill most of its
    own time, above 1 where the devices wait for the link.
    """

    up_bytes: int
    down_bytes: int
    up_load: float
    down_load: float
    busiest_stage: int
    busiest_load: float


def plan_transfers(
    plan: Plan, costs: Costs, pcie_gb_per_s: float, recompute: str, gradient_share: float
) -> Transfers:
    """`gradient_share`: bytes of a gradient as it travels per byte of it as it is accumulated."""
    rate = pcie_gb_per_s * 1e9
    size = plan.num_micro_batches / plan.rounds
    up_total, down_total = 0.0, 0.0
    busiest = (-1.0, 0)
    for index, stage in enumerate(plan.partition.stages()):
        up, down = _stage_bytes(stage, costs, size, gradient_share)
        up_total, down_total = up_total + plan.rounds * up, down_total + plan.rounds * down
        seconds = size * sum(stage_seconds(costs, stage, recompute))
        load = max(up, down) / rate / seconds if seconds else 0.0
        busiest = max(busiest, (load, -index))
    capacity = plan.num_devices * plan.step_s * rate
    return Transfers(
        up_bytes=round(up_total),
        down_bytes=round(down_total),
        up_load=up_total / capacity if capacity else 0.0,
        down_load=down_total / capacity if capacity else 0.0,
        busiest_stage=-busiest[1],
        busiest_load=busiest[0],
    )


def _stage_bytes(stage: Stage, costs: Costs, size: float, gradient_share: float) -> tuple[float, float]:
    """Up and down in one round of `size` micro-batches."""
    layers = costs.layers[stage.start : stage.stop]
    incoming = costs.layers[stage.start - 1].boundary_bytes if stage.start else 0
    outgoing = layers[-1].boundary_bytes
    up = sum(layer.weight_bytes for layer in layers) + size * incoming
    if stage.kind is StageKind.FORWARD:
        return up, size * outgoing
    if stage.kind is StageKind.BACKWARD:
        up += size * outgoing  # the gradient of its output
    down = gradient_share * sum(layer.gradient_bytes for layer in layers) + size * incoming
    return up, down


def micro_batches_to_hide(layer: LayerCost, pcie_gb_per_s: float) -> float:
    """Micro-batches per round from which on this layer's forward takes as long as its upload.

    The batch at which appendix C's operational intensity reaches the ridge point, in micro-batches; infinite
    where a micro-batch's activations alone take longer to move than to compute.
    """
    rate = pcie_gb_per_s * 1e9
    spare_s = layer.forward_s - layer.boundary_bytes / rate
    return layer.weight_bytes / rate / spare_s if spare_s > 0 else float("inf")
