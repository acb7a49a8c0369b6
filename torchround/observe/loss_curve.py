"""The loss curves of runs as a PNG, from the `metrics.jsonl` in each run folder.

matplotlib is imported only when a curve is drawn: it takes half a second, and a machine may lack it.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torchround.observe.metrics_file import METRICS_FILE, finite_number, read_records
from torchround.untrusted.regular_file import replaced_whole

logger = logging.getLogger(__name__)

PICTURE_FILE = "loss.png"


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
    """Read the losses of a run, all parts of a resumed one. Raises `OSError` if the folder has no metrics."""
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


def draw_curves(curves: Sequence[LossCurve], picture: Path) -> None:
    """Draw the curves of one or several runs over each other into the PNG `picture`.

    Raises `ValueError` if no curve has a loss, `ImportError` without matplotlib, and `OSError` if the disk fails.
    """
    if not any(curve.steps for curve in curves):
        raise ValueError(f"no loss to draw in {', '.join(curve.name for curve in curves)}")
    # Not through pyplot, which chooses a backend by the display. A bare figure that is saved as PNG needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step (optimizer updates)", ylabel="loss (nats per label)")
    for index, curve in enumerate(curves):
        colour = f"C{index}"
        axes.plot(curve.steps, curve.losses, color=colour, linewidth=1.0, label=f"{curve.name}: training")
        if curve.validated_steps:
            validated = curve.validated_steps, curve.validation_losses
            axes.plot(*validated, "o--", color=colour, markersize=4, label=f"{curve.name}: validation")
    axes.grid(alpha=0.3)
    axes.legend()
    with replaced_whole(picture) as file:
        figure.savefig(file, dpi=120, format="png")
