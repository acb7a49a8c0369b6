"""Pictures of simulated schedules: one row per device, colours by layer, idle time hatched.

`--plot` draws them. This module imports matplotlib at once, so the command imports it last.
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

from torchround.planning.partition import SpanKind
from torchround.simulate.schedules import ScheduleReport
from torchround.simulate.timeline import Task
from torchround.untrusted.regular_file import replaced_whole

# Names in the legend.
NAMES = {
    SpanKind.FORWARD: "forward",
    SpanKind.RECOMPUTE: "recompute",
    SpanKind.BACKWARD: "backward",
    SpanKind.WEIGHT_GRADIENT: "weight gradient",
    SpanKind.ORTHOGONALISE: "orthogonalisation",
}
# Grey mixed into a layer's colour by the kind of task, as (share, grey level). Others have the full colour.
SHADES = {
    SpanKind.FORWARD: (0.6, 1.0),
    SpanKind.RECOMPUTE: (0.8, 1.0),
    **dict.fromkeys((SpanKind.WEIGHT_GRADIENT, SpanKind.ORTHOGONALISE), (0.35, 0.35)),
}
# Schedules whose usual name is not that of the command in capitals.
TITLES = {
    "interleaved_1f1b": "Interleaved 1F1B (Megatron-LM)",
    "looped_bfs": "Looped BFS",
    "async_1f1b": "Asynchronous 1F1B (PipeDream)",
    "roundpipe_sync": "torchround (RoundPipe), update after each step",
    "roundpipe_async": "torchround (RoundPipe), updates one step late",
}
COLOURS = colormaps["turbo"]
IDLE: dict[str, Any] = {"facecolor": "#f4f4f4", "edgecolor": "#cccccc", "hatch": "/////", "linewidth": 0}
WIDTH_INCHES, ROW_INCHES, NUMBER_INCHES = 11.0, 0.24, 0.1
FUSED_FORWARD = 0.35  # of the height of a fused task: drawn in the forward's shade, above the backward's
ROW = 0.84  # height of a device's boxes when a row has height 1


def plot_reports(reports: Sequence[ScheduleReport], num_layers: int, path: Path, title: str) -> None:
    """Write one picture with a panel per report, all on the same time scale. `title` says what was simulated."""
    windows = [shown_window(report) for report in reports]
    span_s = max(stop - start for start, stop in windows)
    rows = [report.timeline.num_devices for report in reports]
    height_inches = sum(rows) * ROW_INCHES + 0.42 * len(rows) + 0.75
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    for panel, report, window in zip(panels, reports, windows, strict=True):
        _draw(panel, report, num_layers, window, NUMBER_INCHES * span_s / WIDTH_INCHES)
    panels[-1].set_xlim(0, span_s * 1e3)
    panels[-1].set_xlabel("ms", fontsize=8, loc="right", labelpad=0)
    _legend(figure, [task for report in reports for task in report.timeline.tasks], title)
    layers = ScalarMappable(Normalize(0, num_layers - 1), COLOURS)
    bar = figure.colorbar(layers, ax=list(panels), fraction=0.012, pad=0.005, aspect=40)
    bar.set_label("layer", fontsize=7, labelpad=0)
    bar.ax.tick_params(labelsize=6, length=2)
    with replaced_whole(path) as file:
        figure.savefig(file, dpi=120, format=path.suffix[1:] or None)


def shown_window(report: ScheduleReport) -> tuple[float, float]:
    """Return the seconds of the timeline to show: a step from idle devices, or one step of the steady state."""
    ends = report.timeline.step_ends_s()
    if len(ends) == 1:
        return 0.0, report.timeline.makespan_s
    # The first steps still fill the devices and the last ones drain them; the middle is settled.
    start_s = ends[len(ends) // 2]
    return start_s, start_s + report.makespan_s


def _draw(
    panel: Axes, report: ScheduleReport, num_layers: int, window: tuple[float, float], numbered_s: float
) -> None:
    """Draw one row per device, with a box for each computation; long boxes have the number of their micro-batch."""
    line, (start_s, stop_s) = report.timeline, window
    per_step = 1 + max(task.micro_batch for task in line.tasks if task.step == 0)
    for device in range(line.num_devices):
        top = device - ROW / 2
        panel.add_patch(Rectangle((0, top), (stop_s - start_s) * 1e3, ROW, **IDLE))
        for index in line.of_device(device):
            begin_s, end_s = max(line.start_s[index], start_s), min(line.end_s[index], stop_s)
            if begin_s >= end_s:
                continue
            task = line.tasks[index]
            left_ms, width_ms = (begin_s - start_s) * 1e3, (end_s - begin_s) * 1e3
            fill = _colour(task, num_layers)
            panel.add_patch(Rectangle((left_ms, top), width_ms, ROW, fc=fill, ec="white", lw=0.25))
            upper = FUSED_FORWARD * ROW if task.kind is SpanKind.FUSED else 0.0
            if upper:
                pale = _colour(replace(task, kind=SpanKind.FORWARD), num_layers)
                panel.add_patch(Rectangle((left_ms, top), width_ms, upper, fc=pale, lw=0))
            # Work for an update is of no micro-batch.
            if task.micro_batch >= 0 and end_s - begin_s > numbered_s:
                # White on dark colours: the weights are the eye's sensitivity to red, green and blue.
                is_dark = sum(w * part for w, part in zip((0.3, 0.59, 0.11), fill, strict=True)) < 0.55
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 5}
                place = left_ms + width_ms / 2, top + (ROW + upper) / 2
                number = f"{task.micro_batch % per_step}"
                panel.text(*place, number, color="white" if is_dark else "#333333", **style)
    panel.set_ylim(line.num_devices - 0.5, -0.5)
    panel.set_yticks(range(line.num_devices), [f"device {index}" for index in range(line.num_devices)])
    panel.tick_params(labelsize=7, length=2)
    settled = ", steady state" if len(line.step_ends_s()) > 1 else ""
    name = TITLES.get(report.name, report.name.replace("_", "-").upper())
    title = f"{name}: {report.makespan_s * 1e3:.0f} ms per step{settled}, bubble {report.bubble:.1%}"
    panel.set_title(title, loc="left", fontsize=8.5, pad=3)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _colour(task: Task, num_layers: int) -> tuple[float, ...]:
    middle = (task.layers.start + task.layers.stop - 1) / 2 / max(1, num_layers - 1)
    # The ends of the colour map are too dark to tell a forward from a backward.
    return _shaded(task.kind, 0.08 + 0.84 * middle)


def _shaded(kind: SpanKind, place: float) -> tuple[float, ...]:
    share, grey = SHADES.get(kind, (0.0, 1.0))
    return tuple(share * grey + (1 - share) * part for part in COLOURS(place)[:3])


def _legend(figure: Figure, tasks: Sequence[Task], title: str) -> None:
    used = {task.kind for task in tasks}
    shades = {kind: Patch(fc=_shaded(kind, 0.3)) for kind in SpanKind}
    shown: dict[str, Any] = {name: shades[kind] for kind, name in NAMES.items() if kind in used}
    if SpanKind.FUSED in used:
        shown["both in one"] = shades[SpanKind.FORWARD], shades[SpanKind.FUSED]
    shown["idle"] = Patch(**IDLE)
    # The title is the legend's, which the layout keeps clear of the panels; a title of the figure would cover the legend.
    figure.legend(
        *(list(shown.values()), list(shown)),
        title=title,
        title_fontsize=9.5,
        alignment="left",
        loc="outside upper left",
        ncols=len(shown),
        fontsize=7,
        frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )
