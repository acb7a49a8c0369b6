"""One `log` for everything that a run reports to, which never raises.

A writer that fails (full disk, no network, closed terminal) costs one warning; training and the other writers continue.
It gets every later record too, so it works again as soon as the disk or the network does.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torchround.config import ConfigError, users_module
from torchround.observe.console import ConsoleReport
from torchround.observe.metrics_file import METRICS_FILE, MetricsFile
from torchround.observe.record import StepRecord

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
    """Find what makes a writer in the user's module. Raises `ConfigError` if nothing does."""
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


class WandbLogger:
    """One run of Weights & Biases. `run_id` goes into checkpoints; a resumed run passes it in to join the same run.

    `offline` writes to `folder/wandb` and needs no network and no account. Each part of a resumed run is a
    folder of its own there with the same id, and `wandb sync --append` joins them. Every method raises whatever the
    library raises, for example if `online` reaches no server.
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
            # And it would end a run with dozens of lines, curves and last values of each device among them.
            settings=wandb.Settings(
                console="off",
                init_timeout=30.0,  # seconds for the server to take the run
                max_end_of_run_history_metrics=0,
                max_end_of_run_summary_metrics=0,
            ),
        )
        # The library drops records of a step that it has seen, but after a resume the steps since the last
        # checkpoint come again. As a metric of its own, `step` is only an axis.
        self._run.define_metric("*", step_metric="step")
        self.run_id = str(self._run.id)

    def log(self, record: StepRecord) -> None:
        """Pass the record to the library's process. Each device's figure is a curve, continuations are a table."""
        values: dict[str, Any] = dict(_curves("", record.as_dict()))
        if record.samples:
            from wandb import Table

            rows = [[record.step, sample.prompt, sample.text] for sample in record.samples]
            values["samples"] = Table(["step", "prompt", "text"], rows)
        self._run.log(values)

    def close(self) -> None:
        self._run.finish()


def _curves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield single numbers by path, because the library draws neither lists nor objects."""
    if isinstance(value, (Mapping, tuple)):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            yield from _curves(f"{name}/{key}" if name else str(key), part)
    elif isinstance(value, (int, float)):
        yield name, value
