"""Reads the folder of one checkpoint, on one machine or by several together. `folders.py` lists the files in it.

Each of several machines reads the files that hold tensors it wants.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint.errors import (
    DamagedCheckpointError,
    FolderError,
    ForeignCheckpointError,
    NoCheckpointError,
)
from torchround.checkpoint.folders import (
    MANIFEST_FILE,
    RUN_SUBFOLDER,
    STATE_FILE,
    StepFolders,
    is_checkpoint_name,
)
from torchround.checkpoint.machine_team import MachineTeam
from torchround.checkpoint.manifest import Manifest, check_file, read_manifest, read_state
from torchround.checkpoint.tensor_file import Layout, checksum_file, layout_of, read_header, read_tensor_file
from torchround.planning.memory import size_text
from torchround.untrusted.terminal import Progress


@dataclass(frozen=True)
class Loaded:
    """The result of a load besides the tensors: the step, and the state as it was given to `save`.

    `filled` are the names of the tensors that were read. Optional ones may be missing in the checkpoint.
    """

    step: int
    state: dict[str, Any]
    path: Path
    filled: frozenset[str] = frozenset()


def open_checkpoint(path: Path) -> Manifest:
    """Read the manifest of the one checkpoint at `path`, and check that its files are there at full size.

    Raises `NoCheckpointError`, `DamagedCheckpointError` or `ForeignCheckpointError`.
    """
    _refuse_other_folders(path)
    return read_manifest(path)


def load_checkpoint(
    path: Path | str,
    tensors: Mapping[str, Tensor],
    optional: Callable[[str], bool] = lambda name: False,
    team: MachineTeam | None = None,
    step: int | None = None,
) -> Loaded:
    """Fill `tensors` in place from the one checkpoint at `path`, except `optional` ones that it does not hold.

    Files, sizes, state, and the name, dtype and shape of every tensor are checked before the first byte is written.
    Bytes are checked as they are read, so that they are read once. Only after an error about a checksum are `tensors`
    partly overwritten. Raises `DamagedCheckpointError`, `ForeignCheckpointError` and, unless the checkpoint has to be of a
    given `step`, `NoCheckpointError`.

    The machines of a `team` call it together, each with the tensors that it wants. All raise if one of them does.
    """
    path, team = Path(path), team or MachineTeam()
    opened: list[tuple[Manifest, dict[str, Any], dict[str, Layout]]] = []
    wanted = layout_of(tensors)

    def look() -> list[str]:
        manifest = open_checkpoint(path) if step is None else read_manifest(path, step)
        opened.append((manifest, read_state(path, manifest), _headers(path, manifest)))
        return list(wanted)

    by_machine = together(team, path, look, "looked into")
    manifest, state, headers = opened[0]
    stored = {name: entry for header in headers.values() for name, entry in header.items()}

    def compare() -> None:
        elsewhere = {name for names in by_machine for name in names}
        if differences := _differences(stored, wanted, elsewhere, optional):
            # An altered byte of a header must not look like another model, so the checksums decide first.
            check_contents(path, manifest, manifest.files)
            raise ForeignCheckpointError(path, differences)

    def read() -> None:
        # One machine reads every file, for its checksum. Of several, each reads those that hold tensors it needs.
        names = [name for name in headers if team.is_alone or not wanted.keys().isdisjoint(headers[name])]
        total_bytes = sum(manifest.files[name].size_bytes for name in names)
        progress = Progress(f"reading {path}", total_bytes, size_text)
        for name in names:
            try:
                checksum = read_tensor_file(path / name, headers[name], tensors)
            except (OSError, ValueError) as error:
                raise DamagedCheckpointError(path, f"{name} cannot be read: {error}") from error
            check_file(path, name, manifest, checksum)
            progress.advance(manifest.files[name].size_bytes)

    together(team, path, compare, "compared its tensors with", state)
    together(team, path, read, "read its tensors of")
    return Loaded(manifest.step, state, path, frozenset(wanted.keys() & stored.keys()))


def _differences(
    stored: Layout, wanted: Layout, elsewhere: Collection[str], optional: Callable[[str], bool]
) -> str:
    """Describe how stored and wanted tensors differ; empty if not. One that is wanted `elsewhere` is no difference."""

    def show(name: str, layout: Layout) -> str:
        dtype, shape = layout[name]
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    differences = [f"{name} is missing" for name in wanted if name not in stored and not optional(name)]
    differences += [
        f"{name} is not part of it" for name in stored if name not in elsewhere and not optional(name)
    ]
    differences += [
        f"{name} is {show(name, stored)} instead of {show(name, wanted)}"
        for name in wanted
        if name in stored and stored[name] != wanted[name]
    ]
    shown = "; ".join(differences[:5]) + ("; .." if len(differences) > 5 else "")
    return f"{len(differences)} tensors are not this model's: {shown}" if differences else ""


def verify_checkpoint(path: Path | str, advance: Callable[[int], object] = lambda nbytes: None) -> int:
    """Check every byte of the checkpoint at `path` against its checksums. Returns its step.

    Raises `NoCheckpointError`, `DamagedCheckpointError` or `ForeignCheckpointError`. Reads the whole folder once and
    needs no model and no memory for one. `advance` receives the number of bytes of each step.
    """
    path = Path(path)
    manifest = open_checkpoint(path)
    check_contents(path, manifest, manifest.files, advance)
    return manifest.step


def check_contents(
    path: Path,
    manifest: Manifest,
    names: Iterable[str],
    advance: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Read the files `names` and compare their checksums. No tensor is filled. `advance` receives the bytes of each step."""
    for name in names:
        try:
            found = checksum_file(path / name, advance)
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(path, f"{name} cannot be read: {error}") from error
        check_file(path, name, manifest, found)


def together(
    team: MachineTeam,
    path: Path,
    work: Callable[[], Any],
    what: str,
    state: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Collect what `work` returned on each machine; all raise the first error. `state`: for an error about another model."""

    def failed(kind: type[FolderError], reason: str) -> FolderError:
        if kind is ForeignCheckpointError:
            return ForeignCheckpointError(path, reason, state)
        return kind(path, reason)

    mistakes = (ForeignCheckpointError, NoCheckpointError, DamagedCheckpointError)
    return team.together(work, f"how each {what} {path}", mistakes, failed)


def _refuse_other_folders(path: Path) -> None:
    """Raise `NoCheckpointError` if `path` has no manifest and is not named as a checkpoint is.

    That is the case for a missing path, a run's folder and its folder of checkpoints. A folder that is named as a
    checkpoint and has no manifest is a damaged checkpoint.
    """
    if (path / MANIFEST_FILE).exists() or (is_checkpoint_name(path.name) and path.is_dir()):
        return
    near = (path, path / RUN_SUBFOLDER) if path.exists() else (path.parent,)
    found = [complete for folder in near for complete in complete_in(StepFolders(folder)).values()]
    example = f"such as {found[-1]}" if found else "a folder in the checkpoints of a run"
    raise NoCheckpointError(path, f"legal: one checkpoint, {example}")


def complete_in(folders: StepFolders) -> dict[int, Path]:
    """Find the folders by step of the checkpoints whose files are there at full size, steps rising."""
    found = {}
    for step, path in folders.checkpoints().items():
        try:
            read_manifest(path, step)
        except DamagedCheckpointError:
            continue
        except ForeignCheckpointError:
            pass  # intact, as far as this version can tell
        found[step] = path
    return found


def _headers(path: Path, manifest: Manifest) -> dict[str, Layout]:
    """Read the headers of the tensor files. Raises `DamagedCheckpointError`."""
    headers: dict[str, Layout] = {}
    seen: set[str] = set()
    for name in manifest.files:
        if name == STATE_FILE:
            continue
        try:
            headers[name] = read_header(path / name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(path, f"the header of {name} is damaged: {error}") from error
        for repeated in seen & headers[name].keys():
            raise DamagedCheckpointError(path, f"{repeated} is in {name} and in a file before it")
        seen |= headers[name].keys()
    return headers
