"""Checkpoints: written straight from the training state and read back into it, whole or not at all."""

from torchround.checkpoint.checkpointer import Checkpointer, Loaded, load_checkpoint, verify_checkpoint
from torchround.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
)
from torchround.checkpoint.tensor_file import SaveWatch

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpointError",
    "ForeignCheckpointError",
    "Loaded",
    "NoCheckpointError",
    "SaveWatch",
    "load_checkpoint",
    "verify_checkpoint",
]
