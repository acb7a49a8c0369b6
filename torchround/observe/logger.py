"""One `log` for everything that a run reports to, which never raises.

A reporter that fails (full disk, no network, closed terminal) costs one warning; training and the other
reporters continue. The reporter gets every later record too, so it works again as soon as the disk or the
network does.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchround.observe.record import StepRecord
from torchround.observe.reporters import ConsoleReport, MetricsFile, Reporter
from torchround.observe.wandb_logger import WandbLogger

if TYPE_CHECKING:
    from torchround.config import MetricsTable

logger = logging.getLogger(__name__)


class MetricsLogger:
    """The reporters of a run, by name; each gets every record.

    `wandb_run_id` goes into checkpoints: the id of the run that is logged to, otherwise the id that was
    given.
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

    `resumed_step` is the number of updates done so far, `wandb_run_id` the checkpoint's. wandb shows
    `config`, the resolved configuration.
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
