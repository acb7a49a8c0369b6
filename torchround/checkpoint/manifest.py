"""`manifest.json`: what a checkpoint folder must contain, so that a missing or altered part is found by name.

    {"format": 2, "step": 120, "files": {"state.json": {"size_bytes": 812, "xxh3_128": "5e0f.."}, ...}, "xxh3_128": ".."}

The checksum at the end is that of the manifest without it, in every format from 2 on: a newer format is told from an
altered byte by that. The file is accepted only if it is, byte for byte, what we would write, so no altered byte goes
unseen.
"""

import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchround.checkpoint.checksum import Crc32, Xxh3, checksum_of
from torchround.checkpoint.errors import DamagedCheckpointError, ForeignCheckpointError
from torchround.checkpoint.fsync import read_regular

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
FORMAT = 2
# Format 1, of earlier versions, is read and no longer written.
CHECKSUMS: Mapping[int, type[Crc32] | type[Xxh3]] = {1: Crc32, FORMAT: Xxh3}

# JSON takes several times its size in memory once it is read; ours takes kilobytes, a data position up to megabytes.
MOST_MANIFEST_BYTES = 2**24
MOST_STATE_BYTES = 2**28

_FILE_NAME = re.compile(r"state\.json|tensors-\d{5,}\.safetensors")


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of one file of the checkpoint."""

    size_bytes: int
    checksum: int | str


@dataclass(frozen=True)
class Manifest:
    """The step and every other file of the folder."""

    step: int
    files: dict[str, FileRecord]
    format: int = FORMAT

    @property
    def checksum_kind(self) -> type[Crc32] | type[Xxh3]:
        """What the files' checksums are."""
        return CHECKSUMS[self.format]

    def encode(self) -> bytes:
        """The bytes of `manifest.json`."""
        kind = self.checksum_kind
        files = {
            name: {"size_bytes": record.size_bytes, kind.name: record.checksum}
            for name, record in self.files.items()
        }
        content: dict[str, Any] = {"format": self.format, "step": self.step, "files": files}
        content[kind.name] = checksum_of(kind, json.dumps(content).encode())
        return json.dumps(content, indent=1).encode()


def read_manifest(folder: Path, step: int | None = None) -> Manifest:
    """The folder's manifest, once every file it lists is found there with its size. Contents are not read.

    Raises `DamagedCheckpointError` naming the folder and the part, also if it is not of `step` where given, and
    `ForeignCheckpointError` for a format that this version does not know.
    """
    try:
        written = read_regular(folder / MANIFEST_FILE, MOST_MANIFEST_BYTES)
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} cannot be read: {error}") from error
    manifest = _parse(folder, written)
    if step is not None and manifest.step != step:
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} is of step {manifest.step}")
    for name, record in manifest.files.items():
        _check_size(folder, name, record)
    return manifest


def encode_state(state: Mapping[str, Any]) -> bytes:
    """`state` as JSON; tuples come back as lists. Raises `ValueError` for what JSON cannot give back."""
    try:
        _require_text_keys(state)
        encoded = json.dumps(dict(state)).encode()
        if len(encoded) > MOST_STATE_BYTES:
            raise ValueError(f"{len(encoded)} bytes are more than the {MOST_STATE_BYTES} that it may have")
        return encoded
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's state cannot be stored as JSON: {error}") from error


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The state given to `save`, checked against its checksum before it is parsed."""
    try:
        encoded = read_regular(folder / STATE_FILE, MOST_STATE_BYTES)
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{STATE_FILE} cannot be read: {error}") from error
    check_file(folder, STATE_FILE, manifest, checksum_of(manifest.checksum_kind, encoded))
    state = _parse_json(folder, STATE_FILE, encoded)
    if not isinstance(state, dict):
        raise DamagedCheckpointError(folder, f"{STATE_FILE} is not a JSON object")
    return state


def check_file(folder: Path, name: str, manifest: Manifest, found: int | str) -> None:
    """Raise `DamagedCheckpointError` unless `found` is the checksum of file `name`."""
    expected = manifest.files[name].checksum
    if found != expected:
        raise DamagedCheckpointError(folder, f"{name} has checksum {found} instead of {expected}")


def _parse(folder: Path, written: bytes) -> Manifest:
    content = _parse_json(folder, MANIFEST_FILE, written)
    if not isinstance(content, dict):
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} is not a JSON object")
    try:
        _refuse_newer(folder, content)
        kind = CHECKSUMS[content["format"]]
        files = {
            str(name): FileRecord(record["size_bytes"], record[kind.name])
            for name, record in content["files"].items()
        }
        manifest = Manifest(content["step"], files, content["format"])
        numbers = [manifest.format, manifest.step, *(record.size_bytes for record in files.values())]
        checksums = [record.checksum for record in files.values()]
        is_plain = all(map(_is_count, numbers)) and all(map(kind.can_be, checksums))
        unaltered = is_plain and manifest.encode() == written
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        unaltered = False
    if not unaltered or STATE_FILE not in files:
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} was altered")
    return manifest


def _refuse_newer(folder: Path, content: dict[str, Any]) -> None:
    """A later version's manifest, known by its number and by the checksum that ends it as it ends ours."""
    found, given = content.get("format", 0), content.get(Xxh3.name)
    rest = {key: value for key, value in content.items() if key != Xxh3.name}
    newer = _is_count(found) and found > FORMAT
    if newer and checksum_of(Xxh3, json.dumps(rest).encode()) == given:
        raise ForeignCheckpointError(
            folder,
            f"it has format {found}, and this version reads up to format {FORMAT}; use a newer version",
        )


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _parse_json(folder: Path, name: str, encoded: bytes) -> Any:
    try:
        return json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(folder, f"{name} is not JSON: {error}") from error


def _check_size(folder: Path, name: str, record: FileRecord) -> None:
    if not _FILE_NAME.fullmatch(name):
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} lists the strange file {name!r}")
    try:
        status = (folder / name).lstat()
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{name} is missing: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(folder, f"{name} is not an ordinary file")
    if (size_bytes := status.st_size) != record.size_bytes:
        raise DamagedCheckpointError(
            folder, f"{name} is {size_bytes} bytes long instead of {record.size_bytes}"
        )


def _require_text_keys(value: Any) -> None:
    """JSON would silently turn a number that is a key into text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            _require_text_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _require_text_keys(item)
