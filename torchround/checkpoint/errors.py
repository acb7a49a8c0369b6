"""Errors of checkpoints. Each message names the path."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchround.untrusted.terminal import terminal_safe


class CheckpointError(Exception):
    """Failure to write a checkpoint, or to read any. `lines` are printed below the message."""

    def __init__(self, message: object, *lines: object) -> None:
        super().__init__(terminal_safe(message, *lines))
        self.reason = str(self)


class NoSpaceError(CheckpointError):
    """A checkpoint that the disk, or a quota on it, has no room for. The same save succeeds once there is room."""


class FolderError(CheckpointError):
    """A fault of the checkpoint in `folder`. `reason` is the message without the folder."""

    _BEGINNING = "checkpoint {}: "

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(self._BEGINNING.format(folder) + reason)
        self.folder = folder
        self.reason = reason


class DamagedCheckpointError(FolderError):
    """Missing or altered content: this checkpoint cannot be used, but an older one may be intact."""


class NoCheckpointError(FolderError):
    """A path that is not the folder of one checkpoint. The message proposes one."""

    _BEGINNING = "given {}; "


class ForeignCheckpointError(FolderError):
    """An intact checkpoint of another model, or of another version of this program.

    `state` is the state that was saved with it, empty if it cannot be read. Callers do not fall back to an older
    checkpoint: that would lose work silently.
    """

    def __init__(self, folder: Path, reason: str, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(folder, reason)
        self.state = dict(state or {})
