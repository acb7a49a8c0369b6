"""`manifest.json`: what a checkpoint folder must contain, so that a missing or altered part is found by name.

    {"format": 1, "step": 120, "files": {"state.json": {"size_bytes": 812, "crc32": 1234}, ...}, "crc32": 99}

`crc32` at the end is that of the manifest without it. The file is accepted only if it is, byte for byte, what
we would write, so no altered byte goes unseen.
"""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchround.checkpoint.errors import DamagedCheckpointError

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
FORMAT = 1

_FILE_NAME = re.compile(r"state\.json|tensors-\d{5,}\.safetensors")


@dataclass(frozen=True)
class FileRecord:
    """Size and CRC-32 of one file of the checkpoint."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The step and every other file of the folder."""

    step: int
    files: dict[str, FileRecord]

    def encode(self) -> bytes:
        """The bytes of `manifest.json`."""
        files = {name: vars(record) for name, record in self.files.items()}
        content: dict[str, Any] = {"format": FORMAT, "step": self.step, "files": files}
        content["crc32"] = zlib.crc32(json.dumps(content).encode())
        return json.dumps(content, indent=1).encode()


def read_manifest(folder: Path, step: int | None = None) -> Manifest:
    """The folder's manifest, once every file it lists is found there with its size. Contents are not read.

    Raises `DamagedCheckpointError` naming the folder and the part, also if it is not of `step` where given.
    """
    try:
        written = (folder / MANIFEST_FILE).read_bytes()
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
        return json.dumps(dict(state)).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the checkpoint's state cannot be stored as JSON: {error}") from error


def read_state(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The state given to `save`, checked against its checksum before it is parsed."""
    try:
        encoded = (folder / STATE_FILE).read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{STATE_FILE} cannot be read: {error}") from error
    check_crc(folder, STATE_FILE, manifest, zlib.crc32(encoded))
    state = _parse_json(folder, STATE_FILE, encoded)
    if not isinstance(state, dict):
        raise DamagedCheckpointError(folder, f"{STATE_FILE} is not a JSON object")
    return state


def check_crc(folder: Path, name: str, manifest: Manifest, found: int) -> None:
    """Raise `DamagedCheckpointError` unless `found` is the checksum of file `name`."""
    expected = manifest.files[name].crc32
    if found != expected:
        raise DamagedCheckpointError(folder, f"{name} has checksum {found:08x} instead of {expected:08x}")


def _parse(folder: Path, written: bytes) -> Manifest:
    content = _parse_json(folder, MANIFEST_FILE, written)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else content
        raise DamagedCheckpointError(
            folder, f"format {found!r} is not the format {FORMAT} that this version reads"
        )
    try:
        files = {str(name): FileRecord(**record) for name, record in content["files"].items()}
        manifest = Manifest(content["step"], files)
        unaltered = manifest.encode() == written
    except (KeyError, TypeError, AttributeError, ValueError):
        unaltered = False
    if not unaltered or STATE_FILE not in files or not isinstance(manifest.step, int):
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} was altered")
    return manifest


def _parse_json(folder: Path, name: str, encoded: bytes) -> Any:
    try:
        return json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(folder, f"{name} is not JSON: {error}") from error


def _check_size(folder: Path, name: str, record: FileRecord) -> None:
    if not _FILE_NAME.fullmatch(name):
        raise DamagedCheckpointError(folder, f"{MANIFEST_FILE} lists the strange file {name!r}")
    try:
        size_bytes = (folder / name).stat().st_size
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{name} is missing: {error}") from error
    if size_bytes != record.size_bytes:
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
