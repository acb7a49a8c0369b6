"""The checkpoints of one run: saved, loaded, and the older ones deleted.

A save of several machines takes three steps: machine 0 makes the folder; each writes its tensors, in files numbered after its
rank; machine 0 writes state and manifest and renames the folder, which makes it a checkpoint. The machines exchange how
each step went before any begins the next. A machine that fails makes the save fail on all of them, and one that dies leaves
the others in an exchange that raises. The former checkpoint is untouched until the last exchange.

If each machine has a folder of its own, each makes its folder, writes the same state and manifest beside its own files, and
renames it. The parts appear one after the other, so until all have, each keeps what its own one replaces.
"""

import errno
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint.conversion import Converter
from torchround.checkpoint.errors import CheckpointError, DamagedCheckpointError, NoSpaceError
from torchround.checkpoint.folders import StepFolders
from torchround.checkpoint.fsync import free_bytes_at, make_folder, sync_entry, write_synced
from torchround.checkpoint.loading import (
    Loaded,
    check_contents,
    complete_in,
    load_checkpoint,
    together,
)
from torchround.checkpoint.machine_team import MachineTeam
from torchround.checkpoint.manifest import (
    FILES_PER_MACHINE,
    MANIFEST_FILE,
    STATE_FILE,
    FileRecord,
    Manifest,
    checksum_of,
    encode_state,
    read_manifest,
    read_state,
)
from torchround.checkpoint.tensor_file import SaveWatch, Unwatched, plan_files, write_tensor_file
from torchround.planning.memory import size_text

logger = logging.getLogger(__name__)

# Errors of a write that succeeds once there is room: the disk is full, or the user's quota is.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


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
        if keep_latest_k < 0 or keep_every_n_steps < 0:
            raise ValueError(
                f"keep_latest_k and keep_every_n_steps are at least 0, got {keep_latest_k} and {keep_every_n_steps}"
            )
        super().__init__(folder)
        self.keep_latest_k = keep_latest_k
        self.keep_every_n_steps = keep_every_n_steps
        self.team = team or MachineTeam()

    @property
    def is_part(self) -> bool:
        """Whether the folder holds a part of each checkpoint, with the other parts on other machines."""
        return self.team.is_part

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        watch: SaveWatch | None = None,
        advance: Callable[[int], object] = lambda nbytes: None,
    ) -> Path:
        """Write `tensors` and the JSON-able `state` as `step-N`, then delete checkpoints that are not kept.

        Tensors are contiguous CPU tensors of any dtype. Their bytes go straight from their memory to the file, so
        nothing may write to a tensor before `watch.finished_reading` is called for it. Raises `ValueError` before
        anything is written if a tensor or the state cannot be stored, and `CheckpointError` if the disk fails, or
        `NoSpaceError` if it is full; earlier checkpoints are then untouched. `advance` receives the number of bytes of
        each write. An exception raised by `watch` leaves the unfinished folder to the next save.

        Each machine of a team gives the tensors that it saves, all with names of their own, and machine 0's state is
        saved. A failure on one machine raises the same error on all.
        """
        team, watch, unfinished = self.team, watch or Unwatched(), self.named(step, ".tmp")
        files = plan_files(tensors, first_number=team.rank * FILES_PER_MACHINE)
        state_json = encode_state(state)
        own_bytes = sum(file.size_bytes for file in files) + len(state_json)
        every = team.gather([step, own_bytes], f"the size of each part of the checkpoint of step {step}")
        assert {other for other, _ in every} == {step}, f"the machines save other steps: {every}"

        def write_part() -> list[Any]:
            if not team.keeps_folder:
                # A network's file system may remember that the folder was not there; making it asks the server.
                unfinished.mkdir(exist_ok=True)
            written = []
            for file in files:
                checksum = write_tensor_file(unfinished / file.name, file, watch, advance)
                written.append([file.name, file.size_bytes, checksum])
            if not team.keeps_folder:
                sync_entry(unfinished)
            return [written, state_json.decode() if team.rank == 0 and team.is_part else None]

        def publish() -> None:
            if team.keeps_folder:
                state = state_json if parts[0][1] is None else parts[0][1].encode()
                records = {
                    name: FileRecord(size, checksum) for part in parts for name, size, checksum in part[0]
                }
                records[STATE_FILE] = FileRecord(len(state), checksum_of(state))
                write_synced(unfinished / STATE_FILE, state)
                write_synced(unfinished / MANIFEST_FILE, Manifest(step, records).encode())
                sync_entry(unfinished)
                # The files of the other machines: their folder may not be the same one after all.
                read_manifest(unfinished, step, team.is_part)
            watch.before_publishing()
            if team.keeps_folder:
                self.publish(step)
                is_published.append(True)

        is_published: list[bool] = []
        try:
            needed_bytes = own_bytes if team.is_part else sum(part_bytes for _, part_bytes in every)
            self._all(step, lambda: self._prepare(unfinished, needed_bytes), watch)
            parts = self._all(step, write_part, watch)
            self._all(step, publish, watch)
        except CheckpointError:
            # All machines have stopped writing by now.
            if team.keeps_folder:
                shutil.rmtree(unfinished, ignore_errors=True)
            if is_published:
                self.take_back(step)
            raise
        # Old checkpoints go only now that the new one is complete. So a save needs room for one more than is kept.
        if team.keeps_folder:
            self.delete_replaced(step)
            self.delete(self.superfluous(newest=step))
        return self.named(step)

    def load_latest(
        self,
        tensors: Mapping[str, Tensor],
        optional: Callable[[str], bool] = lambda name: False,
        converter: Converter | None = None,
    ) -> Loaded | None:
        """Fill `tensors` in place from the newest usable checkpoint. Returns None if there are no checkpoints.

        `optional` and `converter` are as for `load_checkpoint`. A warning names a damaged checkpoint, and the one before it
        is tried, which overwrites every tensor. Raises `ForeignCheckpointError` if the newest intact one is of another
        model or version, and `CheckpointError` if there are checkpoints but none can be used. The tensors may then hold
        parts of several checkpoints and must not be trained on.
        """
        every = self.team.gather(list(self.checkpoints()), f"the steps of the checkpoints in {self.folder}")
        # One machine's view of a shared folder: a network's file system may show the others an older one.
        steps = {step for found in every[: 1 if self.team.shares_folder else None] for step in found}
        failures: list[str] = []
        for step in sorted(steps, reverse=True):
            path = self._common(step)
            try:
                loaded = load_checkpoint(path, tensors, optional, self.team, converter, step)
            except DamagedCheckpointError as error:
                failures.append(str(error))
                if self.team.rank == 0:
                    logger.warning("%s; trying the checkpoint before step %d", error, step)
                continue
            if self.team.keeps_folder and path == self.named(step, ".replaced") and self.named(step).exists():
                self.take_back(step)  # the one that was to replace it is not on all machines
            return loaded
        if failures:
            raise CheckpointError(f"none of the checkpoints in {self.folder} can be used:", *failures)
        return None

    def read_state(self, step: int) -> dict[str, Any]:
        """Return the state in this machine's folder of a step. Raises `CheckpointError`."""
        path = self.checkpoints()[step]
        return read_state(path, read_manifest(path, step, self.is_part))

    def verify(self, step: int, advance: Callable[[int], object]) -> dict[str, Any]:
        """Check every byte of a step's checkpoint, each on the machine that has it. Returns its state.

        Raises `DamagedCheckpointError` or `ForeignCheckpointError`, the same on all.
        """
        path = self.checkpoints().get(step, self.named(step))
        state: dict[str, Any] = {}

        def check() -> None:
            manifest = read_manifest(path, step, self.is_part)
            state.update(read_state(path, manifest))
            if self.team.keeps_folder:
                here = [name for name in manifest.files if (path / name).exists()]
                check_contents(path, manifest, here, advance)

        together(self.team, path, check, "checked")
        return state

    def latest_step(self) -> int | None:
        """Return the newest complete checkpoint's step, or None."""
        return max(self.complete_steps(), default=None)

    def complete_steps(self) -> list[int]:
        """Return the steps of the checkpoints whose files are all there at full size, rising. Contents are not read.

        If each machine has a folder of its own, this machine's files count.
        """
        return [step for step, _, _ in self._complete()]

    def whole_steps(self) -> list[int]:
        """Return the steps that are complete on all machines, rising. All machines call it."""
        own = [[step, checksum] for step, _, checksum in self._complete()]
        first, *others = self.team.gather(own, f"the complete steps in {self.folder}")
        if self.team.shares_folder:
            others = []
        return [step for step, checksum in first if all([step, checksum] in found for found in others)]

    def _complete(self) -> list[tuple[int, Path, str]]:
        return complete_in(self, self.is_part, self.team.rank if self.is_part else None)

    def superfluous(self, newest: int | None = None) -> list[Path]:
        """Return the checkpoints older than the k-th newest complete one and not kept for their step or their loss.

        `newest` counts as the newest even if others have a higher step, and is never returned.
        """
        if self.keep_latest_k == 0:
            return []
        # Damaged checkpoints do not count among the k, so that k usable ones stay.
        complete = self.whole_steps() if self.is_part else self.complete_steps()
        latest = sorted({*complete} - {newest}, reverse=True)
        if newest is not None:
            latest.insert(0, newest)
        oldest = min(latest[: self.keep_latest_k], default=0)
        kept = {step for step in complete if self.keep_every_n_steps and step % self.keep_every_n_steps == 0}
        kept.add(-1 if self.best_step is None else self.best_step)
        return [path for step, path in self.checkpoints().items() if step < oldest and step not in kept]

    def _prepare(self, unfinished: Path, needed_bytes: int) -> None:
        """Make the folder of a save, if there is room for it."""
        if not self.team.keeps_folder:
            return
        make_folder(self.folder)
        # Leftovers first: the new checkpoint may need their room, and the name of the unfinished folder.
        self.clear_leftovers()
        free_bytes = free_bytes_at(self.folder)
        if free_bytes is not None and needed_bytes > free_bytes:
            raise OSError(
                errno.ENOSPC, f"it needs {size_text(needed_bytes)} and {size_text(free_bytes)} are free"
            )
        unfinished.mkdir()

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

    def _common(self, step: int) -> Path:
        """Return this machine's folder of a step: of two, after a death in a save of that step again, the one all have."""
        newest = self.checkpoints().get(step, self.named(step))
        if self.team.is_alone:
            return newest
        own: dict[str, Path] = {}
        for path in self.variants(step):
            with suppress(CheckpointError):  # loading names what is wrong
                own[read_manifest(path, step, self.is_part).checksum] = path
        every = self.team.gather(list(own), f"the checkpoints of step {step} in {self.folder}")
        common = next((checksum for checksum in every[0] if all(checksum in found for found in every)), "")
        return own.get(common, newest)
