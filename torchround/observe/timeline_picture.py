"""Pictures of simulated schedules: one row per device, colours by layer, idle time hatched, transfers below.

`simulate.py --plot` draws them. Only this module imports matplotlib at once, so the command imports it last.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch, Rectangle

from torchround.pipeline.baselines import ScheduleReport
from torchround.pipeline.timeline import COMPUTE, HOST, Task, TaskKind
from torchround.untrusted.regular_file import replaced_whole

# Grey mixed into a layer's colour by the kind of task, as (share, grey level). Backwards have the full colour.
SHADES = {
    TaskKind.FORWARD: (0.6, 1.0),
    TaskKind.RECOMPUTE: (0.8, 1.0),
    TaskKind.BACKWARD: (0.0, 1.0),
    TaskKind.FUSED: (0.0, 1.0),
    TaskKind.WEIGHT_GRADIENT: (0.35, 0.35),
    TaskKind.OFFLOAD: (0.45, 1.0),
    TaskKind.WEIGHTS: (0.45, 1.0),
    TaskKind.GRADIENTS: (0.45, 1.0),
    TaskKind.ORTHOGONALISE: (0.35, 0.35),
}
NAMES = {
    TaskKind.FORWARD: "forward",
    TaskKind.RECOMPUTE: "recompute",
    TaskKind.BACKWARD: "backward",
    TaskKind.WEIGHT_GRADIENT: "weight gradient",
    TaskKind.ORTHOGONALISE: "orthogonalisation",
}
# Schedules whose usual name is not that of the command in capitals.
TITLES = {
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved 1F1B (Megatron-LM)",
    "looped_bfs": "Looped BFS",
    "async_1f1b": "Asynchronous 1F1B (PipeDream)",
    "mobius": "Mobius",
    "roundpipe_sync": "torchround (RoundPipe), update after each step",
    "roundpipe_async": "torchround (RoundPipe), updates one step late",
}
COLOURS = colormaps["turbo"]
IDLE: dict[str, Any] = {"facecolor": "#f4f4f4", "edgecolor": "#cccccc", "hatch": "/////", "linewidth": 0}
WIDTH_INCHES, ROW_INCHES, NUMBER_INCHES = 11.0, 0.24, 0.1
FUSED_FORWARD = 0.35  # of the height of a fused task: drawn in the forward's shade, above the backward's
STRIP = 0.22  # height of a device's transfers, when a row has height 1


def plot_reports(
    reports: Sequence[ScheduleReport], num_layers: int, path: Path, title: str = "", dpi: int = 120
) -> None:
    """Write one picture with a panel per report, all on the same time scale. `title` says what was simulated."""
    windows = [shown_window(report) for report in reports]
    span_s = max(stop - start for start, stop in windows)
    rows = [report.timeline.num_devices for report in reports]
    height_inches = sum(rows) * ROW_INCHES + 0.42 * len(rows) + 0.75
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    ratios = {"height_ratios": rows}
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True, gridspec_kw=ratios)[:, 0]
    for panel, report, (start_s, stop_s) in zip(panels, reports, windows, strict=True):
        numbered_s = NUMBER_INCHES * span_s / WIDTH_INCHES
        _draw(panel, report, num_layers, start_s, stop_s, numbered_s)
    panels[-1].set_xlim(0, span_s * 1e3)
    panels[-1].set_xlabel("ms", fontsize=8, loc="right", labelpad=0)
    _legend(figure, list(panels), reports, num_layers, title)
    with replaced_whole(path) as file:
        figure.savefig(file, dpi=dpi, format=path.suffix[1:] or None)


def shown_window(report: ScheduleReport) -> tuple[float, float]:
    """Return the seconds of the timeline to show: a step from idle devices, or one step of the steady state."""
    ends = report.timeline.step_ends_s()
    if len(ends) == 1:
        return 0.0, report.timeline.makespan_s
    # The first steps still fill the devices and the last ones drain them; the middle is settled.
    start_s = ends[len(ends) // 2]
    return start_s, start_s + report.makespan_s


def _draw(
    panel: Axes, report: ScheduleReport, num_layers: int, start_s: float, stop_s: float, numbered_s: float
) -> None:
    """Draw one row per device: the compute stream as boxes, its transfers as strips underneath."""
    line = report.timeline
    per_step = 1 + max(task.micro_batch for task in line.tasks if task.step == 0)
    transfers = sorted({t.stream for t in line.tasks if t.device != HOST and t.duration_s > 0} - {COMPUTE})
    strip = STRIP if transfers else 0.0
    for device in range(line.num_devices):
        panel.add_patch(Rectangle((0, device - 0.42), (stop_s - start_s) * 1e3, 0.84 - strip, **IDLE))
        for stream in (COMPUTE, *transfers):
            bottom, height = device - 0.42, 0.84 - strip
            if stream != COMPUTE:
                height = strip / len(transfers)
                bottom += 0.84 - strip + transfers.index(stream) * height
            for index in line.of_device(device, stream):
                begin_s, end_s = max(line.start_s[index], start_s), min(line.end_s[index], stop_s)
                if begin_s >= end_s:
                    continue
                task = line.tasks[index]
                left_ms, width_ms = (begin_s - start_s) * 1e3, (end_s - begin_s) * 1e3
                fill = _colour(task, num_layers)
                panel.add_patch(Rectangle((left_ms, bottom), width_ms, height, fc=fill, ec="white", lw=0.25))
                upper = FUSED_FORWARD * height if task.kind is TaskKind.FUSED else 0.0
                if upper:
                    pale = _colour(replace(task, kind=TaskKind.FORWARD), num_layers)
                    panel.add_patch(Rectangle((left_ms, bottom), width_ms, upper, fc=pale, lw=0))
                # Work for an update is of no micro-batch.
                if stream == COMPUTE and task.micro_batch >= 0 and end_s - begin_s > numbered_s:
                    place = left_ms + width_ms / 2, bottom + (height + upper) / 2
                    _number(panel, task.micro_batch % per_step, place, fill)
    panel.set_ylim(line.num_devices - 0.5, -0.5)
    panel.set_yticks(range(line.num_devices), [f"device {index}" for index in range(line.num_devices)])
    panel.tick_params(labelsize=7, length=2)
    panel.set_title(_title(report), loc="left", fontsize=8.5, pad=3)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _number(panel: Axes, number: int, place: tuple[float, float], fill: tuple[float, ...]) -> None:
    red, green, blue = fill[:3]
    # White on dark colours, dark on light ones: the weights are the eye's sensitivity to red, green and blue.
    colour = "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else "#333333"
    panel.text(*place, f"{number}", ha="center", va="center", fontsize=5, color=colour)


def _colour(task: Task, num_layers: int) -> tuple[float, ...]:
    middle = (task.layers.start + task.layers.stop - 1) / 2 / max(1, num_layers - 1)
    share, grey = SHADES.get(task.kind, (0.0, 1.0))
    # The ends of the colour map are too dark to tell a forward from a backward.
    return tuple(share * grey + (1 - share) * part for part in COLOURS(0.08 + 0.84 * middle)[:3])


def _title(report: ScheduleReport) -> str:
    settled = ", steady state" if len(report.timeline.step_ends_s()) > 1 else ""
    name = TITLES.get(report.name, report.name.replace("_", "-").upper())
    return f"{name}: {report.makespan_s * 1e3:.0f} ms per step{settled}, bubble {report.bubble:.1%}"


def _legend(
    figure: Figure, panels: Sequence[Axes], reports: Sequence[ScheduleReport], num_layers: int, title: str
) -> None:
    used = {task.kind for report in reports for task in report.timeline.tasks}
    sample = COLOURS(0.3)[:3]
    shades = {
        kind: Patch(fc=tuple(share * grey + (1 - share) * part for part in sample))
        for kind, (share, grey) in SHADES.items()
    }
    shown: dict[str, Any] = {NAMES[kind]: shades[kind] for kind in SHADES if kind in used and kind in NAMES}
    if TaskKind.FUSED in used:
        shown["both in one"] = shades[TaskKind.FORWARD], shades[TaskKind.FUSED]
    shown["idle"] = Patch(**IDLE)
    if any(
        task.stream != COMPUTE and task.device != HOST and task.duration_s > 0
        for report in reports
        for task in report.timeline.tasks
    ):
        shown["strip below a device: its transfers"] = shades[TaskKind.OFFLOAD]
    # The title is the legend's, which the layout keeps clear of the panels; a title of the figure would cover the legend.
    figure.legend(
        list(shown.values()),
        list(shown),
        title=title,
        title_fontsize=9.5,
        alignment="left",
        loc="outside upper left",
        ncols=len(shown),
        fontsize=7,
        frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
    layers = ScalarMappable(Normalize(0, num_layers - 1), COLOURS)
    bar = figure.colorbar(layers, ax=list(panels), fraction=0.012, pad=0.005, aspect=40)
    bar.set_label("layer", fontsize=7, labelpad=0)
    bar.ax.tick_params(labelsize=6, length=2)
