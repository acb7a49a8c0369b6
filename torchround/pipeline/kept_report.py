"""What a plan keeps from its forward stages for its backward stages, in figures for a report before a run."""

from dataclasses import dataclass, replace

from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import size_text
from torchround.pipeline.partition import StageKind
from torchround.pipeline.plan import Plan
from torchround.pipeline.run_question import RunQuestion


@dataclass(frozen=True)
class KeptReport:
    """What a plan keeps.

    - `micro_batch_bytes`: of one micro-batch; they go down once and come up once.
    - `host_bytes`: the most that is on the host at once.
    - `step_bytes`: of a whole step, in each direction.
    - `load`: the same as a share of what the links of all devices carry in a step; 0 if their rate is not known.
    - `saved_s`: seconds of recomputation that a step saves on each device, in the mean.
    """

    micro_batch_bytes: int
    host_bytes: int
    step_bytes: int
    load: float
    saved_s: float

    def text(self, timed: bool) -> str:
        """Format the figures; with `timed = False` without seconds and loads."""
        moved = f"{size_text(self.step_bytes)} per step each way"
        if timed:
            moved += f", {100 * self.load:.0f} % of PCIe on average; saves {self.saved_s:.4g} s of each device's step"
        return (
            f"kept activations: {size_text(self.micro_batch_bytes)} per micro-batch, {size_text(self.host_bytes)} of the "
            f"host at once, {moved}"
        )


def report_kept(question: RunQuestion, plan: Plan, costs: Costs) -> KeptReport | None:
    """Count what a plan keeps; None if it keeps nothing."""
    if not plan.kept:
        return None
    costs, batch = costs.keeping(plan.kept), question.host_batch()
    run = plan.partition, plan.rounds, plan.num_devices, plan.update, plan.stale_layers
    kept, nothing = (batch.boundary_bytes(*run, names) for names in (plan.kept, ()))
    step_bytes = sum(
        batch.kept_bytes(plan.kept, layer, size) for size in batch.sizes for layer in range(len(plan.kept))
    )
    rate = 0.0 if question.device is None else question.device.pcie_gb_per_s * 1e9
    capacity = plan.num_devices * plan.step_s * rate
    return KeptReport(
        micro_batch_bytes=sum(layer.kept_bytes for layer in costs.layers),
        host_bytes=kept - nothing,
        step_bytes=step_bytes,
        load=step_bytes / capacity if capacity else 0.0,
        saved_s=plan.num_micro_batches * _saved_s(plan, costs, question.recompute) / plan.num_devices,
    )


def ratio_text(question: RunQuestion, costs: Costs) -> str:
    """Format PipeOffload's k of the layers that can keep anything; empty without such layers or without a known link.

    k is the time in which all parts of a layer go to the host and come back, over the layer's forward and backward. If
    it is at most 1, computation can hide all of these copies.
    """
    # The link's rate in one direction while the other one is busy too, whatever the setting is.
    link = replace(question, keep_activations="none").keep_rule().link
    able = [layer for layer in costs.layers if layer.keepable and layer.forward_s + layer.backward_s > 0]
    if link is None or not able:
        return ""
    ratios = [
        2
        * sum(part.nbytes for part in layer.keepable)
        / link.bytes_per_s
        / (layer.forward_s + layer.backward_s)
        for layer in able
    ]
    least, most = (f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
    return (
        f"keeping all of a layer's parts copies for {least if least == most else f'{least} to {most}'} of the time that the "
        f"layer computes (k; at most 1 can be hidden), at {link.bytes_per_s / 1e9:.3g} GB/s each way ({len(able)} layers)"
    )


def _saved_s(plan: Plan, costs: Costs, recompute: str) -> float:
    """Compute the seconds that backward stages save for one micro-batch; with `"layer"` most layers save them twice."""
    saved_s = 0.0
    for stage in plan.partition.stages():
        if stage.kind is StageKind.BACKWARD:
            of_layers = [layer.saved_s for layer in costs.layers[stage.start : stage.stop]]
            saved_s += sum(of_layers) + (sum(of_layers[:-1]) if recompute == "layer" else 0.0)
    return saved_s
