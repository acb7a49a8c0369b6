"""The plan of a run as data: which layers each stage holds, in how many rounds, and the predicted cost.

A plan prints as a table, goes to JSON and back, and can be given in the config. `planner.make_plan` makes
one. `plan_transfers` compares what a plan moves over PCIe with what the link carries.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.memory import size_text
from torchround.pipeline.partition import Partition, PlanError
from torchround.pipeline.simulation.stage_times import KeptLink, LayerSums
from torchround.untrusted.strict_json import parse_json

# Largest figure accepted in a plan's file: sums of such figures stay finite.
MOST_FIGURE = 2**62


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan; `seconds` and bytes are for one micro-batch on one device."""

    kind: str
    first_layer: str
    last_layer: str
    num_layers: int
    seconds: float
    weight_bytes: int
    gradient_bytes: int
    compute_bytes: int


@dataclass(frozen=True)
class Plan:
    """A partition with its number of rounds and its predicted figures.

    - `step_s`: seconds per step in the steady state.
    - `bubble`: idle share of the devices, `1 - busy / (N x step_s)`; busy counts all that the plan executes,
      recomputation included.
    - `device_bytes`: what each device allocates.
    - `host_activation_bytes`: what waits on the host between stages.
    - `stale_layers`: in `bounded`, the first layers, whose weights the forward reads one version older.
    - `kept`: for each layer the parts whose results its forward stage keeps on the host for its backward stage;
      empty if no layer keeps any.
    """

    partition: Partition
    rounds: int
    num_devices: int
    num_micro_batches: int
    update: str
    step_s: float
    bubble: float
    device_bytes: int = 0
    host_activation_bytes: int = 0
    stages: tuple[PlannedStage, ...] = ()
    stale_layers: int = 0
    kept: tuple[tuple[str, ...], ...] = ()

    def to_json(self) -> str:
        """Write what `engine.plan` takes, then the predicted figures."""
        data = asdict(self)
        partition = data.pop("partition")
        return json.dumps({**partition, **data}, indent=2)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read what `to_json` wrote. Raises `PlanError`."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise PlanError(f"a plan must be JSON: {error}") from error
        partition, rounds = read_partition(data)
        stages = data.get("stages", [])
        if not isinstance(stages, list):
            raise PlanError("the plan's stages must be a list of tables")
        return Plan(
            partition=partition,
            rounds=rounds,
            kept=read_kept(data, partition),
            stages=tuple(PlannedStage(**_read_fields(PlannedStage, stage)) for stage in stages),
            **_read_fields(Plan, data),
        )

    def __str__(self) -> str:
        return self.text()

    def text(self, timed: bool = True) -> str:
        """Format the plan as a table, with one line per run of equal stages, and the predicted figures.

        With `timed = False` the table has no seconds: the costs behind the plan are proportions, not times.
        """
        title = f"{'stages':>9}  {'kind':<8}  {'layers':<33}  {'ms':>8}  {'weights':>9}  {'compute':>9}"
        lines = [title if timed else title.replace(f"  {'ms':>8}", "")]
        for first, last, stage in self.runs():
            numbers = f"{first}" if first == last else f"{first}-{last}"
            names = layer_names(stage, self.stages[last])
            layers = f"{stage.num_layers} of {names}" if " .. " in names else names
            parts = [f"{numbers:>9}", f"{stage.kind:<8}", f"{layers:<33}"]
            parts += [f"{1e3 * stage.seconds:8.2f}"] if timed else []
            parts += [f"{size_text(size):>9}" for size in (stage.weight_bytes, stage.compute_bytes)]
            lines.append("  ".join(parts))
        return "\n".join([*lines, *self.kept_lines(), self.summary(timed)])

    def kept_lines(self) -> list[str]:
        """Say in at most one line which parts of how many layers are kept."""
        counts = Counter(name for names in self.kept for name in names)
        parts = ", ".join(f"{name} of {number} layers" for name, number in counts.items())
        return [f"kept on the host for backward stages: {parts}"] if parts else []

    def summary(self, timed: bool = True) -> str:
        """Format the predicted figures in one line."""
        bubble = f"bubble (idle share of the devices) {100 * self.bubble:.2f} %"
        speed = f"step {self.step_s:.4g} s, {bubble}"
        if not timed:
            speed = f"{bubble} if time is in proportion to counted work; the step time is unknown until steps are measured"
        # Of a virtual device only the buffers are counted while it runs (`device_peak_gib`).
        compute_bytes = max((stage.compute_bytes for stage in self.stages), default=0)
        buffers = f", {size_text(self.device_bytes - compute_bytes)} of it buffers" if compute_bytes else ""
        count = self.stale_layers
        stale = f" with {count} stale layer{'s' * (count != 1)}" if self.update == "bounded" else ""
        return (
            f"{self.num_micro_batches} micro-batches in {self.rounds} round(s) on {self.num_devices} device(s), "
            f"{self.update}{stale}: {speed}; {size_text(self.device_bytes)} per device{buffers}"
        )

    def runs(self) -> list[tuple[int, int, PlannedStage]]:
        """Group consecutive stages that cost the same: numbers of the first and the last, and the first stage."""
        runs: list[tuple[int, int, PlannedStage]] = []
        for index, stage in enumerate(self.stages):
            # Equal stages print as one line: a plan of 188 stages would otherwise fill screens.
            if runs and _looks(runs[-1][2]) == _looks(stage):
                runs[-1] = (runs[-1][0], index, runs[-1][2])
            else:
                runs.append((index, index, stage))
        return runs


def layer_names(first: PlannedStage, last: PlannedStage) -> str:
    """Name the layers of consecutive stages, lowest first; backward stages are dispatched deepest first."""
    low, high = (last, first) if first.kind == "backward" else (first, last)
    return (
        low.first_layer if low.first_layer == high.last_layer else f"{low.first_layer} .. {high.last_layer}"
    )


def _looks(stage: PlannedStage) -> tuple[object, ...]:
    return stage.kind, stage.num_layers, round(stage.seconds, 6), stage.weight_bytes, stage.compute_bytes


def _read_fields(kind: type[Plan | PlannedStage], data: object) -> dict[str, Any]:
    """Read the texts and figures of a plan or stage, so that they can be printed and summed. Raises `PlanError`."""
    # `rounds` and the partition are read by `read_partition`, because `engine.plan` gives them too.
    wanted = {field.name: field.type for field in fields(kind) if field.type in (str, int, float)}
    wanted.pop("rounds", None)
    if isinstance(data, Mapping) and kind is Plan:
        data = {"stale_layers": 0, **data}  # plans of older versions have none
    if not isinstance(data, Mapping) or not wanted.keys() <= data.keys():
        found = data.keys() if isinstance(data, Mapping) else ()
        raise PlanError(f"the plan lacks {sorted(wanted.keys() - found)}")
    for name, what in wanted.items():
        value = data[name]
        is_figure = type(value) in (int, float) and 0 <= value < MOST_FIGURE
        if not (isinstance(value, str) if what is str else is_figure):
            raise PlanError(
                f"the plan's {name} = {str(value)[:100]} must be a {'text' if what is str else 'number'}"
            )
    return {name: data[name] for name in wanted}


def read_partition(data: object) -> tuple[Partition, int]:
    """Read the partition and the rounds of a plan's table; ignore other keys. Raises `PlanError`."""
    if not isinstance(data, Mapping):
        raise PlanError(f"a plan must be a table, given {data!r}")
    if missing := [key for key in ("forward", "fused", "backward") if key not in data]:
        raise PlanError(f"the plan lacks {missing}")
    rounds = data.get("rounds", 1)
    counts: list[Any] = [rounds, data["fused"]]
    for key in ("forward", "backward"):
        if not isinstance(data[key], (list, tuple)):
            raise PlanError(f"{key} = {data[key]!r} must be a list of layer counts")
        counts += data[key]
    if wrong := [count for count in counts if isinstance(count, bool) or not isinstance(count, int)]:
        raise PlanError(f"layer counts and rounds must be whole numbers, given {wrong[0]!r}")
    if rounds < 1:
        raise PlanError(f"rounds = {rounds} must be at least 1")
    return Partition.from_lists(data["forward"], data["fused"], data["backward"]), rounds


def read_kept(data: Mapping[str, object], partition: Partition) -> tuple[tuple[str, ...], ...]:
    """Read what each layer keeps from a plan's table; empty if the table says nothing of it. Raises `PlanError`."""
    given: Any = data.get("kept") or ()
    is_list = isinstance(given, (list, tuple)) and all(isinstance(names, (list, tuple)) for names in given)
    if not is_list or any(not isinstance(name, str) for names in given for name in names):
        raise PlanError("the plan's kept must be a list of names for each layer")
    if given and len(given) != partition.num_layers:
        raise PlanError(
            f"the plan's kept is of {len(given)} layers, its stages are of {partition.num_layers}"
        )
    return kept_before(partition, tuple(tuple(names) for names in given))


def kept_before(partition: Partition, kept: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Return `kept` without the layers of the fused stage, which keep nothing; empty if nothing is left."""
    split = partition.num_layers - partition.fused
    left = tuple(names if layer < split else () for layer, names in enumerate(kept))
    return left if any(left) else ()


@dataclass(frozen=True)
class Transfers:
    """The bytes of a whole step over all devices, and loads as shares of the nominal link rate.

    Uploads and downloads run at the same time, so the busier direction counts.

    - `up_load`, `down_load`: mean over the step.
    - `busiest_load`: load of the stage whose transfers fill most of its own time; above 1 its device waits
      for the link.
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
    """Compare what a plan moves with what the links carry: the roofline of RoundPipe's appendix C.

    A stage's weights move once per round, activations with each micro-batch, so more micro-batches per round
    hide the weights. `gradient_share`: bytes of a gradient as it travels per byte of it as it is accumulated.
    """
    rate, micro_batches = pcie_gb_per_s * 1e9, plan.num_micro_batches
    link = KeptLink(rate, gradient_share)
    sums = LayerSums(costs.keeping(plan.kept), recompute, link, micro_batches)
    up, down = sums.stage_bytes(plan.partition, plan.rounds, plan.stale_layers)
    up_total, down_total = micro_batches * sum(up), micro_batches * sum(down)
    # Uploads and downloads use different directions of the link, so the larger of the two is a stage's load.
    loads = [
        max(moved) / rate / (early_s + late_s) if early_s + late_s else 0.0
        for *moved, early_s, late_s in zip(up, down, *sums.seconds(plan.partition), strict=True)
    ]
    capacity = plan.num_devices * plan.step_s * rate
    return Transfers(
        up_bytes=round(up_total),
        down_bytes=round(down_total),
        up_load=up_total / capacity if capacity else 0.0,
        down_load=down_total / capacity if capacity else 0.0,
        busiest_stage=loads.index(max(loads)),
        busiest_load=max(loads),
    )


def micro_batches_to_hide(layer: LayerCost, pcie_gb_per_s: float) -> float:
    """Compute the micro-batches per round for which this layer's forward takes as long as its upload.

    This is the batch whose operational intensity reaches the ridge point (RoundPipe appendix C). It is
    infinite if the activations of a micro-batch take longer to move than to compute.
    """
    rate = pcie_gb_per_s * 1e9
    spare_s = layer.forward_s - layer.boundary_bytes / rate
    return layer.weight_bytes / rate / spare_s if spare_s > 0 else float("inf")
