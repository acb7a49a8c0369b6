"""Weights & Biases. The library is imported when a logger is made, so a run without it never pays for it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from torchround.observe.record import StepRecord


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
