"""Writes and reads the files of one checkpoint folder. The manifest is written last, so that it vouches for the rest.

step-N/tensors-00000.safetensors ..   the tensors, file by file in the order given to `save`; machine 1's from 100000 on
step-N/state.json                     everything that is not a tensor
step-N/manifest.json                  sizes and checksums of the files above
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint.conversion import Converter, Layout, ReadingPlan, TensorSink, layout_of
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
from torchround.planning.memory import size_text
from torchround.untrusted.terminal import Progress


def write_tensors(
    path: Path, files: list[TensorFile], watch: SaveWatch, advance: Callable[[int], object]
) -> dict[str, FileRecord]:
    """Put files of tensors on the disk in the folder `path`. An `OSError` may leave a part of them behind.

    Returns their records. `advance` receives the number of bytes of each write.
    """
    records = {}
    for file in files:
        checksum = write_tensor_file(path / file.name, file, watch, advance)
        records[file.name] = FileRecord(file.size_bytes, checksum)
    return records


def write_manifest(path: Path, step: int, records: Mapping[str, FileRecord], state_json: bytes) -> None:
    """Put the state in the folder `path`, and the manifest of the state and of the files in `records`, on the disk."""
    write_synced(path / STATE_FILE, state_json)
    state = FileRecord(len(state_json), checksum_of(state_json))
    write_synced(path / MANIFEST_FILE, Manifest(step, {**records, STATE_FILE: state}).encode())
    sync_entry(path)


def check_structure(
    path: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    optional: Callable[[str], bool],
    converter: Converter,
) -> tuple[dict[str, Any], ReadingPlan]:
    """Check state and headers, and that the folder holds `tensors` and nothing else, in a form that `converter` knows.

    Tensors of an `optional` name may be missing on either side. Returns the state, and how the tensors are read.

    Raises `DamagedCheckpointError`. Raises `ForeignCheckpointError` if every byte is as it was written but tensors are
    missing, superfluous, or of another dtype or shape; the message lists them.
    """
    state = read_state(path, manifest)
    stored: Layout = {}
    for name in tensor_files(manifest):
        add_header(stored, path, name, checked_header(path, name))
    wanted = layout_of(tensors)
    plan = ReadingPlan(stored, converter.conversions(stored, wanted))
    if differences := plan.differences(wanted, optional):
        # An altered byte of a header must not look like another model, so the checksums decide first.
        check_contents(path, manifest, manifest.files)
        raise ForeignCheckpointError(path, differences, state)
    return state, plan


def checked_header(path: Path, name: str) -> Layout:
    """Read the header of the file `name`. Raises `DamagedCheckpointError`."""
    try:
        return read_header(path / name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(path, f"the header of {name} is damaged: {error}") from error


def add_header(stored: Layout, path: Path, name: str, header: Layout) -> None:
    """Add the tensors of the file `name` to `stored`. Raises `DamagedCheckpointError` if one is there already."""
    for repeated in stored.keys() & header.keys():
        raise DamagedCheckpointError(path, f"{repeated} is in {name} and in a file before it")
    stored.update(header)


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


def read_into(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor | TensorSink]) -> None:
    """Read every tensor's bytes into place, and compare each file's checksum once the file is read."""
    total_bytes = sum(record.size_bytes for record in manifest.files.values())
    progress = Progress(f"reading {path}", total_bytes, size_text)
    for name in tensor_files(manifest):
        read_file(path, name, manifest, tensors)
        progress.advance(manifest.files[name].size_bytes)


def read_file(path: Path, name: str, manifest: Manifest, tensors: Mapping[str, Tensor | TensorSink]) -> None:
    """Read the wanted `tensors` of the file `name` into place. Raises `DamagedCheckpointError`."""
    try:
        found = read_tensor_file(path / name, tensors)
    except (OSError, ValueError, KeyError) as error:
        raise DamagedCheckpointError(path, f"{name} cannot be read: {error}") from error
    check_file(path, name, manifest, found)


def tensor_files(manifest: Manifest) -> list[str]:
    """Return the names of the files that hold tensors."""
    return [name for name in manifest.files if name != STATE_FILE]
