"""Errors of checkpoints. Each message names the path."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchround.untrusted.terminal import terminal_safe


class CheckpointError(Exception):
    """Failure to write a checkpoint, or to read any. `lines` are printed below the message."""

    def __init__(self, message: object, *lines: object) -> None:
        super().__init__(terminal_safe(message, *lines))


class NoSpaceError(CheckpointError):
    """A checkpoint that the disk, or a quota on it, has no room for. The same save succeeds once there is room."""


class DamagedCheckpointError(CheckpointError):
    """Missing or altered content: the checkpoint in `folder` cannot be used, but an older one may be intact."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"checkpoint {folder}: {reason}")


class NoCheckpointError(CheckpointError):
    """A path that is not the folder of one checkpoint. `newest` is the checkpoint that the message proposes instead."""

    def __init__(self, given: Path, newest: Path | None) -> None:
        example = f"such as {newest}" if newest else "a folder step-N of a run"
        reason = "" if newest else "; there is no manifest.json in it"
        super().__init__(f"given {given}; legal: one checkpoint, {example}{reason}")
        self.newest = newest


class ForeignCheckpointError(CheckpointError):
    """An intact checkpoint of another model, or of another version of this program.

    `state` is the state that was saved with it, empty if it cannot be read. Callers do not fall back to an older
    checkpoint: that would lose work silently.
    """

    def __init__(self, folder: Path, reason: str, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"checkpoint {folder}: {reason}")
        self.folder = folder
        self.state = dict(state or {})
