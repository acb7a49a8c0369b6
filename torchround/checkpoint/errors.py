"""What can go wrong with a checkpoint, with its path in the message."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchround.untrusted.terminal import terminal_safe


class CheckpointError(Exception):
    """A checkpoint could not be written, or none could be read. `lines` stand below the message."""

    def __init__(self, message: object, *lines: object) -> None:
        super().__init__(terminal_safe(message, *lines))


class DamagedCheckpointError(CheckpointError):
    """The checkpoint in `folder` cannot be used: something is missing or altered. An older one may do."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"checkpoint {folder}: {reason}")


class NoCheckpointError(CheckpointError):
    """What was given is not the folder of one checkpoint. `newest` is one below it, or beside where it is not there."""

    def __init__(self, given: Path, newest: Path | None) -> None:
        such = f"such as {newest}" if newest else "a folder step-N of a run"
        none = "" if newest else "; there is no manifest.json in it"
        super().__init__(f"given {given}; legal: one checkpoint, {such}{none}")


class ForeignCheckpointError(CheckpointError):
    """The checkpoint in `folder` is whole, and of another model or written by a newer version of this program.

    `state` is what was saved with it, empty where that cannot be read. Going on from an older one instead would
    lose work without a word, so nobody does.
    """

    def __init__(self, folder: Path, reason: str, state: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"checkpoint {folder}: {reason}")
        self.folder = folder
        self.state = dict(state or {})
