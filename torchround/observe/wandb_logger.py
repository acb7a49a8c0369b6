"""The reporter that logs a run to Weights & Biases, over the network or into a folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torchround.observe.record import StepRecord


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
