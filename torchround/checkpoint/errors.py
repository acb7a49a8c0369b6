"""What can go wrong with a checkpoint, with its path in the message."""

from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint could not be written, or none could be read."""


class DamagedCheckpointError(CheckpointError):
    """The checkpoint in `folder` cannot be used: something is missing, altered or of another model."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(f"checkpoint {folder}: {reason}")
