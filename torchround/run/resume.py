"""Which checkpoint a run goes on from, and whether it can."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from torchround.checkpoint import Checkpointer, CheckpointError, Loaded, load_checkpoint
from torchround.config import Config


class ResumeError(Exception):
    """The run cannot go on from the checkpoint that it found or was given."""


def find_checkpoint(
    config: Config, checkpointer: Checkpointer, folder: Path, views: Mapping[str, Tensor]
) -> Loaded | None:
    """Fill `views` from the run's newest checkpoint, else from `checkpoint.load_path`; None where there is neither.

    Raises `ResumeError` for a checkpoint of another kind of run, `CheckpointError` for damaged ones.
    """
    _refuse_other_update(config, checkpointer, folder)
    loaded = checkpointer.load_latest(views)
    if loaded is not None or config.checkpoint.load_path is None:
        return loaded
    return _given_checkpoint(config, config.checkpoint.load_path, views)


def _given_checkpoint(config: Config, path: str, views: Mapping[str, Tensor]) -> Loaded:
    try:
        loaded = load_checkpoint(path, views)
    except CheckpointError as error:
        raise ResumeError(f"checkpoint.load_path: {error}") from error
    if loaded.step >= config.training.steps:
        raise ResumeError(
            f"checkpoint.load_path: {path} is after step {loaded.step}, and training.steps is "
            f"{config.training.steps}; legal: more steps"
        )
    # Another run's page in wandb is not this run's.
    return replace(loaded, state={**loaded.state, "wandb_run_id": None})


def _refuse_other_update(config: Config, checkpointer: Checkpointer, folder: Path) -> None:
    """A checkpoint of `async` holds the weights before the newest, one of `sync` does not."""
    state = checkpointer.newest_state()
    update = config.engine.update if state is None else state["config"]["engine"]["update"]
    if update != config.engine.update:
        raise ResumeError(
            f"{folder}: these checkpoints are of a run with engine.update = {update!r}, now it is "
            f"{config.engine.update!r}; go on with the former, or give the run a name of its own "
            "(--run.name NAME)"
        )
