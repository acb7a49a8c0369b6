"""Checkpoints: written straight from the training state and read back into it, whole or not at all."""

from torchround.checkpoint.checkpointer import (
    Checkpointer,
    Loaded,
    load_checkpoint,
    open_checkpoint,
    verify_checkpoint,
)
from torchround.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    NoSpaceError,
)
from torchround.checkpoint.machine_team import MachineTeam
from torchround.checkpoint.tensor_file import SaveWatch

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpointError",
    "ForeignCheckpointError",
    "Loaded",
    "MachineTeam",
    "NoCheckpointError",
    "NoSpaceError",
    "SaveWatch",
    "load_checkpoint",
    "open_checkpoint",
    "verify_checkpoint",
]
