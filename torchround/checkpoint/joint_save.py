"""One save of a checkpoint, by one machine or by several together.

    each machine        its tensors, in files numbered after its rank, synced to the disk
    machine 0           state.json and the manifest, synced; then the rename that makes it a checkpoint
    each with a folder  deletes what the new checkpoint replaces

The machines exchange how each of these went before any begins the next. A machine that fails makes the save fail on all
of them, and a machine that dies leaves the others in an exchange that raises. The former checkpoint is untouched until
the last exchange.

If each machine has a folder of its own, every machine writes the same state and manifest beside its own files. The
folders' files put together are then one whole checkpoint. They appear one after the other, so until all have, each
keeps what its own one replaces.
"""

import errno
import shutil
from collections.abc import Callable
from typing import Any

from torchround.checkpoint.errors import CheckpointError, DamagedCheckpointError, NoSpaceError
from torchround.checkpoint.fsync import free_bytes_at, make_folder, sync_entry
from torchround.checkpoint.machine_team import MachineTeam, Outcome
from torchround.checkpoint.manifest import FileRecord, read_manifest
from torchround.checkpoint.step_folder import write_manifest, write_tensors
from torchround.checkpoint.step_folders import StepFolders
from torchround.checkpoint.tensor_file import SaveWatch, TensorFile
from torchround.planning.memory import size_text

# Errors of a write that succeeds once there is room: the disk is full, or the user's quota is.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class JointSave:
    """The save of step `step` in `folders`, as one machine of `team` takes part in it.

    `files` hold the tensors that this machine saves. `state_json` is machine 0's; what the others give is not used.
    """

    def __init__(
        self,
        folders: StepFolders,
        team: MachineTeam,
        step: int,
        files: list[TensorFile],
        state_json: bytes,
        watch: SaveWatch,
        advance: Callable[[int], object],
    ) -> None:
        self._folders = folders
        self._team = team
        self._step = step
        self._files = files
        self._state_json = state_json
        self._watch = watch
        self._advance = advance
        self._unfinished = folders.named(step, ".tmp")
        self._is_published = False

    def run(self) -> None:
        """Save, and return once the checkpoint is complete. Raises `CheckpointError`, the same on every machine."""
        total_bytes = self._agree_on_size()
        self._together(lambda: self._prepare(total_bytes), "made the folder of")
        parts = self._together(self._write_part, "wrote its part of")
        self._together(lambda: self._publish(parts), "finished")
        if self._team.keeps_folder:
            self._folders.delete_replaced(self._step)

    def _agree_on_size(self) -> int:
        """Return the bytes that the save writes to this machine's folder."""
        own_bytes = sum(file.size_bytes for file in self._files) + len(self._state_json)
        every = self._team.gather([self._step, own_bytes], f"{self._name}: the size of each part")
        assert {step for step, _ in every} == {self._step}, f"the machines save other steps: {every}"
        return sum(part_bytes for _, part_bytes in every) if self._team.shares_folder else own_bytes

    def _prepare(self, total_bytes: int) -> None:
        if not self._team.keeps_folder:
            return
        make_folder(self._folders.folder)
        # Leftovers first: the new checkpoint may need their room, and the name of the unfinished folder.
        self._folders.clear_leftovers()
        free_bytes = free_bytes_at(self._folders.folder)
        if free_bytes is not None and total_bytes > free_bytes:
            raise OSError(
                errno.ENOSPC, f"it needs {size_text(total_bytes)} and {size_text(free_bytes)} are free"
            )
        self._unfinished.mkdir()

    def _write_part(self) -> Outcome:
        """Write this machine's tensors. Returns the records of its files."""
        if not self._team.keeps_folder:
            # A network's file system may remember that the folder was not there; making it asks the server.
            self._unfinished.mkdir(exist_ok=True)
        files = write_tensors(self._unfinished, self._files, self._watch, self._advance)
        if not self._team.keeps_folder:
            sync_entry(self._unfinished)
        needs_state = self._team.rank == 0 and not self._team.shares_folder
        records = {name: [record.size_bytes, record.checksum] for name, record in files.items()}
        return {"files": records, "state": self._state_json.decode() if needs_state else None}

    def _publish(self, parts: list[Outcome]) -> None:
        """Complete the folder and make it a checkpoint, once everything before it is on record."""
        if self._team.keeps_folder:
            state_json = self._state_json if self._team.shares_folder else parts[0]["state"].encode()
            records = (item for part in parts for item in part["files"].items())
            files = {name: FileRecord(*record) for name, record in records}
            write_manifest(self._unfinished, self._step, files, state_json)
            if self._team.shares_folder and not self._team.is_alone:
                # The files of the other machines: their folder may not be the same one after all.
                read_manifest(self._unfinished, self._step)
        self._watch.before_publishing()
        if self._team.keeps_folder:
            self._folders.publish(self._step)
            self._is_published = True

    def _together(self, work: Callable[[], Any], what: str) -> list[Any]:
        """Do `work`, and return what it returned on each machine. Raises the first machine's error on all."""
        value, failure, cause = None, None, None
        try:
            value = work()
        except (OSError, DamagedCheckpointError) as error:
            cause = error
            failure = _failure_of(error)
            # The exchange may take as long as the slowest machine's writing, and no update should wait for it.
            self._watch.finish_reading()
        outcomes = self._team.gather({"value": value, "failure": failure}, f"{self._name}: each {what} it")
        failed = [(rank, *outcome["failure"]) for rank, outcome in enumerate(outcomes) if outcome["failure"]]
        if not failed:
            return [outcome["value"] for outcome in outcomes]
        # All have stopped writing by now.
        if self._team.keeps_folder:
            shutil.rmtree(self._unfinished, ignore_errors=True)
        if self._is_published:
            self._folders.take_back(self._step)
        # Room is waited for only if nothing else is wrong.
        kind = NoSpaceError if all(is_full for _, _, is_full in failed) else CheckpointError
        reason = "; ".join(self._team.says(rank, text) for rank, text, _ in failed[:3])
        raise kind(
            f"{self._name} could not be written to {self._folders.folder}: {reason}; "
            "earlier checkpoints are untouched"
        ) from cause

    @property
    def _name(self) -> str:
        return f"the checkpoint of step {self._step}"


def _failure_of(error: OSError | DamagedCheckpointError) -> list[Any]:
    """Return the reason of a failed save, and whether it is a lack of room."""
    if isinstance(error, DamagedCheckpointError):
        return [str(error), False]
    reason = error if error.filename else error.strerror or error
    return [str(reason), error.errno in _NO_SPACE]
