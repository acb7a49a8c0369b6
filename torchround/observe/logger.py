"""One `log` for everything that a run reports to, which never raises, and the reporter for Weights & Biases.

A reporter that fails (full disk, no network, closed terminal) costs one warning; training and the other reporters
continue. The reporter gets every later record too, so it works again as soon as the disk or the network does.
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
    """A receiver of records. Its methods may raise."""

    def log(self, record: StepRecord) -> None:
        """Report one logged step."""
        ...

    def close(self) -> None:
        """Finish: no record follows."""
        ...


class MetricsLogger:
    """The reporters of a run, by name; each gets every record.

    `wandb_run_id` goes into checkpoints: the id of the run that is logged to, otherwise the id that was given.
    """

    def __init__(
        self, reporters: Mapping[str, Callable[[], Reporter]], wandb_run_id: str | None = None
    ) -> None:
        """Make the reporters. One that cannot even be made costs one warning too."""
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
        """Close every reporter. Does nothing the second time."""
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
                    "reporting to %s failed: %s: %s; training continues, records may be missing there",
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
    """Make the reporters of a run in `folder`: the console, `metrics.jsonl`, and wandb if `[metrics]` asks for it.

    `resumed_step` is the number of updates done so far, `wandb_run_id` the checkpoint's. wandb shows `config`, the
    resolved configuration.
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


class WandbLogger:
    """One run of Weights & Biases. `run_id` goes into checkpoints; a resumed run passes it in to join the same run.

    `offline` writes to `folder/wandb` and needs no network and no account. Each part of a resumed run is a folder of its
    own there with the same id, and `wandb sync --append` joins them. Every method raises whatever the library raises.
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
        import wandb  # here, so that a run without it never pays for the import

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            mode=mode,
            project=project,
            name=name,
            dir=str(folder),
            config=dict(config),
            id=run_id,
            # Offline there is no server to look the id up on, and the library would warn.
            resume="allow" if run_id is not None and mode == "online" else None,
            # Otherwise the library would put itself between our console lines and standard output.
            settings=wandb.Settings(console="off"),
        )
        # The library drops records of a step that it has seen, but after a resume the steps since the last checkpoint
        # come again. As a metric of its own, `step` is only an axis.
        self._run.define_metric("*", step_metric="step")
        self.run_id = str(self._run.id)

    def log(self, record: StepRecord) -> None:
        """Hand the record to the library, which sends it from its own process.

        Each device's figure is a curve of its own, such as `engine/busy_s/0`.
        """
        self._run.log({name: value for name, value in _curves("", record.as_dict()) if value is not None})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _curves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield single numbers by path, because the library draws neither lists nor objects."""
    if not isinstance(value, (Mapping, tuple)):
        yield name, value
        return
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in parts:
        yield from _curves(f"{name}/{key}" if name else str(key), part)
