"""Checkpoints: written straight from the training state and read back into it, whole or not at all."""

from torchround.checkpoint.checkpointer import Checkpointer
from torchround.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    FolderError,
    ForeignCheckpointError,
    NoCheckpointError,
    NoSpaceError,
)
from torchround.checkpoint.folders import checkpoint_name
from torchround.checkpoint.loading import Loaded, load_checkpoint, open_checkpoint, verify_checkpoint
from torchround.checkpoint.machine_team import MachineTeam
from torchround.checkpoint.tensor_file import SaveWatch

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpointError",
    "FolderError",
    "ForeignCheckpointError",
    "Loaded",
    "MachineTeam",
    "NoCheckpointError",
    "NoSpaceError",
    "SaveWatch",
    "checkpoint_name",
    "load_checkpoint",
    "open_checkpoint",
    "verify_checkpoint",
]
