"""Finds the checkpoint that a run begins from, checks that it fits, and reports which settings have changed."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint import (
    Checkpointer,
    CheckpointError,
    FolderError,
    ForeignCheckpointError,
    Loaded,
    load_checkpoint,
    open_checkpoint,
)
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.config import Config, LoraTable
from torchround.config.validate import GONE_KEYS
from torchround.run.run_folder import RunError
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)

# What a change of a key does to a run that resumes; a table stands for all of its keys. The loader checks the data and the
# seed. These make another model, which is refused:
MODEL_KEYS = (
    *("model.family", "model.flavor", "model.shape"),
    *("lora.rank", "lora.rank_pattern", "lora.dora", "lora.targets", "lora.map_base", "lora.base"),
)
# These decide which tensors a checkpoint holds besides; an error about tensors names them:
ENGINE_KEYS = ("engine.update", "engine.delay_correction")
STORED_KEYS = ("training.dtype", *ENGINE_KEYS, "optimizer.name", "optimizer.state")
# These decide losses, and are reported:
LOSS_KEYS = (
    "model.hf_path",  # frozen weights that stay in their files are read from there again
    *("training", "optimizer", "lr_schedule"),
    *("lora.alpha", "lora.rslora", "lora.alpha_pattern", "lora.dropout"),
    *(*ENGINE_KEYS, "engine.rounds", "engine.accumulate_dtype"),
)


def find_checkpoint(
    config: Config,
    checkpointer: Checkpointer,
    views: Mapping[str, Tensor],
    optional: Callable[[str], bool],
) -> Loaded | None:
    """Fill `views` from the run's newest checkpoint, otherwise from `checkpoint.load_path`.

    Returns None if there is neither, or if `checkpoint.load` asks for the weights only. `optional`
    says by name which tensors may be missing. One warning names the settings that have changed. Raises `RunError` for a
    checkpoint of another kind of run, and `CheckpointError` for damaged ones.
    """
    try:
        loaded = checkpointer.load_latest(views, optional)
        if loaded is None and (path := given_folder(config)) is not None and config.checkpoint.load == "all":
            loaded = load_checkpoint(path, views, optional, checkpointer.team)
            # The page in Weights & Biases stays the other run's, and so do its best checkpoint and the validations since.
            loaded = replace(loaded, state={**loaded.state, "wandb_run_id": None, "validation": None})
    except ForeignCheckpointError as error:
        advice = ""
        if error.state:  # it could be read: the tensors are others
            differing = ", ".join(changes(error.state, config, (*MODEL_KEYS, *STORED_KEYS)))
            advice = f"{f' ({differing})' * bool(differing)}. {_ways_out(error.folder)}"
        raise RunError(f"{error}{advice}") from error
    except FolderError as error:  # the run's own are tried one after the other
        raise RunError(f"checkpoint.load_path: {error}") from error
    if loaded is not None and checkpointer.team.rank == 0:  # all machines have the same settings
        warn_of_changes(loaded.path, loaded.state, config)
    return loaded


def given_folder(config: Config) -> Path | None:
    path = config.checkpoint.load_path
    return None if path is None else Path(os.path.expanduser(path))


def resumed_stale_layers(config: Config, checkpointer: Checkpointer, given: int | None) -> int | None:
    """Return the stale layers of the checkpoint to resume from, otherwise `given`. Raises `RunError` if they differ."""
    path, _, state = first_state(config, checkpointer)
    kept = state.get("stale_layers")
    if type(kept) is not int:
        return given  # there is none, or it is of a run with another `engine.update`
    if given not in (None, kept):
        raise RunError(
            f'engine.stale_layers: given {given}, and {path} was made with {kept}; legal: {kept}, or "auto", which '
            "keeps the checkpoint's. A run of another name (--run.name NAME) may begin with other values"
        )
    return kept


def check_start(config: Config, checkpointer: Checkpointer) -> None:
    """Raise `RunError` if there is no checkpoint to start from, or one of another model or optimizer.

    Only names, sizes and states of checkpoints are read. Tensors of another model may have the same names and shapes.
    """
    start = given_folder(config)
    if start is not None and not checkpointer.checkpoints():
        try:
            step = open_checkpoint(start).step
        except CheckpointError as error:
            raise RunError(f"checkpoint.load_path: {error}") from error
        # `data.epochs` counts its steps later.
        last = config.training.num_steps if config.training.steps or not config.data.epochs else step + 1
        if config.checkpoint.load == "all" and step >= last:
            raise RunError(
                f"checkpoint.load_path: {start} is after step {step}, and training.steps is {last}; legal: more steps, or "
                'checkpoint.load = "weights" to begin at step 0 with its weights'
            )
    path, _, state = first_state(config, checkpointer, start)
    if path is None:
        return
    resumes = path != start or config.checkpoint.load == "all"
    if differing := changes(state, config, MODEL_KEYS):
        advice = ". Resume with the former model, or give the run a name of its own (--run.name NAME)"
        raise RunError(f"{path} is of another model ({', '.join(differing)}){advice * resumes}")
    if resumes and (differing := changes(state, config, ("optimizer.name",))):
        raise RunError(
            f"{path} holds the state of another optimizer ({', '.join(differing)}). {_ways_out(path)}"
        )


def first_state(
    config: Config, checkpointer: Checkpointer, start: Path | None = None
) -> tuple[Path | None, int, dict[str, Any]]:
    """Return folder, step and state of the newest readable checkpoint that a run may resume from.

    A run without any may begin from `start`, or from the one that `checkpoint.load` asks to resume from; otherwise the
    folder is None, the step 0 and the state empty.
    """
    paths = [path for _, path in sorted(checkpointer.checkpoints().items(), reverse=True)]
    if config.checkpoint.load == "all":
        start = given_folder(config)
    for path in paths or ([start] if start is not None else []):
        try:
            manifest = read_manifest(path)
            return path, manifest.step, read_state(path, manifest)
        except CheckpointError:
            continue  # loading names the damage, and takes the checkpoint before
    return None, 0, {}


def warn_of_changes(path: Path, state: Mapping[str, Any], config: Config, *more: str) -> None:
    if changed := [*changes(state, config, (*LOSS_KEYS, *more)), *_gone(state.get("config"))]:
        message = f"{path} was made with other settings; from now on {', '.join(changed)}"
        logger.warning("%s", terminal_safe(message))


def _gone(before: Any) -> Iterator[str]:
    """Yield what a checkpoint's run had for keys that are constants now, if it was another value."""
    for key, constant in GONE_KEYS.items():
        table, _, name = key.partition(".")
        old = before.get(table) if isinstance(before, dict) else None
        if isinstance(old, dict) and old.get(name, constant) != constant:
            yield f"{key} {old[name]!r} -> {constant!r}"


def changes(state: Mapping[str, Any], config: Config, keys: Sequence[str]) -> list[str]:
    """Return `table.key old -> new` for each key whose value in the state's configuration differs from the run's."""
    before, now = state.get("config"), config.model_dump(mode="json")
    if not isinstance(before, dict):
        return []
    changed = []
    for key in keys:
        table, _, name = key.partition(".")
        old = before.get(table)
        if table == "lora" and isinstance(old, dict):  # older checkpoints lack keys
            old = LoraTable().model_dump(mode="json") | old
        if isinstance(old, dict):
            changed += [
                f"{table}.{each} {old[each]!r} -> {now[table][each]!r}"
                for each in ([name] if name else now[table])
                if each in old and old[each] != now[table][each]
            ]
    return changed


def _ways_out(path: Path) -> str:
    return (
        "Resume with the former settings, or begin a run of another name with these weights and a fresh optimizer: "
        f"--run.name NAME --checkpoint.load weights --checkpoint.load_path {path}"
    )
