"""Writes and reads the files of one checkpoint folder. The manifest is written last, so that it vouches for the rest.

step-N/tensors-00000.safetensors ..   the tensors, file by file in the order given to `save`
step-N/state.json                     everything that is not a tensor
step-N/manifest.json                  sizes and checksums of the files above
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchround.checkpoint.errors import DamagedCheckpointError, ForeignCheckpointError
from torchround.checkpoint.fsync import sync_entry, write_synced
from torchround.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    FileRecord,
    Manifest,
    check_file,
    checksum_of,
    read_state,
)
from torchround.checkpoint.tensor_file import (
    SaveWatch,
    TensorFile,
    checksum_file,
    read_header,
    read_tensor_file,
    write_tensor_file,
)
from torchround.pipeline.memory import size_text
from torchround.untrusted.progress import Progress

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def write_folder(
    path: Path,
    step: int,
    files: list[TensorFile],
    state_json: bytes,
    watch: SaveWatch,
    advance: Callable[[int], object],
) -> Path:
    """Create the folder `path` and put everything in it on the disk. An `OSError` may leave a part of it behind.

    `advance` receives the number of bytes of each write of tensors.
    """
    path.mkdir()
    records = {}
    for file in files:
        records[file.name] = FileRecord(
            file.size_bytes, write_tensor_file(path / file.name, file, watch, advance)
        )
    write_synced(path / STATE_FILE, state_json)
    records[STATE_FILE] = FileRecord(len(state_json), checksum_of(state_json))
    write_synced(path / MANIFEST_FILE, Manifest(step, records).encode())
    sync_entry(path)
    return path


def check_structure(
    path: Path, manifest: Manifest, tensors: Mapping[str, Tensor], optional: Callable[[str], bool]
) -> tuple[dict[str, Any], set[str]]:
    """Check state and headers, and that the folder holds `tensors` and nothing else.

    Tensors of an `optional` name may be missing on either side. Returns the state, and the names of the stored tensors
    that are wanted.

    Raises `DamagedCheckpointError`. Raises `ForeignCheckpointError` if every byte is as it was written but tensors are
    missing, superfluous, or of another dtype or shape; the message lists them.
    """
    state = read_state(path, manifest)
    stored: Layout = {}
    for name in _tensor_files(manifest):
        try:
            header = read_header(path / name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(path, f"the header of {name} is damaged: {error}") from error
        for repeated in stored.keys() & header.keys():
            raise DamagedCheckpointError(path, f"{repeated} is in {name} and in a file before it")
        stored.update(header)
    wanted: Layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    differences = _differences(stored, wanted, optional)
    if differences:
        # An altered byte of a header must not look like another model, so the checksums decide first.
        check_contents(path, manifest)
        shown = "; ".join(differences[:5]) + ("; .." if len(differences) > 5 else "")
        raise ForeignCheckpointError(path, f"{len(differences)} tensors are not this model's: {shown}", state)
    return state, stored.keys() & tensors.keys()


def check_contents(
    path: Path, manifest: Manifest, advance: Callable[[int], object] = lambda nbytes: None
) -> None:
    """Read every file and compare its checksum, without filling any tensor. `advance` receives the bytes of each step."""
    for name in manifest.files:
        try:
            found = checksum_file(path / name, advance)
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(path, f"{name} cannot be read: {error}") from error
        check_file(path, name, manifest, found)


def read_into(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Read every tensor's bytes into place, and compare each file's checksum once the file is read."""
    total_bytes = sum(record.size_bytes for record in manifest.files.values())
    progress = Progress(f"reading {path}", total_bytes, size_text)
    for name in _tensor_files(manifest):
        try:
            found = read_tensor_file(path / name, tensors)
        except (OSError, ValueError, KeyError) as error:
            raise DamagedCheckpointError(path, f"{name} cannot be read: {error}") from error
        check_file(path, name, manifest, found)
        progress.advance(manifest.files[name].size_bytes)


def _tensor_files(manifest: Manifest) -> list[str]:
    return [name for name in manifest.files if name != STATE_FILE]


def _differences(stored: Layout, wanted: Layout, optional: Callable[[str], bool]) -> list[str]:
    def show(entry: tuple[torch.dtype, tuple[int, ...]]) -> str:
        return f"{str(entry[0]).removeprefix('torch.')} {list(entry[1])}"

    missing = [f"{name} is missing" for name in wanted if name not in stored and not optional(name)]
    extra = [f"{name} is not part of it" for name in stored if name not in wanted and not optional(name)]
    changed = [
        f"{name} is {show(stored[name])} instead of {show(wanted[name])}"
        for name in wanted
        if name in stored and stored[name] != wanted[name]
    ]
    return missing + extra + changed
