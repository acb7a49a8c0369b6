"""A run's checkpoints: where it was is written beside the host store's state, and found again by the next start."""

import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from torchround.checkpoint import Checkpointer, CheckpointError
from torchround.config import Config
from torchround.data import DataError
from torchround.data.loader import Loader
from torchround.engine.host_store import OLDER_MASTERS, HostStore
from torchround.run.console import say
from torchround.run.folder import RunFolder
from torchround.run.resume import ResumeError, StartingWeights, find_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Where a run is after `step` steps; with the host store's state, enough to go on from there."""

    step: int
    tokens: int
    data: dict[str, Any]


class RunCheckpoints:
    """Restores a run, saves it, and saves what a fault left of it.

    The trainer appends to `positions` as it dispatches steps; the newest few are kept, because a fault leaves the host
    store at one of them.
    """

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        table = config.checkpoint
        self._checkpointer = Checkpointer(folder.checkpoints, table.keep_latest_k, table.keep_every_n_steps)
        self.positions: deque[Position] = deque(maxlen=4)
        self.wandb_run_id: str | None = None
        self.skipped_steps = 0
        self.saved_step = -1

    @property
    def position(self) -> Position:
        """After the newest step that was dispatched."""
        return self.positions[-1]

    def latest_step(self) -> int | None:
        """Of the newest complete checkpoint in the run's folder."""
        return self._checkpointer.latest_step()

    def restore(self, store: HostStore, loader: Loader) -> bool:
        """Fill the store, and bring the loader to its place; False where there is nothing to go on from.

        Raises `ResumeError` and `CheckpointError`.
        """
        start_s = time.monotonic()
        views = store.named_views()
        loaded = find_checkpoint(self._config, self._checkpointer, views, _is_older_master)
        if loaded is None:
            self.positions.append(Position(0, 0, loader.state_dict()))
            return False
        state = loaded.state
        try:
            loader.load_state_dict(state["data"])
        except DataError as error:
            raise ResumeError(
                f"{loaded.path}: {error}. Go on with the data as it was, or begin a run of another name on other data "
                f"with these weights: --run.name NAME --checkpoint.load weights --checkpoint.load_path {loaded.path}"
            ) from error
        holds_older_masters = all(name in loaded.filled for name in views if _is_older_master(name))
        try:
            store.resume(
                loaded.step,
                state["applied_updates"],
                state["loss_scale"],
                state.get("spikes"),
                holds_older_masters,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ResumeError(f"{loaded.path}: its state is not that of a run: {error!r}") from error
        self.skipped_steps = state["skipped_steps"]
        self.wandb_run_id = state.get("wandb_run_id")
        self.positions.append(Position(loaded.step, state["tokens"], state["data"]))
        if loaded.path.parent == self._folder.checkpoints:
            self.saved_step = loaded.step
        say(f"going on after step {loaded.step} from {loaded.path} ({time.monotonic() - start_s:.1f} s)")
        return True

    def starting_weights(self) -> StartingWeights | None:
        """Those of another run that a new one begins with, where it is asked to."""
        return StartingWeights(self._config) if self._config.checkpoint.load == "weights" else None

    def save(self, store: HostStore, position: Position) -> None:
        """Write the store's state, which is that after `position`. Raises `CheckpointError`."""
        start_s = time.monotonic()
        state = {
            **asdict(position),
            **store.resume_state(),
            "skipped_steps": position.step - store.applied_updates,
            "wandb_run_id": self.wandb_run_id,
            "config": self._config.model_dump(mode="json"),
        }
        path = self._checkpointer.save(position.step, store.named_views(), state)
        self.saved_step = position.step
        say(f"saved {path} ({time.monotonic() - start_s:.1f} s)")

    def rescue(self, store: HostStore) -> None:
        """Save the state that a fault left, unless it mixes two weight versions or is saved already."""
        position = next((p for p in self.positions if p.step == store.step), None)
        if position is None or not store.is_consistent or position.step == self.saved_step:
            return
        try:
            self.save(store, position)
        except CheckpointError as error:
            logger.warning("%s", error)


def _is_older_master(name: str) -> bool:
    """What only `async` needs, and `sync` neither saves nor wants."""
    return name.startswith(OLDER_MASTERS)
