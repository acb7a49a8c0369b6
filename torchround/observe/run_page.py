"""The metrics of one or several runs as one HTML file, which needs no network and no other file, and their losses as a PNG.

The figures come from the `metrics.jsonl` in each run folder, the settings from its `config.toml`. `run_page.html` and
`run_page.js` beside this module are the page without its figures. The page's own policy forbids every request, and every
script but its own.
"""

import base64
import hashlib
import html
import json
import logging
import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchround.observe.console import duration
from torchround.observe.metrics_file import METRICS_FILE, finite_number, read_records
from torchround.untrusted.regular_file import read_regular, replaced_whole, write_whole
from torchround.untrusted.strict_json import page_json
from torchround.untrusted.terminal import escape_unprintable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger(__name__)

PAGE_FILE, PICTURE_FILE, CONFIG_FILE = "page.html", "loss.png", "config.toml"
MOST_CONFIG_BYTES = 2**15  # a resolved config has about 5,000
MOST_SETTINGS = 12  # columns of keys that differ
MOST_POINTS = 800  # of a curve: more than the pixels of its width on most screens
MOST_NAME = 200  # letters of a run's name
VALIDATION = "validation"  # label of a curve
MOST_SAMPLES, MOST_SAMPLE = 32, 4000  # continuations of prompts, and letters of each


class PagePanel(NamedTuple):
    """One picture of the page. The script of the page reads these fields by name.

    `smooth` is for values that vary from step to step, `log` for values of many magnitudes; both follow the page's
    controls. `zero` puts zero at the foot of the axis.
    """

    key: str
    title: str
    unit: str = ""
    percent: bool = False
    smooth: bool = False
    log: bool = False
    zero: bool = True


PANELS = (
    PagePanel("loss", "Loss", "nats per label", smooth=True, log=True, zero=False),
    PagePanel("lr", "Learning rate"),
    PagePanel("grad_norm", "Gradient norm before clipping", smooth=True, log=True, zero=False),
    PagePanel("tokens_per_s", "Tokens per second", "tokens/s", smooth=True),
    PagePanel("bubble", "Bubble: share of the time without computation", percent=True, smooth=True),
    PagePanel("device_memory", "Device memory, most so far", "GiB"),
    PagePanel("host_memory", "Host memory", "GiB"),
    PagePanel("mfu", "MFU: share of the devices' peak", percent=True, smooth=True),
)


class Curve:
    """The values of one curve, each with its step. Arrays keep a run of a million lines small."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def points(self) -> list[list[float]]:
        """Choose at most `MOST_POINTS` points: step and value, of several values last step, mean, lowest and highest."""
        size = -(-len(self.values) // MOST_POINTS)
        points = []
        for begin in range(0, len(self.values), size or 1):
            part = self.values[begin : begin + size]
            spread = [min(part), max(part)] if size > 1 else []
            # Six digits: nine more would only make the page larger.
            figures = [float(f"{value:.6g}") for value in (sum(part) / len(part), *spread)]
            points.append([self.steps[begin + len(part) - 1], *figures])
        return points


class NoStepError(ValueError):
    """Runs that have logged no step."""


def draw_pictures(folder: Path) -> None:
    """Draw `loss.png` and `page.html` of a run that has ended and logged a step. Never raises: a failure is one warning."""
    for name, draw in {PICTURE_FILE: draw_losses, PAGE_FILE: write_page}.items():
        try:
            draw([folder], folder / name)
        except NoStepError:
            pass
        except Exception as error:  # noqa: BLE001 (a page must not fail a run, whatever the disk or matplotlib does)
            logger.warning("%s was not drawn: %s: %s", folder / name, type(error).__name__, error)


def draw_losses(folders: Sequence[Path], picture: Path) -> None:
    """Draw the losses of one or several runs over each other into the PNG `picture`. Raises as `write_page`, and `ImportError`."""
    runs = [run for run in _read_runs(folders) if "loss" in run["curves"]]
    if not runs:
        raise NoStepError(f"no loss is logged in {', '.join(map(str, folders))}")
    # matplotlib takes half a second, and a machine may lack it. Its pyplot would choose a backend by the display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step (optimizer updates)", ylabel="loss (nats per label)")
    for index, run in enumerate(runs):
        # matplotlib would take `$` for the start of a formula, and hides a legend entry that begins with `_`.
        name = run["name"].lstrip("_").replace("$", r"\$")
        for curve in run["curves"]["loss"]:
            steps, losses = [point[0] for point in curve["points"]], [point[1] for point in curve["points"]]
            style = "o--" if curve["label"] == VALIDATION or len(steps) == 1 else "-"
            axes.plot(
                steps, losses, style, color=f"C{index}", markersize=4, label=f"{name}: {curve['label']}"
            )
    axes.grid(alpha=0.3)
    axes.legend()
    with replaced_whole(picture) as file:
        figure.savefig(file, dpi=120, format="png")


def write_page(folders: Sequence[Path], output: Path) -> None:
    """Write the runs' page. Raises `NoStepError` if no step is logged, `OSError` without metrics or if the disk fails."""
    write_whole(output, page_text(_read_runs(folders)))


def _read_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    names = [folder.resolve().name for folder in folders]
    # By the path if another run has the same name.
    shown = [
        name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)
    ]
    runs = [read_run(folder, _printable(name)) for folder, name in zip(folders, shown, strict=True)]
    if not any(run["curves"] for run in runs):
        raise NoStepError(
            f"no step is logged in {', '.join(str(folder / METRICS_FILE) for folder in folders)}"
        )
    return runs


def page_text(runs: Sequence[Mapping[str, Any]]) -> str:
    page = Path(__file__).with_name("run_page.html").read_text(encoding="utf-8")
    script = Path(__file__).with_name("run_page.js").read_text(encoding="utf-8")
    given = [run["settings"] for run in runs if run["settings"]]
    keys = dict.fromkeys(key for settings in given for key in settings)
    differing = [key for key in keys if len({settings.get(key) for settings in given}) > 1][:MOST_SETTINGS]
    content = {
        "panels": [panel._asdict() for panel in PANELS if any(panel.key in run["curves"] for run in runs)],
        "settings": differing,
        "runs": [{**run, "settings": [run["settings"].get(key) for key in differing]} for run in runs],
    }
    parts = {
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "script": script,
        "title": html.escape(runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"),
        "figures": page_json(content),
    }
    # In one pass: text that was put in is not searched for places.
    return re.sub(r"\[\[(\w+)\]\]", lambda place: parts[place[1]], page)


def read_run(folder: Path, name: str) -> dict[str, Any]:
    """Read what the page shows of a run: curves by panel, the figures of its last line, settings, newest continuations.

    Raises `OSError` if the folder has no metrics. A step that is not above the step before it is left out.
    """
    curves: dict[str, dict[str, Curve]] = defaultdict(lambda: defaultdict(Curve))
    last: dict[str, Any] = {}
    newest = -1
    samples: tuple[int, list[list[str]]] | None = None
    best: tuple[float, int] | None = None
    before_s = elapsed_s = 0.0
    for step, record in read_records(folder):
        if step <= newest:
            continue
        newest, last = step, record
        now_s = finite_number(record.get("elapsed_s")) or 0.0
        if now_s < elapsed_s:  # the run was resumed, and its clock began again
            before_s += elapsed_s
        elapsed_s = now_s
        for panel, label, given in _values(record):
            if (value := finite_number(given)) is not None:
                curves[panel][label].add(step, value)
        if found := _samples(record.get("samples")):
            samples = step, found
        loss = finite_number(record.get("validation_loss"))
        if loss is not None and (best is None or loss < best[0]):
            best = loss, step
    return {
        "name": name,
        "step": max(newest, 0),
        "duration": duration(before_s + elapsed_s) if elapsed_s else None,
        "settings": _settings(folder),
        **{key: finite_number(last.get(key)) for key in ("loss", "tokens", "tokens_per_s", "skipped_steps")},
        "best": best,
        "samples": samples,
        "curves": {
            panel: [{"label": label, "points": curve.points()} for label, curve in found.items()]
            for panel, found in curves.items()
        },
    }


def _settings(folder: Path) -> dict[str, str]:
    """Read the keys of the run's `config.toml` with their values as text. None without a readable one."""
    try:
        tables = tomllib.loads(read_regular(folder / CONFIG_FILE, MOST_CONFIG_BYTES).decode())
        return {
            _printable(f"{name}.{key}"): _printable(
                value if isinstance(value, str) else json.dumps(value, default=str)
            )
            for name, table in tables.items()
            if name != "run" and isinstance(table, dict)
            for key, value in table.items()
        }
    except (OSError, ValueError, RecursionError):
        return {}


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (panel, curve, value) of a record. A curve without a name is the only one of its panel."""
    yield "loss", "training", record.get("loss")
    yield "loss", VALIDATION, record.get("validation_loss")
    for key in ("lr", "grad_norm", "tokens_per_s", "mfu"):
        yield key, "", record.get(key)
    yield "host_memory", "resident", record.get("host_gib")
    engine = record.get("engine")
    if not isinstance(engine, dict):
        yield "bubble", "", record.get("bubble")
        yield "device_memory", "", record.get("device_peak_gib")
        return
    yield "host_memory", "host pool", engine.get("host_pool_gib")
    step_s = finite_number(record.get("step_s"))
    for index, given in enumerate(_list(engine.get("busy_s"))):
        busy_s = finite_number(given)
        if busy_s is not None and step_s:
            # A step that was under way before the record's steps has computed for longer than their time.
            yield "bubble", f"device {index}", min(max(1 - busy_s / step_s, 0.0), 1.0)
    for index, given in enumerate(_list(engine.get("device_peak_gib"))):
        yield "device_memory", f"device {index}", given


def _samples(given: Any) -> list[list[str]]:
    """Read prompt and text of each sample of a record that is well formed."""
    pairs = [(one.get("prompt"), one.get("text")) for one in _list(given) if isinstance(one, dict)]
    texts = [pair for pair in pairs if all(isinstance(text, str) for text in pair)]
    return [[escape_unprintable(str(text))[:MOST_SAMPLE] for text in pair] for pair in texts[:MOST_SAMPLES]]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _printable(name: str) -> str:
    return escape_unprintable(name).replace("\n", r"\n")[:MOST_NAME]
