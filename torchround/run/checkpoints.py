"""A run's checkpoints: each holds the run's position beside the host store's state, and the next start finds it."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoSpaceError,
    SaveWatch,
    checkpoint_name,
    verify_checkpoint,
)
from torchround.config import Config
from torchround.data import DataError, Loader
from torchround.engine.engine import Engine
from torchround.engine.saver import Save
from torchround.engine.store.bundles import OLDER_WEIGHTS
from torchround.engine.store.host_store import HostStore
from torchround.machines.group import MachineError
from torchround.planning.memory import size_text
from torchround.run.early_end import BadStepsError
from torchround.run.resume import find_checkpoint, warn_of_changes
from torchround.run.run_folder import RunError, RunFolder
from torchround.run.validation import LARGEST, ValidationProgress, best_of, kept_losses
from torchround.untrusted.terminal import Progress, say

logger = logging.getLogger(__name__)

RETRY_S, MOST_WAIT_S = 10, 60  # between two tries of the last save on a full disk, and in all


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
        loaded = find_checkpoint(self._config, self._checkpointer, views, _is_older_weight)
        if loaded is None:
            self.positions.append(RunPosition(0, 0, loader.state_dict()))
            return False
        state = loaded.state
        try:
            loader.load_state_dict(state["data"])
            most = {"tokens": LARGEST, "applied_updates": loaded.step, "skipped_steps": loaded.step}
            for key, limit in most.items():
                # Not isinstance: JSON's true is an int in Python.
                if type(state[key]) is not int or not 0 <= state[key] <= limit:
                    raise ValueError(f"{key} is {str(state[key])[:100]}")
            stale_layers = _stale_layers(store, state)
            # A checkpoint of a `sync` run has none, so an `async` run that resumes from it starts from the newest weights.
            older = _older_weights(store, views, stale_layers)
            holds_older_weights = all(name in loaded.filled for name in older)
            store.resume(
                loaded.step,
                state["applied_updates"],
                state["loss_scale"],
                state.get("spikes"),
                holds_older_weights,
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

    def add_validation(self, loss: float) -> None:
        """Note the validation loss of the newest dispatched step. Its checkpoint is saved after this."""
        position = self.position
        progress = (position.validation or ValidationProgress()).after(position.step, loss)
        self.positions[-1] = replace(position, validation=progress)

    def begin_save(self, engine: Engine) -> None:
        """Begin to save the run as it is after the newest dispatched step, while training continues. Does not wait."""
        position = self.position

        def write(source: Save[str]) -> str:
            return self._write(position, source.state, source.tensors, source)

        pending = engine.save(write)
        self._under_way.append((position, pending))
        if position.step <= self._reported_step:
            pending.may_publish()

    def reported(self, step: int) -> None:
        """Note that the steps up to `step` are in the metrics: their checkpoints may appear. Report saves that ended."""
        self._reported_step = step
        for position, pending in self._under_way:
            if position.step <= step:
                pending.may_publish()
        while self._under_way and self._under_way[0][1].ended:
            self._report(*self._under_way.popleft())

    def finish_saves(self) -> None:
        """Wait for the saves under way. Their steps must have been reported."""
        while self._under_way:
            self._report(*self._under_way.popleft())

    def save_now(self, engine: Engine) -> None:
        """Save the newest dispatched step, and wait. A full disk is tried again for a minute. Raises `CheckpointError`."""
        self.finish_saves()

        def save() -> None:
            self.begin_save(engine)
            # Not `_report`: after the last save there is no next one, so a failure ends the run as a fault.
            position, pending = self._under_way.popleft()
            self._note_saved(position, pending.result())

        # If the data ends, the newest step is validated then, and it may have been saved before.
        position = self.position
        if (position.step, position.validation) != (self.saved_step, self._saved_validation):
            save_with_patience(save)

    def end_saves(self) -> None:
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
                text = "the state is spread over %d machines, so what the fault left is not saved"
                logger.warning(text, self._team.size)
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

    def _report(self, position: RunPosition, pending: Save[str]) -> None:
        """Wait for a save and report it. After a failure training continues; the next interval saves again."""
        try:
            self._note_saved(position, pending.result())
        except CheckpointError as error:
            if position.step == self._config.training.num_steps:
                return  # the run's last save begins next, and says what is wrong if it fails too
            unsaved = self.position.step - max(self.saved_step, self._first_step)
            logger.warning("%s; training continues, and %d steps are not saved", error, unsaved)

    def _note_saved(self, position: RunPosition, line: str) -> None:
        self.saved_step, self._saved_validation = position.step, position.validation
        say(line)


def save_with_patience(save: Callable[[], object], sleep: Callable[[float], object] = time.sleep) -> None:
    """Call `save`. While the disk has no room for it, try again every `RETRY_S` seconds, for `MOST_WAIT_S` at most."""
    for waited_s in range(0, MOST_WAIT_S + 1, RETRY_S):
        try:
            save()
        except NoSpaceError as error:
            if waited_s == MOST_WAIT_S:
                raise
            if waited_s == 0:
                logger.warning("%s. Free some space: it is tried again for %d s", error, MOST_WAIT_S)
            sleep(RETRY_S)
        else:
            return


def _is_older_weight(name: str) -> bool:
    return name.startswith(OLDER_WEIGHTS)


def _older_weights(store: HostStore, views: Mapping[str, Tensor], stale_layers: int) -> list[str]:
    """Return the names of the older device weights that a checkpoint of this run would hold."""
    names = [name for name in views if _is_older_weight(name)]
    if not store.mode.updates_by_layer:
        return names
    lagging = {
        parameter.name
        for bundle in store.trained
        if bundle.layers[0] < stale_layers
        for parameter in bundle.parameters
    }
    return [name for name in names if name.split("/", 1)[1] in lagging]


def _stale_layers(store: HostStore, state: Mapping[str, Any]) -> int:
    number = state.get("stale_layers", 0)
    if type(number) is not int or not 0 <= number < len(store.locations):
        raise ValueError(f"stale_layers is {str(number)[:100]}")
    return number if store.mode.updates_by_layer else 0
