"""The plan of a run as data: which layers each stage holds, in how many rounds, and the predicted cost.

A plan prints as a table, goes to JSON and back, and can be given in the config. `planner.make_plan` makes one.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from torchround.planning.memory import size_text
from torchround.planning.partition import KeptNames, Partition, PlanError
from torchround.planning.update_modes import mode_of
from torchround.untrusted.strict_json import parse_json

# Figures of a plan's file are below this, so that sums of them stay finite.
MOST_FIGURE = 2**62
Count = Annotated[int, Field(ge=0, lt=MOST_FIGURE)]
Amount = Annotated[float, Field(ge=0, lt=MOST_FIGURE)]
Rounds = Annotated[int, Field(ge=1, lt=MOST_FIGURE)]
PARTITION_KEYS = ("forward", "fused", "backward")

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan; `seconds` and bytes are for one micro-batch on one device."""

    kind: str
    first_layer: str
    last_layer: str
    num_layers: Count
    seconds: Amount
    weight_bytes: Count
    gradient_bytes: Count
    compute_bytes: Count


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
    - `stays_uncompiled`: as in `RunQuestion`. Losses depend on it, so a resumed run keeps it.
    """

    partition: Partition
    rounds: Rounds
    num_devices: Count
    num_micro_batches: Count
    update: str
    step_s: Amount
    bubble: Amount
    device_bytes: Count = 0
    host_activation_bytes: Count = 0
    stages: tuple[PlannedStage, ...] = ()
    stale_layers: Count = 0
    kept: KeptNames = ()
    stays_uncompiled: bool = False

    def to_json(self) -> str:
        """Write what `engine.plan` takes, then the predicted figures."""
        data = asdict(self)
        partition, stays_uncompiled = data.pop("partition"), data.pop("stays_uncompiled")
        more = {"stays_uncompiled": True} if stays_uncompiled else {}
        return json.dumps({**partition, **data, **more}, indent=2)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read what `to_json` wrote. Raises `PlanError`."""
        data = _table(text)
        partition = {key: data[key] for key in PARTITION_KEYS if key in data}
        plan = _read(Plan, {"rounds": 1, **data, "partition": partition})
        mode_of(plan.update)
        return replace(plan, kept=kept_before(plan.partition, plan.kept))

    def __str__(self) -> str:
        return self.text()

    def text(self, timed: bool = True) -> str:
        """Format the plan as a table, a line for each run of equal stages. `timed` False: no seconds, only proportions."""
        rows = [["stages", "kind", "layers each", "layers", "ms", "weights", "gradients", "compute"]]
        # Equal stages print as one line: a plan of 188 stages would otherwise fill screens.
        for _, alike in groupby(enumerate(self.stages), key=lambda numbered: _looks(numbered[1])):
            (first, stage), *rest = alike
            last, end = rest[-1] if rest else (first, stage)
            sizes = stage.weight_bytes, stage.gradient_bytes, stage.compute_bytes
            rows.append(
                [
                    f"{first}" if first == last else f"{first}-{last}",
                    *(stage.kind, f"{stage.num_layers}", layer_names(stage, end)),
                    *(f"{1e3 * stage.seconds:.2f}", *map(size_text, sizes)),
                ]
            )
        if not timed:
            rows = [[*row[:4], *row[5:]] for row in rows]
        counts = Counter(name for names in self.kept for name in names)
        parts = ", ".join(f"{name} of {number} layers" for name, number in counts.items())
        kept = [f"kept on the host for backward stages: {parts}"] if parts else []
        return "\n".join([text_table(rows, 4), *kept, self.summary(timed)])

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
        stale = (
            f" with {count} stale layer{'s' * (count != 1)}" if mode_of(self.update).updates_by_layer else ""
        )
        return (
            f"{self.num_micro_batches} micro-batches in {self.rounds} round(s) on {self.num_devices} device(s), "
            f"{self.update}{stale}: {speed}; {size_text(self.device_bytes)} per device{buffers}"
        )


def _looks(stage: PlannedStage) -> tuple[object, ...]:
    return stage.kind, stage.num_layers, round(stage.seconds, 6), stage.weight_bytes, stage.compute_bytes


def layer_names(first: PlannedStage, last: PlannedStage) -> str:
    """Name the layers of consecutive stages, lowest first; backward stages are dispatched deepest first."""
    low, high = (last, first) if first.kind == "backward" else (first, last)
    return (
        low.first_layer if low.first_layer == high.last_layer else f"{low.first_layer} .. {high.last_layer}"
    )


def text_table(rows: Iterable[Sequence[str]], num_names: int) -> str:
    """Align rows of cells in columns: the first `num_names` columns to the left, numbers to the right."""
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    aligned = [
        [cell.ljust(width) if place < num_names else cell.rjust(width) for cell in column]
        for place, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    return "\n".join("  ".join(["", *cells]).rstrip() for cells in zip(*aligned, strict=True))


def read_partition(text: str) -> tuple[Partition, int | None]:
    """Read the partition and, if they are given, the rounds of a plan's JSON; ignore other keys. Raises `PlanError`."""
    data = _table(text)
    rounds = data.get("rounds")
    return _read(Partition, data), None if rounds is None else _read(Rounds, rounds, "rounds")


def kept_before(partition: Partition, kept: KeptNames) -> KeptNames:
    """Drop the fused stage's layers from `kept`; empty if nothing is left. Raises `PlanError` for a wrong number of layers."""
    if kept and len(kept) != partition.num_layers:
        raise PlanError(f"the plan's kept is of {len(kept)} layers, its stages are of {partition.num_layers}")
    split = partition.num_layers - partition.fused
    left = tuple(names if layer < split else () for layer, names in enumerate(kept))
    return left if any(left) else ()


def _table(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `PlanError`."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise PlanError(f"a plan must be JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"a plan must be a table, given {data!r:.100}")
    return data


def _read(kind: type[Kind], data: object, name: str = "partition") -> Kind:
    """Check parsed JSON against a type; `name` is its key. Raises `PlanError` with the first mistake."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])).removeprefix("partition.") or name
        given = "" if first["type"] == "missing" else f", given {first['input']!r:.100}"
        raise PlanError(f"the plan's {key}: {first['msg'].removeprefix('Value error, ')}{given}") from error
