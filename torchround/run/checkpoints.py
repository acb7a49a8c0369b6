"""A run's checkpoints: each holds the run's position beside the host store's state, and the next start finds it.

At the end: the search for the one that a run begins from, whether it fits, and which settings have changed since.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import methodcaller
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    FolderError,
    ForeignCheckpointError,
    Loaded,
    SaveWatch,
    checkpoint_name,
    load_checkpoint,
    open_checkpoint,
    verify_checkpoint,
)
from torchround.checkpoint.checkpointer import save_with_patience
from torchround.checkpoint.manifest import read_manifest, read_state
from torchround.config import Config, LoraTable
from torchround.config.load import GONE_KEYS
from torchround.data import DataError, Loader
from torchround.engine.engine import Engine
from torchround.engine.saver import Save
from torchround.engine.store.bundles import OLDER_WEIGHTS
from torchround.engine.store.host_store import HostStore
from torchround.machines.group import MachineError
from torchround.planning.memory import size_text
from torchround.run.early_end import BadStepsError
from torchround.run.run_folder import RunError, RunFolder
from torchround.run.validation import LARGEST, ValidationProgress, best_of, kept_losses
from torchround.untrusted.terminal import Progress, say, terminal_safe

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


@dataclass(frozen=True)
class RunPosition:
    """The place of a run after `step` steps. Together with the host store's state, a run resumes from it.

    `tokens` counts the labels trained on so far, under the name that metrics and checkpoints use; `data` is the loader's
    state. `validation` is None until the run is validated for the first time.
    """

    step: int
    tokens: int
    data: dict[str, Any]
    validation: ValidationProgress | None = None


class RunCheckpoints:
    """The checkpoints of one run: restored from, saved beside training, and saved after a fault.

    The trainer appends to `positions` as it dispatches steps. The newest few are kept, because a fault leaves the host
    store at one of them. A checkpoint appears only after the steps before it are in the metrics (`reported`), so that a
    run that is killed and resumed has every step in its metrics.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        self._team = folder.team
        table = config.checkpoint
        self._checkpointer = folder.checkpointer(table.keep_latest_k, table.keep_every_n_steps)
        self.positions: deque[RunPosition] = deque(maxlen=4)
        self.wandb_run_id: str | None = None
        self.skipped_steps = 0
        self.saved_step = -1  # step 0 can be saved too
        # The validations that the checkpoint of `saved_step` knows of.
        self._saved_validation: ValidationProgress | None = None
        self._first_step = 0
        self._reported_step = 0
        # Position of each save under way, oldest first, and its future result: the line that reports it.
        self._under_way: deque[tuple[RunPosition, Save[str]]] = deque()

    @property
    def position(self) -> RunPosition:
        return self.positions[-1]

    def complete_step(self) -> int | None:
        """Return the step of the newest checkpoint if it reaches `training.steps` and verifies, otherwise None.

        Every byte of it is read. Otherwise a run with a damaged last checkpoint would be called complete. A warning names
        settings that have changed since: nothing is trained with the new ones.
        """
        step, last = self._checkpointer.latest_step(), self._config.training.num_steps
        if self._team.rank == 0 and step is not None and step >= last:
            path = self._checkpointer.checkpoints()[step]
            try:
                verify_checkpoint(path, Progress(f"verifying {path}", text=size_text).advance)
                more = "run.seed", "data", "lora.path", "checkpoint.load", "checkpoint.load_path"
                warn_of_changes(path, self._checkpointer.read_state(step), self._config, *more)
            except DamagedCheckpointError:
                step = None  # loading names the damage, and takes the checkpoint before
            except ForeignCheckpointError:
                pass  # of another version: complete as far as this one can tell
        found: int | None = self._team.gather(step, "the newest checkpoint")[0]
        return found if found is not None and found >= last else None

    def restore(self, store: HostStore, loader: Loader) -> bool:
        """Fill store and loader from a checkpoint; False if there is none. Raises `RunError` and `CheckpointError`."""
        start_s = time.monotonic()
        views = store.loadable_views()
        loaded = self._load_into(views)
        if loaded is None:
            self.positions.append(RunPosition(0, 0, loader.state_dict()))
            return False
        state = {"stale_layers": 0, **loaded.state}
        try:
            loader.load_state_dict(state["data"])
            most = {"tokens": LARGEST, "applied_updates": loaded.step, "skipped_steps": loaded.step}
            most["stale_layers"] = len(store.locations) - 1
            for key, limit in most.items():
                # Not isinstance: JSON's true is an int in Python.
                if type(state[key]) is not int or not 0 <= state[key] <= limit:
                    raise ValueError(f"{key} is {str(state[key])[:100]}")
            stale_layers = state["stale_layers"] if store.mode.updates_by_layer else 0
            # A checkpoint of a `sync` run has none, so an `async` run that resumes from it starts from the newest weights.
            older = (b.older_views(store.step, lags=b.layers[0] < stale_layers) for b in store.trained)
            holds_older = all(name in loaded.filled for names in older for name in names if name in views)
            store.resume(
                loaded.step,
                state["applied_updates"],
                state["loss_scale"],
                state.get("spikes"),
                holds_older,
                state.get("prediction"),
                stale_layers,
            )
            validation = state.get("validation")
            progress = None if validation is None else ValidationProgress.from_state(validation)
        except DataError as error:
            raise RunError(
                f"{loaded.path}: {error}. Resume with the data as it was, or begin a run of another name on other data "
                f"with these weights: --run.name NAME --checkpoint.load weights --checkpoint.load_path {loaded.path}"
            ) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(f"{loaded.path}: invalid run state in the checkpoint: {error}") from error
        self.skipped_steps = state["skipped_steps"]
        self.wandb_run_id = state.get("wandb_run_id")
        self.positions.append(RunPosition(loaded.step, state["tokens"], state["data"], progress))
        self._first_step = self._reported_step = loaded.step
        if loaded.path.parent == self._folder.checkpoints:  # another run's checkpoint is not saved here yet
            self.saved_step, self._saved_validation = loaded.step, progress
        say(f"resuming after step {loaded.step} from {loaded.path} ({time.monotonic() - start_s:.1f} s)")
        return True

    def _load_into(self, views: Mapping[str, Tensor]) -> Loaded | None:
        """Fill `views` from the run's newest checkpoint, otherwise from `checkpoint.load_path`.

        Returns None if there is neither, or if `checkpoint.load` asks for the weights only. One warning names the settings
        that have changed. Raises `RunError` for a checkpoint of another kind of run, and `CheckpointError` for damaged ones.
        """
        config, is_optional = self._config, methodcaller("startswith", OLDER_WEIGHTS)
        try:
            loaded = self._checkpointer.load_latest(views, is_optional)
            path = given_folder(config)
            if loaded is None and path is not None and config.checkpoint.load == "all":
                loaded = load_checkpoint(path, views, is_optional, self._team)
                # The page in Weights & Biases stays the other run's, and so do its best checkpoint and the validations since.
                loaded = replace(loaded, state={**loaded.state, "wandb_run_id": None, "validation": None})
        except ForeignCheckpointError as error:
            if not error.state:  # it could not be read
                raise RunError(error) from error
            differing = changes(error.state, config, (*MODEL_KEYS, *STORED_KEYS))
            named = f" ({', '.join(differing)})" if differing else ""
            raise RunError(f"{error}{named}. {_ways_out(error.folder)}") from error
        except FolderError as error:  # the run's own are tried one after the other
            raise RunError(f"checkpoint.load_path: {error}") from error
        if loaded is not None and self._team.rank == 0:  # all machines have the same settings
            warn_of_changes(loaded.path, loaded.state, config)
        return loaded

    def add_validation(self, loss: float) -> None:
        """Note the validation loss of the newest dispatched step. Its checkpoint is saved after this."""
        position = self.position
        progress = (position.validation or ValidationProgress()).after(position.step, loss)
        self.positions[-1] = replace(position, validation=progress)

    def begin_save(self, engine: Engine) -> None:
        """Begin to save the run as it is after the newest dispatched step, while training continues. Does not wait."""
        position = self.position
        pending = engine.save(lambda save: self._write(position, save.state, save.tensors, save))
        self._under_way.append((position, pending))
        if position.step <= self._reported_step:
            pending.may_publish()

    def reported(self, step: int) -> None:
        """Note that the steps up to `step` are in the metrics: their checkpoints may appear. Report saves that ended."""
        self._reported_step = step
        for position, pending in self._under_way:
            if position.step <= step:
                pending.may_publish()
        self.report_saves(waits=False)

    def report_saves(self, waits: bool = True) -> None:
        """Report the saves that have ended, or wait for all, whose steps must be reported. After a failure training continues."""
        while self._under_way and (waits or self._under_way[0][1].ended):
            position, pending = self._under_way.popleft()
            try:
                self._note_saved(position, pending.result())
            except CheckpointError as error:
                # The run's last save begins next, and says what is wrong if it fails too. Otherwise the next interval saves.
                if position.step != self._config.training.num_steps:
                    unsaved = self.position.step - max(self.saved_step, self._first_step)
                    logger.warning("%s; training continues, and %d steps are not saved", error, unsaved)

    def save_now(self, engine: Engine) -> None:
        """Save the newest dispatched step, and wait. A full disk is tried again for a minute. Raises `CheckpointError`."""
        self.report_saves()

        def save() -> None:
            self.begin_save(engine)
            # Not `report_saves`: after the last save there is no next one, so a failure ends the run as a fault.
            position, pending = self._under_way.popleft()
            self._note_saved(position, pending.result())

        # If the data ends, the newest step is validated then, and it may have been saved before.
        position = self.position
        if (position.step, position.validation) != (self.saved_step, self._saved_validation):
            save_with_patience(save)

    def abandon_saves(self) -> None:
        """After a fault, report the saves that ended with the engine, and forget those that it gave up."""
        ended = [save for save in self._under_way if save[1].ended]
        self._under_way.clear()
        for position, pending in ended:
            try:
                self._note_saved(position, pending.result())
            except (CheckpointError, MachineError) as error:
                logger.warning("%s", error)

    def rescue(self, store: HostStore, error: Exception | None = None) -> None:
        """Save the state that a fault left, unless it mixes two weight versions or is saved already.

        The engine has ended, and its saves too. One update may still hang in a thread; no other can begin. Several
        machines save together after an `error` in the data, which all of them raise after the same step. After any
        other they save nothing: a part of the state is on machines that may be gone, or at another step.
        """
        if isinstance(error, BadStepsError):
            return  # it is raised once the run has been saved
        if not self._team.is_alone and not isinstance(error, DataError):
            if self._team.rank == 0:
                logger.warning(
                    "the state, spread over %d machines, is not saved after this fault", self._team.size
                )
            return
        # Checked before the step is read: a store that is consistent now stays so.
        if not store.is_consistent:
            logger.warning("an update was not completed, so what it left is not saved")
            return
        position = next((p for p in self.positions if p.step == store.step), None)
        # At its first step a run has what it began with, which a new start finds again.
        if position is None or position.step in (self.saved_step, self._first_step):
            return
        try:
            line = self._write(position, store.resume_state(), store.named_views())
        except CheckpointError as failure:
            logger.warning("%s", failure)
        else:
            self._note_saved(position, line)

    def _write(
        self,
        position: RunPosition,
        resume_state: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        watch: SaveWatch | None = None,
    ) -> str:
        start_s = time.monotonic()
        state = {
            **{name: value for name, value in asdict(position).items() if value is not None},
            **resume_state,
            "skipped_steps": position.step - resume_state["applied_updates"],
            "wandb_run_id": self.wandb_run_id,
            "config": self._config.model_dump(mode="json"),
        }
        if self._config.validation.keep_best and self._team.rank == 0:
            losses = kept_losses(self._checkpointer)
            losses.pop(position.step, None)
            if position.validation is not None and position.validation.loss is not None:
                losses[position.step] = position.validation.loss
            # Set before the save, which deletes older checkpoints once the new one is complete, and only then.
            self._checkpointer.best_step = best_of(losses)
        total_bytes = sum(tensor.nbytes for tensor in tensors.values())
        progress = Progress(f"saving {checkpoint_name(position.step)}", total_bytes, size_text)
        path: Path = self._checkpointer.save(position.step, tensors, state, watch, progress.advance)
        return f"saved {path} ({time.monotonic() - start_s:.1f} s)"

    def _note_saved(self, position: RunPosition, line: str) -> None:
        self.saved_step, self._saved_validation = position.step, position.validation
        say(line)


# The start of a run.


def given_folder(config: Config) -> Path | None:
    path = config.checkpoint.load_path
    return None if path is None else Path(os.path.expanduser(path))


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
        advice = ". Resume with the former model, or give this run another name (--run.name NAME)"
        raise RunError(f"{path} is of another model ({', '.join(differing)}){advice if resumes else ''}")
    is_reloaded = config.lora.map_base or config.lora.base != "bf16"
    if not resumes and is_reloaded and (differing := changes(state, config, ("model.hf_path",))):
        logger.warning("%s holds adapters alone, used on another base (%s)", path, ", ".join(differing))
    if resumes and (differing := changes(state, config, ("optimizer.name",))):
        raise RunError(f"{path} holds another optimizer's state ({', '.join(differing)}). {_ways_out(path)}")


def first_state(
    config: Config, checkpointer: Checkpointer, start: Path | None = None
) -> tuple[Path | None, int, dict[str, Any]]:
    """Return folder, step and state of the newest readable checkpoint that a run may resume from.

    A run without any may begin from `start`, or from the one that `checkpoint.load` asks to resume from; otherwise the
    folder is None, the step 0 and the state empty.
    """
    paths = [path for _, path in sorted(checkpointer.checkpoints().items(), reverse=True)]
    first = given_folder(config) if config.checkpoint.load == "all" else start
    for path in paths or ([first] if first is not None else []):
        try:
            manifest = read_manifest(path)
            return path, manifest.step, read_state(path, manifest)
        except CheckpointError:
            continue  # loading names the damage, and takes the checkpoint before
    return None, 0, {}


def warn_of_changes(path: Path, state: Mapping[str, Any], config: Config, *more: str) -> None:
    """Warn of settings that differ from the checkpoint's, and of other values that it has for keys that are constants now."""
    if changed := changes(state, config, (*LOSS_KEYS, *more, *GONE_KEYS)):
        message = f"{path} was made with other settings; from now on {', '.join(changed)}"
        if config.lr_schedule.decay != "none" and any(text.startswith("training.steps ") for text in changed):
            message += '. Other training.steps change the learning rate of each step; lr_schedule.decay = "none" does not'
        logger.warning("%s", terminal_safe(message))


def changes(state: Mapping[str, Any], config: Config, keys: Sequence[str]) -> list[str]:
    """Return `table.key old -> new` for each key whose value in the state's configuration differs from the run's.

    A key of earlier releases has its constant as the new value.
    """
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
            for each in [name] if name else now[table]:
                new = now[table].get(each, GONE_KEYS.get(f"{table}.{each}"))
                if old.get(each, new) != new:
                    changed.append(f"{table}.{each} {old[each]!r} -> {new!r}")
    return changed


def _ways_out(path: Path) -> str:
    return (
        "Resume with the former settings, or begin a run of another name with these weights and a fresh optimizer: "
        f"--run.name NAME --checkpoint.load weights --checkpoint.load_path {path}"
    )
