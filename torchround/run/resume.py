"""Which checkpoint a run goes on from, whether it can, and what of its settings has changed since."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint import (
    Checkpointer,
    CheckpointError,
    ForeignCheckpointError,
    Loaded,
    load_checkpoint,
)
from torchround.config import Config
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)

WEIGHTS = "weights/"  # what the host store's views of weights begin with

# What decides losses, but for the data and the seed, which the loader checks. Empty: every key of the table.
TELLING_KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("hf_path",),  # a base that stays in its files is read from there again
    "training": (
        *("steps", "seq_len", "global_batch_size", "micro_batch_size", "dtype", "max_norm"),
        *("on_spike", "spike_factor", "spike_window"),
    ),
    "engine": ("update", "rounds", "grad_dtype", "accumulate_dtype"),
    "optimizer": (),
    "lr_schedule": (),
    "lora": ("alpha", "dropout"),
}
# What makes a model another one.
MODEL_KEYS: Mapping[str, tuple[str, ...]] = {"model": ("family", "flavor"), "lora": ("rank", "targets")}
# What decides which tensors a checkpoint holds.
STORED_KEYS = {**MODEL_KEYS, "lora": ("rank", "targets", "map_base")}

# What a state holds, and as what.
STATE_TYPES: Mapping[str, type] = {
    "tokens": int,
    "data": dict,
    "applied_updates": int,
    "skipped_steps": int,
    "loss_scale": dict,
    "config": dict,
}
MOST = 2**62  # of anything that is counted


class ResumeError(Exception):
    """The run cannot go on from the checkpoint that it found or was given."""

    def __init__(self, message: object) -> None:
        super().__init__(terminal_safe(message))


def find_checkpoint(
    config: Config, checkpointer: Checkpointer, views: Mapping[str, Tensor], optional: Callable[[str], bool]
) -> Loaded | None:
    """Fill `views` from the run's newest checkpoint, else from `checkpoint.load_path`; None where there is neither.

    None too where `checkpoint.load` asks for its weights only, which are `StartingWeights`.

    `optional` says by name what may be missing. One warning tells which settings have changed. Raises `ResumeError`
    for a checkpoint of another kind of run, `CheckpointError` for damaged ones.
    """
    try:
        loaded = checkpointer.load_latest(views, optional)
        if loaded is None and config.checkpoint.load_path is not None and config.checkpoint.load == "all":
            loaded = _given_checkpoint(config, config.checkpoint.load_path, views, optional)
    except ForeignCheckpointError as error:
        raise ResumeError(
            f"{error}{_told_difference(error, config)}. Go on with what it was made with, or give the run a name of "
            "its own (--run.name NAME)"
        ) from error
    if loaded is not None:
        _check_state(loaded)
        _refuse_another_model(loaded, config)
        _tell_changes(loaded, config)
    return loaded


@dataclass(frozen=True)
class StartingWeights:
    """The weights in `checkpoint.load_path` and nothing else of it, for a run that begins at step 0."""

    config: Config

    @property
    def folder(self) -> Path:
        assert self.config.checkpoint.load_path is not None, "the config checks ask for a folder"
        return Path(self.config.checkpoint.load_path)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Fill `weights`, which are named as in `HostStore.weights`. Raises `ResumeError`."""
        views = {f"{WEIGHTS}{name}": view for name, view in weights.items()}
        try:
            loaded = load_checkpoint(self.folder, views, lambda name: not name.startswith(WEIGHTS))
        except CheckpointError as error:
            told = _told_difference(error, self.config) if isinstance(error, ForeignCheckpointError) else ""
            raise ResumeError(f"checkpoint.load_path: {error}{told}") from error
        _refuse_another_model(loaded, self.config)


def _told_difference(error: ForeignCheckpointError, config: Config) -> str:
    differing = _changes(error.state, config, STORED_KEYS)
    return f" ({', '.join(differing)})" if differing else ""


def _given_checkpoint(
    config: Config, path: str, views: Mapping[str, Tensor], optional: Callable[[str], bool]
) -> Loaded:
    try:
        loaded = load_checkpoint(path, views, optional)
    except ForeignCheckpointError:
        raise
    except CheckpointError as error:
        raise ResumeError(f"checkpoint.load_path: {error}") from error
    if loaded.step >= config.training.steps:
        raise ResumeError(
            f"checkpoint.load_path: {path} is after step {loaded.step}, and training.steps is "
            f'{config.training.steps}; legal: more steps, or checkpoint.load = "weights" to begin at step 0 with its '
            "weights"
        )
    # Another run's page in wandb is not this run's.
    return replace(loaded, state={**loaded.state, "wandb_run_id": None})


def _check_state(loaded: Loaded) -> None:
    most = {"tokens": MOST, "applied_updates": loaded.step, "skipped_steps": loaded.step}
    for key, kind in STATE_TYPES.items():
        value = loaded.state.get(key)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= most[key]):
            raise ResumeError(f"{loaded.path}: its state is not that of a run: {key} is {str(value)[:100]}")


def _refuse_another_model(loaded: Loaded, config: Config) -> None:
    """Two models may have tensors of the same names and shapes."""
    if differing := list(_changes(loaded.state, config, MODEL_KEYS)):
        raise ResumeError(
            f"{loaded.path} is of another model ({', '.join(differing)}). Go on with the former, or give the run a "
            "name of its own (--run.name NAME)"
        )


def _tell_changes(loaded: Loaded, config: Config) -> None:
    if changes := list(_changes(loaded.state, config, TELLING_KEYS)):
        told = f"{loaded.path} was made with other settings; from now on {', '.join(changes)}"
        logger.warning("%s", terminal_safe(told))


def _changes(state: Mapping[str, Any], config: Config, keys: Mapping[str, tuple[str, ...]]) -> list[str]:
    """`table.key old -> new` of each key that the state's configuration has and that is another one now."""
    before, now = state.get("config"), config.model_dump(mode="json")
    changes = []
    for table, names in keys.items():
        old = before.get(table) if isinstance(before, dict) else None
        if not isinstance(old, dict):
            continue
        for name in names or now[table]:
            if name in old and old[name] != now[table][name]:
                changes.append(f"{table}.{name} {old[name]!r} -> {now[table][name]!r}")
    return changes
