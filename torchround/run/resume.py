"""Finds the checkpoint that a run resumes from, checks that it fits, and reports which settings have changed."""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint import (
    Checkpointer,
    CheckpointError,
    FolderError,
    ForeignCheckpointError,
    Loaded,
    MachineTeam,
    load_checkpoint,
)
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.config import Config, LRScheduleTable
from torchround.config.optimizer_tables import table_for
from torchround.data import DataError, Loader
from torchround.engine.store.bundles import RESIDUAL, WEIGHTS
from torchround.engine.store.host_store import HostStore
from torchround.optim import LRSchedule
from torchround.run.run_folder import RunError
from torchround.run.saved_forms import SavedForms
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)

# The keys that decide losses; a change is reported. The loader checks the data and the seed. Empty: all of a table's keys.
LOSS_KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("hf_path",),  # frozen weights that stay in their files are read from there again
    "training": (
        *("steps", "seq_len", "global_batch_size", "micro_batch_size", "dtype"),
        *("max_norm", "clip"),
        *("on_spike", "spike_factor", "spike_window", "fp16_accumulation", "deterministic"),
    ),
    "engine": ("update", "delay_correction", "rounds", "grad_dtype", "accumulate_dtype"),
    "optimizer": (),
    "lr_schedule": (),
    "lora": ("alpha", "dropout"),
}
# The keys that make a model another one; a change is refused.
MODEL_KEYS: Mapping[str, tuple[str, ...]] = {
    "model": ("family", "flavor", "shape"),
    "lora": ("rank", "targets"),
}
# The keys by which a complete run is another one than its config asks for: nothing would be trained with new values.
RUN_KEYS: Mapping[str, tuple[str, ...]] = {
    **LOSS_KEYS,
    "run": ("seed",),
    "model": (*MODEL_KEYS["model"], *LOSS_KEYS["model"]),
    "lora": (*MODEL_KEYS["lora"], *LOSS_KEYS["lora"], "path"),
    "checkpoint": ("load_path", "load"),
}
# The keys that decide which tensors a checkpoint holds; an error about tensors names them.
STORED_KEYS = {**MODEL_KEYS, "lora": ("rank", "targets", "map_base"), "training": ("dtype",)}

# The entries of a checkpoint's state, and their types.
STATE_TYPES: Mapping[str, type] = {
    "tokens": int,
    "data": dict,
    "applied_updates": int,
    "skipped_steps": int,
    "loss_scale": dict,
    "config": dict,
}
CORRECTION = ("engine", "delay_correction")
OPTIMIZER = ("optimizer", "name")
# What checkpoints of earlier releases mean, which lack these keys.
BEFORE: Mapping[tuple[str, str], str] = {
    CORRECTION: "none",
    OPTIMIZER: "adamw",
    ("optimizer", "state"): "exact",
}
MOST_COUNTED = 2**62  # upper limit of any count in a state
JUMP = 1.2  # a learning rate that rises by this factor at a resumption is reported


def find_checkpoint(
    config: Config,
    checkpointer: Checkpointer,
    views: Mapping[str, Tensor],
    optional: Callable[[str], bool],
    forms: SavedForms,
) -> Loaded | None:
    """Fill `views` from the run's newest checkpoint, otherwise from `checkpoint.load_path`.

    Returns None if there is neither, or if `checkpoint.load` asks for the weights only (`StartingWeights`). `optional`
    says by name which tensors may be missing, `forms` in which other forms they may be stored. One warning names the
    settings that have changed. Raises `RunError` for a checkpoint of another kind of run, `CheckpointError` for damaged ones.
    """
    try:
        loaded = checkpointer.load_latest(views, optional, forms)
        if loaded is None and (path := given_folder(config)) is not None and config.checkpoint.load == "all":
            loaded = load_checkpoint(path, views, optional, checkpointer.team, forms)
            require_steps_left(config, path, loaded.step)
            # The page in Weights & Biases stays the other run's, and so do its best checkpoint and the validations since.
            loaded = replace(loaded, state={**loaded.state, "wandb_run_id": None, "validation": None})
    except ForeignCheckpointError as error:
        # First: another optimizer's state differs in its tensors, and the message would name those.
        _refuse_another(error.folder, error.state, config)
        raise RunError(
            f"{error}{_difference(error, config)}. Resume with the settings it was made with, or give the run a name "
            "of its own (--run.name NAME)"
        ) from error
    except FolderError as error:  # the run's own are tried one after the other
        raise RunError(f"checkpoint.load_path: {error}") from error
    if loaded is not None:
        _check_state(loaded)
        _refuse_another(loaded.path, loaded.state, config)
        if checkpointer.team.rank == 0:  # all machines have the same settings
            if text := forms.rounding_text(loaded.converted):
                logger.warning("%s: %s", loaded.path, text)
            _warn_of_changes(loaded, config)
    return loaded


def given_folder(config: Config) -> Path | None:
    path = config.checkpoint.load_path
    return None if path is None else Path(os.path.expanduser(path))


def resumed_stale_layers(config: Config, checkpointer: Checkpointer, given: int | None) -> int | None:
    """Return the number of stale layers of the checkpoint that the run would resume from, otherwise `given`.

    Raises `RunError` if both are known and differ: a resumed run must not change the rule of its steps.
    """
    for path, _, state in resumable(config, checkpointer):
        kept = state.get("stale_layers")
        if type(kept) is not int:
            return given  # of a run with another `engine.update`
        if given not in (None, kept):
            raise RunError(
                f'engine.stale_layers: given {given}, and {path} was made with {kept}; legal: {kept}, or "auto", which '
                "keeps the checkpoint's. A run of another name (--run.name NAME) may begin with other values"
            )
        return kept
    return given


def require_same_optimizer(config: Config, checkpointer: Checkpointer) -> None:
    """Raise `RunError` if the run would resume from a checkpoint of another optimizer. Only its state is read."""
    for path, _, state in resumable(config, checkpointer):
        _refuse_another(path, state, config, model=False)
        return


def resumable(config: Config, checkpointer: Checkpointer) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """Yield the folders, steps and states of the checkpoints that a run may resume from, the one tried first at the front."""
    paths = [path for _, path in sorted(checkpointer.checkpoints().items(), reverse=True)]
    start = given_folder(config) if config.checkpoint.load == "all" else None
    for path in [*paths, *([start] if start is not None and not paths else [])]:
        try:
            manifest = read_manifest(path, is_part=checkpointer.is_part)
            yield path, manifest.step, read_state(path, manifest)
        except CheckpointError:
            continue  # loading names the damage, and takes the checkpoint before


def require_complete_as_asked(loaded: Loaded, config: Config, loader: Loader) -> None:
    """Raise `RunError` if the complete run, whose last checkpoint is given, was trained with other settings or data.

    A run that is not complete may change its settings, because they take effect. A complete one would end at once, and a
    sweep that reuses its name would seem to succeed. A lower `training.steps` alone is a warning.
    """
    path, keys = loaded.path, dict(RUN_KEYS)
    # A run has no more need of what it began with, so the keys of that may be left out by now.
    if config.checkpoint.load_path is None:
        del keys["checkpoint"]
    if config.lora.path is None:
        keys["lora"] = tuple(key for key in keys["lora"] if key != "path")
    changes = _changes(loaded.state, config, keys)
    instead = "Give this run a name of its own (--run.name NAME)"
    if all(change.startswith("training.steps ") for change in changes):
        for change in changes:
            logger.warning("%s was trained with other settings: %s", path, change)
    else:
        if not _changes(loaded.state, config, MODEL_KEYS):
            instead += ", or raise training.steps or data.epochs to continue with the new settings"
        raise RunError(
            f"{path}: the run is complete, and it was trained with other settings: {', '.join(changes)}. Nothing would "
            f"be trained with the new ones. {instead}"
        )
    _check_state(loaded)
    try:
        loader.load_state_dict(loaded.state["data"])
    except DataError as error:
        raise RunError(
            f"{path}: the run is complete, and it was trained on other data: {error}. {instead}"
        ) from error


def require_steps_left(config: Config, path: Path, step: int) -> None:
    """Raise `RunError` if a checkpoint after `step` steps leaves nothing to train."""
    if step >= config.training.num_steps:
        raise RunError(
            f"checkpoint.load_path: {path} is after step {step}, and training.steps is "
            f'{config.training.num_steps}; legal: more steps, or checkpoint.load = "weights" to begin at step 0 with its '
            "weights"
        )


@dataclass(frozen=True)
class StartingWeights:
    """The weights in `checkpoint.load_path`, and nothing else of it, for a run that begins at step 0 with `store`."""

    config: Config
    store: HostStore
    team: MachineTeam

    @property
    def folder(self) -> Path:
        folder = given_folder(self.config)
        assert folder is not None, "the config checks ask for a folder"
        return folder

    def load(self, names: Collection[str]) -> None:
        """Fill the weights `names` of the store, as they lie in its memory. Raises `RunError`."""
        views = {
            name: view
            for name, view in self.store.loadable_views().items()
            if _is_weight(name) and name.partition("/")[2] in names
        }
        forms = SavedForms.of(self.store)
        try:
            loaded = load_checkpoint(self.folder, views, lambda name: not _is_weight(name), self.team, forms)
        except CheckpointError as error:
            raise RunError(f"checkpoint.load_path: {error}{_difference(error, self.config)}") from error
        _refuse_another(loaded.path, loaded.state, self.config, optimizer=False)


def _is_weight(name: str) -> bool:
    return name.partition("/")[0] in (WEIGHTS, RESIDUAL)


def _difference(error: CheckpointError, config: Config) -> str:
    """Return, in brackets, the settings by which the tensors of another model's checkpoint differ from the run's."""
    state = error.state if isinstance(error, ForeignCheckpointError) else {}
    differing = _changes(state, config, STORED_KEYS)
    return f" ({', '.join(differing)})" if differing else ""


def _check_state(loaded: Loaded) -> None:
    """Raise `RunError` if an entry of the state is missing, of another type, or out of range."""
    most = {"tokens": MOST_COUNTED, "applied_updates": loaded.step, "skipped_steps": loaded.step}
    for key, kind in STATE_TYPES.items():
        value = loaded.state.get(key)
        # Not isinstance: JSON's true is an int in Python.
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= most[key]):
            raise RunError(f"{loaded.path}: invalid run state in the checkpoint: {key} is {str(value)[:100]}")


def _refuse_another(
    path: Path, state: Mapping[str, Any], config: Config, *, model: bool = True, optimizer: bool = True
) -> None:
    """Raise `RunError` for the checkpoint of another model or optimizer. Its tensors may have the same names and shapes."""
    if model and (differing := _changes(state, config, MODEL_KEYS)):
        raise RunError(
            f"{path} is of another model ({', '.join(differing)}). Resume with the former model, or give the run a name "
            "of its own (--run.name NAME)"
        )
    if optimizer and (differing := _changes(state, config, {OPTIMIZER[0]: OPTIMIZER[1:]})):
        raise RunError(
            f"{path} holds the state of another optimizer ({', '.join(differing)}). Resume with the former optimizer, or "
            "begin a run of another name with these weights and a fresh optimizer: --run.name NAME "
            f"--checkpoint.load weights --checkpoint.load_path {path}"
        )


def _warn_of_changes(loaded: Loaded, config: Config) -> None:
    """Warn of changed settings, and of a learning rate that jumps under another schedule."""
    if not (changes := _changes(loaded.state, config, LOSS_KEYS)):
        return
    rates, before = "", loaded.state["config"]
    with suppress(KeyError, TypeError, ValueError, ArithmeticError):  # of another release
        table, lr = LRScheduleTable.model_validate(before["lr_schedule"]), float(before["optimizer"]["lr"])
        reached = LRSchedule(table, lr, int(before["training"]["steps"]))(max(loaded.step - 1, 0))
        follows = LRSchedule(config.lr_schedule, config.optimizer.lr, config.training.num_steps)(loaded.step)
        if follows > JUMP * reached:
            rates = (
                f". The learning rate jumps from {reached:.2e} to {follows:.2e}: a decay ends at the last step. For runs "
                'that are made longer, lr_schedule.decay = "wsd" decays over the last fifth alone and continues from a '
                'checkpoint before it; "none" never decays'
            )
    message = f"{loaded.path} was made with other settings; from now on {', '.join(changes)}"
    logger.warning("%s%s", terminal_safe(message), rates)


def _changes(state: Mapping[str, Any], config: Config, keys: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return `table.key old -> new` for each key whose value in the state's configuration differs from the run's."""
    saved, now = state.get("config"), config.model_dump(mode="json")
    before = saved if isinstance(saved, dict) else {}
    changes = []
    for table, names in keys.items():
        old = before.get(table)
        if not isinstance(old, dict):
            continue
        for name in names or now[table]:
            if name not in old and (table, name) not in BEFORE:
                continue
            was, will_be = (_meaning(settings, table, name) for settings in (before, now))
            if was != will_be:
                changes.append(f"{table}.{name} {was!r} -> {will_be!r}")
    return changes


def _meaning(config: Mapping[str, Any], table: str, name: str) -> Any:
    """Return the value of a configuration's key; the correction of the delay by what it does, so that `auto` is no change."""
    settings = config[table]
    value = settings.get(name, BEFORE.get((table, name)))
    if (table, name) == CORRECTION and value == "auto":
        corrects = settings.get("update") == "async" and table_for(config.get(OPTIMIZER[0])).can_predict
        return "predict" if corrects else "none"
    return value
