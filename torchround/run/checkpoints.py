"""A run's checkpoints: where it was is written beside the host store's state, and found again by the next start."""

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    SaveWatch,
    verify_checkpoint,
)
from torchround.config import Config
from torchround.data import DataError
from torchround.data.loader import Loader
from torchround.engine.engine import Engine
from torchround.engine.saver import PendingSave, SaveSource
from torchround.engine.store.host_store import OLDER_WEIGHTS, HostStore
from torchround.run.resume import ResumeError, StartingWeights, find_checkpoint
from torchround.run.run_folder import RunFolder
from torchround.untrusted.terminal import say

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunPosition:
    """Where a run is after `step` steps; with the host store's state, enough to go on from there."""

    step: int
    tokens: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """A checkpoint and how long it took."""

    path: Path
    seconds: float


@dataclass(frozen=True)
class SaveUnderWay:
    """A save beside training, of what the run was at `position`."""

    position: RunPosition
    pending: PendingSave[Saved]


class RunCheckpoints:
    """Restores a run, saves it beside its training, and saves what a fault left of it.

    The trainer appends to `positions` as it dispatches steps; the newest few are kept, because a fault leaves the host
    store at one of them. A checkpoint appears only after the steps before it are in the metrics (`reported`), so that a
    run that is killed and goes on leaves none out.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        table = config.checkpoint
        self._checkpointer = Checkpointer(folder.checkpoints, table.keep_latest_k, table.keep_every_n_steps)
        self.positions: deque[RunPosition] = deque(maxlen=4)
        self.wandb_run_id: str | None = None
        self.skipped_steps = 0
        self.saved_step = -1
        self._first_step = 0
        self._reported_step = 0
        self._under_way: deque[SaveUnderWay] = deque()

    @property
    def position(self) -> RunPosition:
        """After the newest step that was dispatched."""
        return self.positions[-1]

    def complete_step(self) -> int | None:
        """That of the newest checkpoint, where it is of the run's last step or a later one and sound.

        Every byte of it is read: of a damaged one it would else be said that there is nothing to do.
        """
        step = self._checkpointer.latest_step()
        if step is None or step < self._config.training.steps:
            return None
        try:
            verify_checkpoint(self._checkpointer.checkpoints()[step])
        except DamagedCheckpointError:
            return None  # loading names it, and takes the one before
        except ForeignCheckpointError:
            pass  # of a newer version, and whole as far as this one can tell
        return step

    def restore(self, store: HostStore, loader: Loader) -> bool:
        """Fill the store, and bring the loader to its place; False where there is nothing to go on from.

        Raises `ResumeError` and `CheckpointError`.
        """
        start_s = time.monotonic()
        views = store.named_views()
        loaded = find_checkpoint(self._config, self._checkpointer, views, _is_older_weight)
        if loaded is None:
            self.positions.append(RunPosition(0, 0, loader.state_dict()))
            return False
        state = loaded.state
        try:
            loader.load_state_dict(state["data"])
        except DataError as error:
            raise ResumeError(
                f"{loaded.path}: {error}. Go on with the data as it was, or begin a run of another name on other data "
                f"with these weights: --run.name NAME --checkpoint.load weights --checkpoint.load_path {loaded.path}"
            ) from error
        holds_older_weights = all(name in loaded.filled for name in views if _is_older_weight(name))
        try:
            store.resume(
                loaded.step,
                state["applied_updates"],
                state["loss_scale"],
                state.get("spikes"),
                holds_older_weights,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ResumeError(f"{loaded.path}: its state is not that of a run: {error!r}") from error
        self.skipped_steps = state["skipped_steps"]
        self.wandb_run_id = state.get("wandb_run_id")
        self.positions.append(RunPosition(loaded.step, state["tokens"], state["data"]))
        self._first_step = self._reported_step = loaded.step
        if loaded.path.parent == self._folder.checkpoints:
            self.saved_step = loaded.step
        say(f"going on after step {loaded.step} from {loaded.path} ({time.monotonic() - start_s:.1f} s)")
        return True

    def starting_weights(self) -> StartingWeights | None:
        """Those of another run that a new one begins with, where it is asked to."""
        return StartingWeights(self._config) if self._config.checkpoint.load == "weights" else None

    def begin_save(self, engine: Engine) -> None:
        """Save the run as it is after the newest step dispatched, beside the training that goes on. Does not wait."""
        position = self.position

        def write(source: SaveSource) -> Saved:
            return self._write(position, source.state, source.tensors, source)

        self._under_way.append(SaveUnderWay(position, engine.save(write)))
        self._let_appear()

    def reported(self, step: int) -> None:
        """All that is to be told of the steps up to `step` is in the metrics. Tells of saves that have ended."""
        self._reported_step = step
        self._let_appear()
        while self._under_way and self._under_way[0].pending.ended:
            self._tell(self._under_way.popleft())

    def finish_saves(self) -> None:
        """Wait for the saves under way. Their steps have been reported."""
        while self._under_way:
            self._tell(self._under_way.popleft())

    def save_now(self, engine: Engine) -> None:
        """Save the run as it is after the newest step dispatched, and wait for it. Raises `CheckpointError`."""
        self.finish_saves()
        if self.position.step != self.saved_step:
            self.begin_save(engine)
            self._conclude(self._under_way.popleft())

    def end_saves(self) -> None:
        """The engine has ended after a fault, so saves that were under way have too, or were given up."""
        ended = [save for save in self._under_way if save.pending.ended]
        self._under_way.clear()
        for save in ended:
            try:
                self._conclude(save)
            except CheckpointError as error:
                logger.warning("%s", error)

    def rescue(self, store: HostStore) -> None:
        """Save the state that a fault left, unless it mixes two weight versions or is saved already.

        The engine has ended, and the saves with it. An update may still be under way that does not get anywhere;
        none begins.
        """
        if not store.is_consistent:  # looked at first: a store that is whole now stays so
            newest = self._checkpointer.latest_step()
            left = (
                "there is no checkpoint"
                if newest is None
                else f"the newest checkpoint is that of step {newest}"
            )
            logger.warning("an update was not completed, so what it left is not saved; %s", left)
            return
        position = next((p for p in self.positions if p.step == store.step), None)
        if position is None or position.step == self.saved_step:
            return
        try:
            self._note(position, self._write(position, store.resume_state(), store.named_views()))
        except CheckpointError as error:
            logger.warning("%s", error)

    def _write(
        self,
        position: RunPosition,
        resume_state: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        watch: SaveWatch | None = None,
    ) -> Saved:
        start_s = time.monotonic()
        state = {
            **asdict(position),
            **resume_state,
            "skipped_steps": position.step - resume_state["applied_updates"],
            "wandb_run_id": self.wandb_run_id,
            "config": self._config.model_dump(mode="json"),
        }
        path = self._checkpointer.save(position.step, tensors, state, watch)
        return Saved(path, time.monotonic() - start_s)

    def _let_appear(self) -> None:
        for save in self._under_way:
            if save.position.step <= self._reported_step:
                save.pending.may_publish()

    def _tell(self, save: SaveUnderWay) -> None:
        """A save that failed is tried again at the next interval, and this is said again if that fails too."""
        try:
            self._conclude(save)
        except CheckpointError as error:
            unsaved = self.position.step - max(self.saved_step, self._first_step)
            logger.warning("%s; training goes on, and %d steps are not saved", error, unsaved)

    def _conclude(self, save: SaveUnderWay) -> None:
        self._note(save.position, save.pending.result())

    def _note(self, position: RunPosition, saved: Saved) -> None:
        self.saved_step = position.step
        say(f"saved {saved.path} ({saved.seconds:.1f} s)")


def _is_older_weight(name: str) -> bool:
    """What only `async` needs, and `sync` neither saves nor wants."""
    return name.startswith(OLDER_WEIGHTS)
