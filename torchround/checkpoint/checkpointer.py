"""The checkpoints of one run: saved, loaded, and the older ones deleted."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint.conversion import Converter, NoConverter, layout_of
from torchround.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
)
from torchround.checkpoint.joint_load import JointCheckpoint, open_jointly
from torchround.checkpoint.joint_save import JointSave
from torchround.checkpoint.machine_team import MachineTeam
from torchround.checkpoint.manifest import (
    FILES_PER_MACHINE,
    MANIFEST_FILE,
    Manifest,
    checksum_of,
    encode_state,
    read_manifest,
    read_state,
)
from torchround.checkpoint.step_folder import check_contents, check_structure, read_into
from torchround.checkpoint.step_folders import FOLDER_NAME, StepFolders
from torchround.checkpoint.tensor_file import SaveWatch, Unwatched, plan_files

logger = logging.getLogger(__name__)


def _nothing_is_optional(name: str) -> bool:
    return False


@dataclass(frozen=True)
class Loaded:
    """The result of a load besides the tensors: the step, and the state as it was given to `save`.

    `filled` are the names of the tensors that were read. Optional ones may be missing in the checkpoint. `converted`
    are the names of the tensors that it holds in another form; other machines may have read them.
    """

    step: int
    state: dict[str, Any]
    path: Path
    filled: frozenset[str]
    converted: frozenset[str] = frozenset()


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
        files = plan_files(tensors, first_number=self.team.rank * FILES_PER_MACHINE)
        state_json = encode_state(state)
        JointSave(self, self.team, step, files, state_json, watch or Unwatched(), advance).run()
        # Old checkpoints go only now that the new one is complete. So a save needs room for one more than is kept.
        if self.team.keeps_folder:
            self.delete(self.superfluous(newest=step))
        return self.named(step)

    def load_latest(
        self,
        tensors: Mapping[str, Tensor],
        optional: Callable[[str], bool] = _nothing_is_optional,
        converter: Converter | None = None,
    ) -> Loaded | None:
        """Fill `tensors` in place from the newest usable checkpoint. Returns None if there are no checkpoints.

        Tensors of an `optional` name may be missing in the checkpoint, or in `tensors`. The checkpoint may hold tensors
        in another form that the `converter` knows. A warning names a damaged
        checkpoint, and the one before it is tried, which overwrites every tensor. Raises `ForeignCheckpointError` if
        the newest intact one is of another model or version, and `CheckpointError` if there are checkpoints but none
        can be used. The tensors may then hold parts of several checkpoints and must not be trained on.
        """
        failures: list[str] = []
        for step in reversed(self.joint_steps()):
            try:
                return self._load(step, tensors, optional, converter or NoConverter())
            except DamagedCheckpointError as error:
                failures.append(str(error))
                if self.team.rank == 0:
                    logger.warning("%s; trying the checkpoint before step %d", error, step)
        if failures:
            raise CheckpointError(f"none of the checkpoints in {self.folder} can be used:", *failures)
        return None

    def joint_steps(self) -> list[int]:
        """Return the steps of all checkpoints that a machine of the team has, complete or damaged, rising."""
        every = self.team.gather(list(self.checkpoints()), f"the steps of the checkpoints in {self.folder}")
        # One machine's view of a shared folder: a network's file system may show the others an older one.
        return every[0] if self.team.shares_folder else sorted({step for steps in every for step in steps})

    @property
    def is_part(self) -> bool:
        """Whether the folder may hold a part of each checkpoint, with the other parts on other machines."""
        return not self.team.shares_folder

    def read_state(self, step: int) -> dict[str, Any]:
        """Return the state in this machine's folder of a step. Raises `CheckpointError`."""
        path = self.checkpoints()[step]
        return read_state(path, read_manifest(path, step, self.is_part))

    def verify(self, step: int, advance: Callable[[int], object]) -> dict[str, Any]:
        """Check every byte of a step's checkpoint, on all machines together. Returns its state.

        Raises as `verify_checkpoint`, the same on all.
        """
        if self.team.is_alone:
            verify_checkpoint(self.checkpoints()[step], advance)
            return self.read_state(step)
        opened = self.open_step(step)
        opened.verify(advance)
        return opened.state()

    def open_step(self, step: int) -> JointCheckpoint:
        """Open a step's checkpoint on all machines together. Raises `DamagedCheckpointError`, the same on all."""
        folders = self.variants(step) if self.team.keeps_folder else [self.named(step)]
        opened = open_jointly(self.team, folders, step)
        if opened is None:
            raise DamagedCheckpointError(self.named(step), "it is on no machine any more")
        return opened

    def latest_step(self) -> int | None:
        """Return the newest complete checkpoint's step, or None."""
        return max(self.complete_steps(), default=None)

    def complete_steps(self) -> list[int]:
        """Return the steps of the checkpoints whose files are all there at full size, rising. Contents are not read.

        If each machine has a folder of its own, the files that are here count.
        """
        return [step for step, path in self.checkpoints().items() if _is_complete(path, step, self.is_part)]

    def whole_steps(self) -> list[int]:
        """Return the steps of which the machines together have every file at full size, rising. All machines call it."""
        if self.team.shares_folder:
            return [*self.team.gather(self.complete_steps(), f"the complete steps in {self.folder}")[0]]
        parts: list[tuple[int, str, list[str]]] = []
        for step, path in self.checkpoints().items():
            try:
                manifest = read_manifest(path, step, is_part=True)
            except DamagedCheckpointError:
                continue
            except ForeignCheckpointError:
                parts.append((step, "", []))  # whole, as far as this version can tell
            else:
                missing = [name for name in manifest.files if not (path / name).exists()]
                parts.append((step, checksum_of(manifest.encode()), missing))
        missing_on_all: dict[tuple[int, str], set[str]] = {}
        for machine in self.team.gather(parts, f"the files of each step in {self.folder}"):
            for step, checksum, missing in machine:
                missing_on_all.setdefault((step, checksum), {*missing}).intersection_update(missing)
        return sorted({step for (step, _), missing in missing_on_all.items() if not missing})

    def _load(
        self, step: int, tensors: Mapping[str, Tensor], optional: Callable[[str], bool], converter: Converter
    ) -> Loaded:
        if self.team.is_alone:
            path = self.checkpoints()[step]
            return _load(path, read_manifest(path, step), tensors, optional, converter)
        opened = self.open_step(step)
        state, plan = opened.load(tensors, optional, converter)
        if opened.here is not None and self.team.keeps_folder:
            self.settle(step, opened.here)
        filled = plan.filled(layout_of(tensors))
        return Loaded(step, state, self.named(step), filled, plan.converted)

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


def open_checkpoint(path: Path, is_part: bool = False) -> Manifest:
    """Read the manifest of the one checkpoint at `path`, and check that its files are there at full size.

    With `is_part` some of them may be on other machines. Raises `NoCheckpointError`, `DamagedCheckpointError` or
    `ForeignCheckpointError`.
    """
    _refuse_other_folders(path, is_part)
    return read_manifest(path, is_part=is_part)


def load_checkpoint(
    path: Path | str,
    tensors: Mapping[str, Tensor],
    optional: Callable[[str], bool] = _nothing_is_optional,
    team: MachineTeam | None = None,
    converter: Converter | None = None,
) -> Loaded:
    """Fill `tensors` in place from the one checkpoint at `path`, except `optional` ones that it does not hold.

    Files, sizes, state, and the name, dtype and shape of every tensor are checked before the first byte is written.
    Tensors may be stored in another form that the `converter` knows.
    The tensors' bytes are checked as they are read, so that they are read once. Only after an error about a checksum
    are `tensors` partly overwritten. Raises `NoCheckpointError`, `DamagedCheckpointError` or `ForeignCheckpointError`.

    The machines of a `team` call it together, each with the tensors that it wants.
    """
    path = Path(path)
    if team is None or team.is_alone:
        return _load(path, open_checkpoint(path), tensors, optional, converter or NoConverter())
    opened = open_together(path, team)
    state, plan = opened.load(tensors, optional, converter or NoConverter())
    return Loaded(opened.manifest.step, state, path, plan.filled(layout_of(tensors)), plan.converted)


def open_together(path: Path, team: MachineTeam) -> JointCheckpoint:
    """Open the one checkpoint at `path` on all machines together. Raises as `open_checkpoint`, the same on all."""
    newest, folders = None, [path]
    try:
        _refuse_other_folders(path, is_part=not team.shares_folder)
    except NoCheckpointError as error:
        newest = error.newest
        if team.keeps_folder:
            folders = []
    proposals = team.gather(None if newest is None else str(newest), f"whether {path} is on each machine")
    opened = open_jointly(team, folders)
    if opened is None:
        found = next(filter(None, proposals), None)
        raise NoCheckpointError(path, None if found is None else Path(found))
    return opened


def verify_checkpoint(path: Path | str, advance: Callable[[int], object] = lambda nbytes: None) -> int:
    """Check every byte of the checkpoint at `path` against its checksums. Returns its step.

    Raises `NoCheckpointError`, `DamagedCheckpointError` or `ForeignCheckpointError`. Reads the whole folder once and
    needs no model and no memory for one. `advance` receives the number of bytes of each step.
    """
    path = Path(path)
    manifest = open_checkpoint(path)
    check_contents(path, manifest, manifest.files, advance)
    return manifest.step


def _refuse_other_folders(path: Path, is_part: bool = False) -> None:
    """Raise `NoCheckpointError` if `path` has no manifest and is not named as a checkpoint is.

    That is the case for a missing path, a run's folder and its folder of checkpoints. A folder that is named as a
    checkpoint and has no manifest is a damaged checkpoint.
    """
    try:
        (path / MANIFEST_FILE).lstat()
    except (FileNotFoundError, NotADirectoryError):
        if not (FOLDER_NAME.fullmatch(path.name) and path.is_dir()):
            near = (path, path / "checkpoints") if path.exists() else (path.parent,)
            nearby = [Checkpointer(folder, team=MachineTeam(shares_folder=not is_part)) for folder in near]
            newest = [found.checkpoints()[step] for found in nearby for step in found.complete_steps()]
            raise NoCheckpointError(path, newest[-1] if newest else None) from None
    except OSError:
        pass  # reading the manifest reports the reason


def _load(
    path: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    optional: Callable[[str], bool],
    converter: Converter,
) -> Loaded:
    state, plan = check_structure(path, manifest, tensors, optional, converter)
    read_into(path, manifest, plan.destinations(tensors))
    return Loaded(manifest.step, state, path, plan.filled(layout_of(tensors)), plan.converted)


def _is_complete(path: Path, step: int, is_part: bool) -> bool:
    try:
        read_manifest(path, step, is_part)
    except DamagedCheckpointError:
        return False
    except ForeignCheckpointError:
        return True  # intact, as far as this version can tell
    return True
