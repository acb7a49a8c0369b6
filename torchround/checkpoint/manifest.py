"""The manifest of a checkpoint folder lists what it must contain, so that a missing or altered part is found by name.

    {"format": 3, "step": 120, "files": {"state.json": {"size_bytes": 812, "xxh3_128": "5e0f.."}, ...}, "xxh3_128": ".."}

The checksum at the end covers the manifest without it. It tells a newer format from an altered byte. The file is accepted
only if it is, byte for byte, what this program would write, so every altered byte is noticed.
"""

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from torchround.checkpoint.errors import DamagedCheckpointError, ForeignCheckpointError
from torchround.checkpoint.folders import MANIFEST_FILE, STATE_FILE, is_file_of_checkpoint
from torchround.untrusted.regular_file import read_regular
from torchround.untrusted.strict_json import parse_json

FORMAT = 3
"""The format that is written and read."""
CHECKSUM = "xxh3_128"
"""Key of a checksum in the manifest: XXH3 with 128 bits, as 32 hexadecimal digits."""

# Parsed JSON takes several times its size in memory. Real manifests take kilobytes, data positions up to megabytes.
MOST_MANIFEST_BYTES = 2**24
MOST_STATE_BYTES = 2**28

_CHECKSUM = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class FileRecord:
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The step of a checkpoint, and every other file of its folder."""

    step: int
    files: dict[str, FileRecord]

    def encode(self) -> bytes:
        files = {
            n: {"size_bytes": file.size_bytes, CHECKSUM: file.checksum} for n, file in self.files.items()
        }
        content: dict[str, Any] = {"format": FORMAT, "step": self.step, "files": files}
        content[CHECKSUM] = checksum_of(json.dumps(content).encode())
        return json.dumps(content, indent=1).encode()


def checksum_of(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def read_manifest(folder: Path, step: int | None = None) -> Manifest:
    """Read the folder's manifest, and check that every file it lists is there with its size. Contents are not read.

    Raises `DamagedCheckpointError` naming the folder and the part, also if the manifest is not of the given `step`, and
    `ForeignCheckpointError` for a format that this version does not read.
    """
    written = _read(folder, MANIFEST_FILE, MOST_MANIFEST_BYTES)
    content = _parse(folder, MANIFEST_FILE, written)
    try:
        _refuse_other_formats(folder, content)
        files = {
            str(name): FileRecord(record["size_bytes"], record[CHECKSUM])
            for name, record in content["files"].items()
        }
        manifest = Manifest(content["step"], files)
        numbers = [manifest.step, *(record.size_bytes for record in files.values())]
        # The values end up in messages, so each must be plain before they are compared as text.
        is_plain = all(map(_is_count, numbers)) and all(
            _CHECKSUM.fullmatch(record.checksum) for record in files.values()
        )
        unaltered = is_plain and manifest.encode() == written
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        unaltered = False
    if not unaltered or STATE_FILE not in files:
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} was altered")
    if step is not None and manifest.step != step:
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} is of step {manifest.step}")
    for name, record in files.items():
        if not is_file_of_checkpoint(name):
            raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} lists the strange file {name!r}")
        try:
            status = (folder / name).lstat()
        except OSError as error:
            raise DamagedCheckpointError(folder, f"{name} is missing: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise DamagedCheckpointError(folder, f"{name} is not an ordinary file")
        if status.st_size != record.size_bytes:
            raise DamagedCheckpointError(
                folder, f"{name} is {status.st_size} bytes long instead of {record.size_bytes}"
            )
    return manifest


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Encode `state` as JSON; tuples come back as lists. Raises `ValueError` for values that JSON cannot hold."""
    try:
        encoded = json.dumps(dict(state)).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's state cannot be stored as JSON: {error}") from error
    if len(encoded) > MOST_STATE_BYTES:
        raise ValueError(f"the checkpoint's state is larger than {MOST_STATE_BYTES} bytes: {len(encoded)}")
    return encoded


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Read the state given to `save`. Its checksum is compared before it is parsed."""
    encoded = _read(folder, STATE_FILE, MOST_STATE_BYTES)
    check_file(folder, STATE_FILE, manifest, checksum_of(encoded))
    return _parse(folder, STATE_FILE, encoded)


def check_file(folder: Path, name: str, manifest: Manifest, found: str) -> None:
    """Raise `DamagedCheckpointError` unless `found` is the checksum of file `name`."""
    expected = manifest.files[name].checksum
    if found != expected:
        raise DamagedCheckpointError(folder, f"{name} has checksum {found} instead of {expected}")


def _refuse_other_formats(folder: Path, content: dict[str, Any]) -> None:
    """Raise `ForeignCheckpointError` for the manifest of another version: of another number, with a checksum that fits."""
    found, given = content.get("format"), content.get(CHECKSUM)
    rest = {key: value for key, value in content.items() if key != CHECKSUM}
    if _is_count(found) and found != FORMAT and checksum_of(json.dumps(rest).encode()) == given:
        raise ForeignCheckpointError(
            folder, f"format {found} is not read, only format {FORMAT}; use the version that wrote it"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _read(folder: Path, name: str, most_bytes: int) -> bytes:
    try:
        return read_regular(folder / name, most_bytes)
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{name} cannot be read: {error}") from error


def _parse(folder: Path, name: str, encoded: bytes) -> dict[str, Any]:
    try:
        content = parse_json(encoded)
    except ValueError as error:
        raise DamagedCheckpointError(folder, f"{name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError(folder, f"{name} is not a JSON object")
    return content
