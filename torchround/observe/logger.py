"""All that a run reports to, behind one `log` that never raises.

A reporter that fails (full disk, no network, closed terminal) is one warning; the others and training go on,
and it is given every later record too, so that it takes up again when the disk does.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchround.observe.record import StepRecord
from torchround.observe.reporters import ConsoleReport, MetricsFile

if TYPE_CHECKING:
    from torchround.config import MetricsTable
logger = logging.getLogger(__name__)


class Reporter(Protocol):
    """Takes records. May raise."""

    def log(self, record: StepRecord) -> None:
        """Report one logged step."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class MetricsLogger:
    """Hands each record to every reporter. Made by `open_metrics`, or of reporters by name.

    `wandb_run_id`, for the checkpoint, is that of the run that is logged to, else the one that was given.
    """

    def __init__(
        self, reporters: Mapping[str, Callable[[], Reporter]], wandb_run_id: str | None = None
    ) -> None:
        """`reporters` are made here, so that one that cannot even be made is a warning too."""
        self._warned: set[str] = set()
        self._reporters: dict[str, Reporter] = {}
        self.wandb_run_id = wandb_run_id
        for name, make in reporters.items():
            self._guarded(name, partial(self._add, name, make))

    def log(self, record: StepRecord) -> None:
        """Report one logged step everywhere."""
        for name, reporter in self._reporters.items():
            self._guarded(name, partial(reporter.log, record))

    def close(self) -> None:
        """Close every reporter. Can be repeated."""
        while self._reporters:
            name, reporter = self._reporters.popitem()
            self._guarded(name, reporter.close)

    def _add(self, name: str, make: Callable[[], Reporter]) -> None:
        reporter = self._reporters[name] = make()
        if isinstance(reporter, WandbLogger):
            self.wandb_run_id = reporter.run_id

    def _guarded(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  (no logger may fail a training step)
            if name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "reporting to %s failed: %s: %s; training goes on, records may be missing there",
                    name,
                    type(error).__name__,
                    error,
                )


def open_metrics(
    table: "MetricsTable",
    folder: Path,
    run_name: str,
    total_steps: int,
    config: Mapping[str, Any],
    resumed_step: int = 0,
    wandb_run_id: str | None = None,
) -> MetricsLogger:
    """The reporters of a run in `folder`: the console, `metrics.jsonl`, and wandb where `[metrics]` has it.

    `resumed_step` is the number of updates done so far, `wandb_run_id` the checkpoint's, `config` the
    resolved configuration for wandb to show.
    """
    reporters: dict[str, Callable[[], Reporter]] = {
        "the console": lambda: ConsoleReport(total_steps, resumed_step),
        str(folder / "metrics.jsonl"): lambda: MetricsFile(folder / "metrics.jsonl", resumed_step),
    }
    mode = table.wandb
    if mode != "off":
        reporters["wandb"] = lambda: WandbLogger(
            mode, table.wandb_project, run_name, folder, config, wandb_run_id
        )
    return MetricsLogger(reporters, wandb_run_id)


# Weights & Biases. The library is imported when a logger is made, so a run without it never pays for it.


class WandbLogger:
    """One run of Weights & Biases. `run_id` goes into checkpoints; given back here, the run is rejoined.

    `offline` writes to `folder/wandb` and needs no network and no account; each part of a resumed run is a
    folder of its own there with the same id, and `wandb sync --append` joins them. Raises whatever the
    library raises; whoever calls decides what that may cost.
    """

    def __init__(
        self,
        mode: Literal["online", "offline"],
        project: str,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        run_id: str | None = None,
    ) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            mode=mode,
            project=project,
            name=name,
            dir=str(folder),
            config=dict(config),
            id=run_id,
            # Offline there is nothing to look the id up in, and asking for it is a warning.
            resume="allow" if run_id is not None and mode == "online" else None,
            # Our console lines stay ours: the library would put itself between us and standard output.
            settings=wandb.Settings(console="off"),
        )
        # The library drops what is logged for a step it has already seen, and steps since the last checkpoint
        # are seen again after a resume; as a metric of its own, `step` is only an axis.
        self._run.define_metric("*", step_metric="step")
        self.run_id = str(self._run.id)

    def log(self, record: StepRecord) -> None:
        """Hand the record over; sending it is the library's business, in its own process.

        What is told of each device is a curve of its own: `engine/busy_s/0`.
        """
        self._run.log({name: value for name, value in _curves("", record.as_dict()) if value is not None})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _curves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Single numbers by path: the library draws neither lists nor objects."""
    if not isinstance(value, (Mapping, tuple)):
        yield name, value
        return
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in parts:
        yield from _curves(f"{name}/{key}" if name else str(key), part)
