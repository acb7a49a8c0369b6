"""One `log` for everything that a run reports to, which never raises.

A writer that fails (full disk, no network, closed terminal) costs one warning; training and the other writers continue.
It gets every later record too, so it works again as soon as the disk or the network does.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchround.config import ConfigError, users_module
from torchround.observe.console import ConsoleReport
from torchround.observe.metrics_file import METRICS_FILE, MetricsFile
from torchround.observe.record import StepRecord
from torchround.observe.wandb_logger import WandbLogger

if TYPE_CHECKING:
    from torchround.config import MetricsTable

logger = logging.getLogger(__name__)


class MetricsWriter(Protocol):
    """The interface of everything that a run reports to. Both methods may raise."""

    def log(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class MetricsLogger:
    """The writers of a run, by name; each gets every record. A writer that cannot be made costs one warning too.

    `wandb_run_id` goes into checkpoints: the id of the run that is logged to, otherwise the id that was given.
    """

    def __init__(
        self, writers: Mapping[str, Callable[[], MetricsWriter]], wandb_run_id: str | None = None
    ) -> None:
        self._warned: set[str] = set()
        self._writers: dict[str, MetricsWriter] = {}
        self.wandb_run_id = wandb_run_id
        for name, make in writers.items():
            self._guarded(name, partial(self._add, name, make))

    def log(self, record: StepRecord) -> None:
        for name, writer in self._writers.items():
            self._guarded(name, partial(writer.log, record))

    def close(self) -> None:
        """Close every writer. Does nothing the second time."""
        while self._writers:
            name, writer = self._writers.popitem()
            self._guarded(name, writer.close)

    def _add(self, name: str, make: Callable[[], MetricsWriter]) -> None:
        writer = self._writers[name] = make()
        self.wandb_run_id = getattr(writer, "run_id", self.wandb_run_id)

    def _guarded(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  (no writer may fail a training step)
            if name not in self._warned:
                self._warned.add(name)
                text = "reporting to %s failed: %s: %s; training continues, records may be missing there"
                logger.warning(text, name, type(error).__name__, error)


def users_writer(module: str) -> Callable[..., MetricsWriter]:
    """Return what makes a writer in the user's module. Raises `ConfigError` if nothing does."""
    try:
        make_writer: Callable[..., MetricsWriter] = users_module(module).make_writer
    except (ImportError, AttributeError) as error:
        found = f"{module} gives no make_writer ({type(error).__name__}: {error})"
        raise ConfigError([f"metrics.module: {found}"]) from error
    return make_writer


def open_metrics(
    table: "MetricsTable",
    folder: Path,
    run_name: str,
    total_steps: int,
    config: Mapping[str, Any],
    resumed_step: int = 0,
    wandb_run_id: str | None = None,
) -> MetricsLogger:
    """Make the writers of a run in `folder`: the console, `metrics.jsonl`, and those that `[metrics]` asks for.

    `resumed_step` is the number of updates done so far, `wandb_run_id` the checkpoint's. wandb shows `config`, the
    resolved configuration.
    """
    path = folder / METRICS_FILE
    writers: dict[str, Callable[[], MetricsWriter]] = {
        "the console": lambda: ConsoleReport(total_steps, resumed_step),
        str(path): lambda: MetricsFile(path, resumed_step),
    }
    mode = table.wandb
    if mode != "off":
        writers["wandb"] = lambda: WandbLogger(
            mode, table.wandb_project, run_name, folder, config, wandb_run_id
        )
    module = table.module
    if module is not None:
        writers[module] = lambda: users_writer(module)(folder, config)
    return MetricsLogger(writers, wandb_run_id)
