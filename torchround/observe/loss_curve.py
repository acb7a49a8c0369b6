"""Draws the loss curves of runs as a PNG, from the `metrics.jsonl` in each run folder.

matplotlib is imported only when a curve is drawn: it takes half a second, and a machine may lack it.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from torchround.untrusted.regular_file import open_regular, replaced_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
PICTURE_FILE = "loss.png"
MOST_STEP = 2**53  # a float, and a number of JavaScript, is exact up to here
MOST_LINE_BYTES = 2**20  # of a line; one of eight devices has about 2 KiB
WIDTH_INCHES, HEIGHT_INCHES = 8.0, 4.5
DOTS_PER_INCH = 120
MOST_PLAIN_POINTS = 100  # a longer curve is drawn thinly, with its mean over a window on top
MEAN_WINDOWS = 50


class LossCurve(NamedTuple):
    """The logged steps of one run, and the loss of each: training's and, if there was validation, validation's."""

    name: str
    steps: list[int]
    losses: list[float]
    validated_steps: list[int]
    validation_losses: list[float]


def draw_run(folder: Path) -> None:
    """Draw `loss.png` in the folder of a run that has ended. Never raises: a failure is one warning.

    A run with fewer than two logged steps has no curve, and gets no picture.
    """
    try:
        curve = read_losses(folder)
        if len(curve.steps) > 1:
            draw_curves([curve], folder / PICTURE_FILE)
    except Exception as error:  # noqa: BLE001 (a picture must not fail a run, whatever is wrong with matplotlib)
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            "%s was not drawn: %s; the figures are in %s", folder / PICTURE_FILE, reason, METRICS_FILE
        )


def read_losses(folder: Path) -> LossCurve:
    """Read the losses of a run. Raises `OSError` if the folder has no metrics.

    A resumed run continues the same file, so its curve has all its parts. Lines that are cut off or hold no
    loss (it was not finite) are left out.
    """
    # matplotlib would take `$` for the start of a formula, and hides a legend entry that begins with `_`.
    name = folder.resolve().name.lstrip("_").replace("$", r"\$")
    curve = LossCurve(name, [], [], [], [])
    for step, record in read_records(folder):
        if (loss := finite_number(record.get("loss"))) is not None:
            curve.steps.append(step)
            curve.losses.append(loss)
        if (loss := finite_number(record.get("validation_loss"))) is not None:
            curve.validated_steps.append(step)
            curve.validation_losses.append(loss)
    return curve


def read_records(folder: Path, last_bytes: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step and the record of each line of a run's metrics, or of the lines in its last bytes.

    Raises `OSError` if the folder has none.

    A line that was cut off, that is longer than `MOST_LINE_BYTES`, or that is no record of a step from 0 to below
    `MOST_STEP`, is left out.
    """
    path = folder / METRICS_FILE
    try:
        opened = open_regular(path)
    except OSError as error:
        # The folder may come from a stranger: a pipe in the file's place has no name in its error.
        raise error if error.filename else OSError(f"{path}: {error}") from None
    with BufferedReader(opened) as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        for line in _lines(file):
            record = _parsed(line)
            step = record.get("step")
            if type(step) is int and 0 <= step < MOST_STEP:
                yield step, record


def finite_number(value: Any) -> float | None:
    """Return a value of a record as a float; None if it is not a number, or not a finite one."""
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # an integer of over 300 digits
        return None
    return number if math.isfinite(number) else None


def draw_curves(curves: Sequence[LossCurve], picture: Path) -> None:
    """Draw the curves of one or several runs over each other into the PNG `picture`.

    Raises `ValueError` if no curve has a loss, `ImportError` without matplotlib, and `OSError` if the disk
    fails.
    """
    if not any(curve.steps for curve in curves):
        raise ValueError(f"no loss to draw in {', '.join(curve.name for curve in curves)}")
    # Not through pyplot, which chooses a backend by the display and keeps figures alive. A bare figure that
    # is saved as PNG uses the backend Agg, which needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        _draw(axes, curve, f"C{index}", len(curves) > 1)
    axes.set_title(_title(curves), fontsize="medium")
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("loss (nats per label)")
    axes.grid(alpha=0.3)
    axes.margins(x=0.02)
    if len(curves) > 1 or curves[0].validated_steps or len(curves[0].steps) > MOST_PLAIN_POINTS:
        axes.legend()
    with replaced_whole(picture) as file:
        figure.savefig(file, dpi=DOTS_PER_INCH, format="png")


def _draw(axes: "Axes", curve: LossCurve, colour: str, named: bool) -> None:
    prefix = f"{curve.name}: " if named else ""
    plain = len(curve.steps) <= MOST_PLAIN_POINTS
    axes.plot(
        curve.steps,
        curve.losses,
        color=colour,
        linewidth=1.5 if plain else 0.8,
        alpha=1.0 if plain else 0.35,
        marker="o" if len(curve.steps) == 1 else None,
        label=f"{prefix}training loss",
    )
    if not plain:
        window = len(curve.losses) // MEAN_WINDOWS
        means = _running_means(curve.losses, window)
        axes.plot(curve.steps, means, color=colour, label=f"{prefix}mean of the last {window} logged steps")
    if curve.validated_steps:
        style: dict[str, Any] = {"color": colour if named else "C1", "linestyle": "--", "marker": "o"}
        axes.plot(
            curve.validated_steps,
            curve.validation_losses,
            markersize=4,
            label=f"{prefix}validation loss",
            **style,
        )


def _title(curves: Sequence[LossCurve]) -> str:
    if len(curves) > 1:
        return f"Loss of {len(curves)} runs"
    (curve,) = curves
    text = f"{curve.name}: loss {curve.losses[-1]:.3f} at step {curve.steps[-1]}"
    if curve.validation_losses:
        text += f", validation loss {curve.validation_losses[-1]:.3f} at step {curve.validated_steps[-1]}"
    return text


def _running_means(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and the up to `window - 1` values before it."""
    sums, means = 0.0, []
    for index, value in enumerate(values):
        sums += value - (values[index - window] if index >= window else 0.0)
        means.append(sums / min(index + 1, window))
    return means


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines that are not too long. A longer one is read in parts, so it cannot fill the memory."""
    begins = True
    for part in iter(lambda: file.readline(MOST_LINE_BYTES), b""):
        ends = part.endswith(b"\n")
        if begins and (ends or len(part) < MOST_LINE_BYTES):
            yield part
        begins = ends


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the record of a line; an empty one for a line that was cut off when its process was killed."""
    try:
        record = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
