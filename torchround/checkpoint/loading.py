"""Reads the folder of one checkpoint, on one machine or by several together.

step-N/tensors-00000.safetensors ..   the tensors, in the order given to `save`; machine 1's from 100000 on
step-N/state.json                     everything that is not a tensor
step-N/manifest.json                  sizes and checksums of the files above, written last

Machines that share a folder read the files that hold tensors they want. On disks of their own each needs the files that
it saved; the folders' files put together are a checkpoint that any number of machines reads.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchround.checkpoint.conversion import Converter, Layout, ReadingPlan, layout_of
from torchround.checkpoint.errors import (
    DamagedCheckpointError,
    FolderError,
    ForeignCheckpointError,
    NoCheckpointError,
)
from torchround.checkpoint.folders import StepFolders, is_checkpoint_name
from torchround.checkpoint.machine_team import MachineTeam
from torchround.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    Manifest,
    check_file,
    missing_part,
    read_manifest,
    read_state,
)
from torchround.checkpoint.tensor_file import checksum_file, read_header, read_tensor_file
from torchround.planning.memory import size_text
from torchround.untrusted.terminal import Progress


@dataclass(frozen=True)
class Loaded:
    """The result of a load besides the tensors: the step, and the state as it was given to `save`.

    `filled` are the names of the tensors that were read. Optional ones may be missing in the checkpoint. `converted`
    are the names of the tensors that it holds in another form, those of all machines together.
    """

    step: int
    state: dict[str, Any]
    path: Path
    filled: frozenset[str]
    converted: frozenset[str] = frozenset()


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
    optional: Callable[[str], bool] = lambda name: False,
    team: MachineTeam | None = None,
    converter: Converter | None = None,
    step: int | None = None,
) -> Loaded:
    """Fill `tensors` in place from the one checkpoint at `path`, except `optional` ones that it does not hold.

    Files, sizes, state, and the name, dtype and shape of every tensor are checked before the first byte is written.
    Tensors may be stored in another form that the `converter` knows. Bytes are checked as they are read, so that they are
    read once. Only after an error about a checksum are `tensors` partly overwritten. Raises `DamagedCheckpointError`,
    `ForeignCheckpointError` and, unless the checkpoint has to be of a given `step`, `NoCheckpointError`.

    The machines of a `team` call it together, each with the tensors that it wants. All raise if one of them does. A
    tensor that is not in this machine's files, but is read by another machine, stays as it is.
    """
    path, team = Path(path), team or MachineTeam()
    opened: list[tuple[Manifest, dict[str, Any], ReadingPlan, dict[str, Layout]]] = []

    def look() -> list[Any]:
        if step is None:
            _refuse_other_folders(path, team.is_part)
        manifest = read_manifest(path, step, team.is_part)
        state = read_state(path, manifest)
        headers = _headers(path, manifest)
        stored = {key: entry for header in headers.values() for key, entry in header.items()}
        wanted = layout_of(tensors)
        plan = ReadingPlan(stored, wanted, tuple(converter.conversions(stored, wanted)) if converter else ())
        opened.append((manifest, state, plan, headers))
        return [manifest.checksum, sorted(plan.needed), sorted(plan.converted)]

    found = together(team, path, look, "looked into")
    manifest, state, plan, headers = opened[0]
    if len({checksum for checksum, _, _ in found}) > 1:
        raise DamagedCheckpointError(path, "the machines have parts of several checkpoints of this step")
    claimed = {name for _, needed, _ in found for name in needed}

    def compare() -> None:
        if missing := missing_part(path, manifest, team.rank):
            raise DamagedCheckpointError(path, missing)
        if differences := plan.differences(optional, claimed):
            if missing := missing_part(path, manifest):
                raise DamagedCheckpointError(path, f"{missing}; {differences}")
            # An altered byte of a header must not look like another model, so the checksums decide first.
            check_contents(path, manifest, manifest.files)
            raise ForeignCheckpointError(path, differences)

    def read() -> None:
        # One machine reads every file, for its checksum. Of several, each reads those that hold tensors it needs.
        names = [name for name in headers if team.is_alone or not plan.needed.isdisjoint(headers[name])]
        total_bytes = sum(manifest.files[name].size_bytes for name in names)
        progress = Progress(f"reading {path}", total_bytes, size_text)
        in_place = {name: tensors[name] for name in plan.filled - plan.converted}
        pending, waiting = list(plan.conversions), dict[str, Tensor]()
        sources = {name for conversion in pending for name in conversion.stored}
        for name in names:
            for key in headers[name].keys() & sources:
                dtype, shape = headers[name][key]
                waiting[key] = torch.empty(shape, dtype=dtype)
            try:
                checksum = read_tensor_file(path / name, headers[name], in_place | waiting)
            except (OSError, ValueError) as error:
                raise DamagedCheckpointError(path, f"{name} cannot be read: {error}") from error
            check_file(path, name, manifest, checksum)
            for conversion in [found for found in pending if found.stored.keys() <= waiting.keys()]:
                pending.remove(conversion)
                stored = {key: waiting.pop(key) for key in conversion.stored}
                conversion.convert(stored, {key: tensors[key] for key in conversion.wanted})
            progress.advance(manifest.files[name].size_bytes)

    together(team, path, compare, "compared its tensors with", state)
    together(team, path, read, "read its tensors of")
    converted = frozenset(name for _, _, names in found for name in names)
    return Loaded(manifest.step, state, path, plan.filled, converted)


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
    """Do `work` on all machines, and return what it returned on each. All raise the first machine's error.

    It names this machine's `path`. `state` goes with an error about another model.
    """

    def failed(kind: type[FolderError], reason: str) -> FolderError:
        return (
            ForeignCheckpointError(path, reason, state)
            if kind is ForeignCheckpointError
            else kind(path, reason)
        )

    mistakes = (ForeignCheckpointError, NoCheckpointError, DamagedCheckpointError)
    return team.together(work, f"how each {what} {path}", mistakes, failed)


def _refuse_other_folders(path: Path, is_part: bool) -> None:
    """Raise `NoCheckpointError` if `path` has no manifest and is not named as a checkpoint is.

    That is the case for a missing path, a run's folder and its folder of checkpoints. A folder that is named as a
    checkpoint and has no manifest is a damaged checkpoint.
    """
    try:
        (path / MANIFEST_FILE).lstat()
    except (FileNotFoundError, NotADirectoryError):
        if not (is_checkpoint_name(path.name) and path.is_dir()):
            near = (path, path / "checkpoints") if path.exists() else (path.parent,)
            found = [complete for folder in near for complete in complete_in(StepFolders(folder), is_part)]
            example = f"such as {found[-1][1]}" if found else "a folder step-N of a run"
            reason = "" if found else f"; there is no {MANIFEST_FILE} in it"
            raise NoCheckpointError(path, f"legal: one checkpoint, {example}{reason}") from None
    except OSError:
        pass  # reading the manifest reports the reason


def complete_in(
    folders: StepFolders, is_part: bool, machine: int | None = None
) -> list[tuple[int, Path, str]]:
    """Return step, folder and the manifest's checksum of the checkpoints whose files are there at full size, steps rising.

    With `is_part` some files may be on other machines, but not those of the given `machine`. Contents are not read.
    """
    found = []
    for step, path in folders.checkpoints().items():
        try:
            manifest = read_manifest(path, step, is_part)
        except DamagedCheckpointError:
            continue
        except ForeignCheckpointError:
            found.append((step, path, ""))  # intact, as far as this version can tell
            continue
        if machine is None or not missing_part(path, manifest, machine):
            found.append((step, path, manifest.checksum))
    return found


def _headers(path: Path, manifest: Manifest) -> dict[str, Layout]:
    """Read the headers of the tensor files that are in the folder. Raises `DamagedCheckpointError`."""
    headers: dict[str, Layout] = {}
    seen: set[str] = set()
    for name in manifest.files:
        if name == STATE_FILE or not (path / name).exists():
            continue
        try:
            headers[name] = read_header(path / name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(path, f"the header of {name} is damaged: {error}") from error
        for repeated in seen & headers[name].keys():
            raise DamagedCheckpointError(path, f"{repeated} is in {name} and in a file before it")
        seen |= headers[name].keys()
    return headers
