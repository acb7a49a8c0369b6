"""The checkpoints of one run: saved, loaded, and the older ones deleted.

A save of several machines takes three steps: machine 0 makes the folder; each writes its tensors, in files numbered after its
rank; machine 0 writes state and manifest and renames the folder, which makes it a checkpoint. The machines exchange how
each step went before any begins the next. A machine that fails makes the save fail on all of them, and one that dies leaves
the others in an exchange that raises. The former checkpoint is untouched until the new one has its name.
"""

import errno
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint.errors import CheckpointError, DamagedCheckpointError, NoSpaceError
from torchround.checkpoint.folders import (
    FILES_PER_MACHINE,
    MANIFEST_FILE,
    STATE_FILE,
    UNFINISHED,
    StepFolders,
    free_bytes_at,
    make_folder,
    sync_entry,
    write_synced,
)
from torchround.checkpoint.loading import Loaded, complete_in, load_checkpoint
from torchround.checkpoint.machine_team import MachineTeam
from torchround.checkpoint.manifest import (
    FileRecord,
    Manifest,
    checksum_of,
    encode_state,
    read_manifest,
    read_state,
)
from torchround.checkpoint.tensor_file import SaveWatch, TensorFile, Unwatched, plan_files, write_tensor_file
from torchround.planning.memory import size_text

logger = logging.getLogger(__name__)

# Errors of a write that succeeds once there is room: the disk is full, or the user's quota is.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
RETRY_S, MOST_WAIT_S = 10, 60  # between two tries of a save on a full disk, and in all


class Checkpointer(StepFolders):
    """The checkpoints in `folder`. Saves, loads, and keeps the newest `keep_latest_k` complete ones (0: all).

    Checkpoints whose step `keep_every_n_steps` divides are kept too (0: none), and so is the one of `best_step`. The
    machines of `team` save and load together: each calls the same methods in the same order.
    """

    best_step: int | None = None
    """Step of a checkpoint that is kept at any age."""

    def __init__(
        self,
        folder: Path | str,
        keep_latest_k: int = 0,
        keep_every_n_steps: int = 0,
        team: MachineTeam | None = None,
    ) -> None:
        super().__init__(folder)
        self.keep_latest_k = keep_latest_k
        self.keep_every_n_steps = keep_every_n_steps
        self.team = team or MachineTeam()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        watch: SaveWatch | None = None,
        advance: Callable[[int], object] = lambda nbytes: None,
    ) -> Path:
        """Write `tensors` and the JSON-able `state` as the checkpoint of a step, then delete checkpoints that are not kept.

        Tensors are contiguous CPU tensors of any dtype. Their bytes go straight from their memory to the file, so
        nothing may write to a tensor before `watch.finished_reading` is called for it. Raises `ValueError` before
        anything is written if a tensor or the state cannot be stored, and `CheckpointError` if the disk fails, or
        `NoSpaceError` if it is full; earlier checkpoints are then untouched. `advance` receives the number of bytes of
        each write. An exception raised by `watch` leaves the unfinished folder to the next save.

        Each machine of a team gives the tensors that it saves, all with names of their own, and machine 0's state is
        saved. A failure on one machine raises the same error on all.
        """
        team, watch = self.team, watch or Unwatched()
        files = plan_files(tensors, first_number=team.rank * FILES_PER_MACHINE)
        state_json = encode_state(state)
        own_bytes = sum(file.size_bytes for file in files) + len(state_json)
        every = team.gather([step, own_bytes], f"the size of each part of the checkpoint of step {step}")
        assert {other for other, _ in every} == {step}, f"the machines save other steps: {every}"
        try:
            self._all(step, lambda: self._prepare(step, sum(nbytes for _, nbytes in every)), watch)
            parts = self._all(step, lambda: self._write_part(step, files, watch, advance), watch)
            records = [record for part in parts for record in part]
            self._all(step, lambda: self._publish(step, records, state_json, watch), watch)
        except CheckpointError:
            # All machines have stopped writing by now.
            if team.rank == 0:
                shutil.rmtree(self.named(step, UNFINISHED), ignore_errors=True)
            raise
        # Old checkpoints go only now that the new one is complete. So a save needs room for one more than is kept.
        if team.rank == 0:
            self.delete(self.superfluous(newest=step))
        return self.named(step)

    def load_latest(
        self, tensors: Mapping[str, Tensor], optional: Callable[[str], bool] = lambda name: False
    ) -> Loaded | None:
        """Fill `tensors` in place from the newest usable checkpoint. Returns None if there are no checkpoints.

        `optional` is as for `load_checkpoint`. A warning names a damaged checkpoint, and the one before it is tried, which
        overwrites every tensor. Raises `ForeignCheckpointError` if the newest intact one is of another model or version,
        and `CheckpointError` if there are checkpoints but none can be used. The tensors may then hold parts of several
        checkpoints and must not be trained on.
        """
        # Machine 0's view: a network's file system may show the others an older one.
        steps = self.team.gather(list(self.checkpoints()), f"the checkpoints in {self.folder}")[0]
        failures: list[str] = []
        for step in sorted(steps, reverse=True):
            path = self.checkpoints().get(step, self.named(step))
            try:
                return load_checkpoint(path, tensors, optional, self.team, step)
            except DamagedCheckpointError as error:
                failures.append(str(error))
                if self.team.rank == 0:
                    logger.warning("%s; trying the checkpoint before step %d", error, step)
        if failures:
            raise CheckpointError(f"none of the checkpoints in {self.folder} can be used:", *failures)
        return None

    def read_state(self, step: int) -> dict[str, Any]:
        """Read the state in the checkpoint of a step. Raises `CheckpointError`."""
        path = self.checkpoints()[step]
        return read_state(path, read_manifest(path, step))

    def latest_step(self) -> int | None:
        return max(self.complete_steps(), default=None)

    def complete_steps(self) -> list[int]:
        """List the steps of the checkpoints whose files are all there at full size, rising. Contents are not read."""
        return list(complete_in(self))

    def superfluous(self, newest: int) -> list[Path]:
        """List the checkpoints older than the k-th newest complete one and not kept for their step or their loss.

        `newest` counts as the newest even if others have a higher step, and is never returned.
        """
        if self.keep_latest_k == 0:
            return []
        # Damaged checkpoints do not count among the k, so that k usable ones stay.
        complete = self.complete_steps()
        latest = [newest, *sorted({*complete} - {newest}, reverse=True)]
        oldest = min(latest[: self.keep_latest_k])
        kept = {step for step in complete if self.keep_every_n_steps and step % self.keep_every_n_steps == 0}
        kept.add(-1 if self.best_step is None else self.best_step)
        return [path for step, path in self.checkpoints().items() if step < oldest and step not in kept]

    def _prepare(self, step: int, needed_bytes: int) -> None:
        """Make the folder of a save, if there is room for it."""
        if self.team.rank > 0:
            return
        make_folder(self.folder)
        # Leftovers first: the new checkpoint may need their room, and the name of the unfinished folder.
        self.clear_leftovers()
        free_bytes = free_bytes_at(self.folder)
        if free_bytes is not None and needed_bytes > free_bytes:
            raise OSError(
                errno.ENOSPC, f"it needs {size_text(needed_bytes)} and {size_text(free_bytes)} are free"
            )
        self.named(step, UNFINISHED).mkdir()

    def _write_part(
        self, step: int, files: Sequence[TensorFile], watch: SaveWatch, advance: Callable[[int], object]
    ) -> list[list[Any]]:
        """Write this machine's tensors. Returns the name, size and checksum of each file."""
        unfinished = self.named(step, UNFINISHED)
        if self.team.rank > 0:
            # A network's file system may remember that the folder was not there; making it asks the server.
            unfinished.mkdir(exist_ok=True)
        written = [
            [file.name, file.size_bytes, write_tensor_file(unfinished / file.name, file, watch, advance)]
            for file in files
        ]
        if self.team.rank > 0:
            sync_entry(unfinished)
        return written

    def _publish(
        self, step: int, records: Sequence[Sequence[Any]], state_json: bytes, watch: SaveWatch
    ) -> None:
        """Write state and manifest on machine 0, and make the folder a checkpoint once `watch` lets it appear."""
        unfinished = self.named(step, UNFINISHED)
        if self.team.rank == 0:
            files = {name: FileRecord(size, checksum) for name, size, checksum in records}
            files[STATE_FILE] = FileRecord(len(state_json), checksum_of(state_json))
            write_synced(unfinished / STATE_FILE, state_json)
            write_synced(unfinished / MANIFEST_FILE, Manifest(step, files).encode())
            sync_entry(unfinished)
            read_manifest(unfinished, step)  # looks for the files of the other machines
        watch.before_publishing()
        if self.team.rank == 0:
            self.publish(step)

    def _all(self, step: int, work: Callable[[], Any], watch: SaveWatch) -> list[Any]:
        """Do a part of a save on all machines, and return what it returned on each. Raises `CheckpointError`."""
        what = f"the checkpoint of step {step}"

        def attempt() -> Any:
            try:
                return work()
            except (OSError, DamagedCheckpointError) as error:
                # The exchange may take as long as the slowest machine's writing, and no update should wait for it.
                watch.finish_reading()
                if isinstance(error, DamagedCheckpointError):
                    raise
                kind = NoSpaceError if error.errno in _NO_SPACE else CheckpointError
                raise kind(error if error.filename else error.strerror or error) from error

        def failed(kind: type[CheckpointError], reason: str) -> CheckpointError:
            return kind(
                f"{what} could not be written to {self.folder}: {reason}; earlier checkpoints are untouched"
            )

        return self.team.together(attempt, f"how each saved {what}", (NoSpaceError, CheckpointError), failed)


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
