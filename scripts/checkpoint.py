"""List and verify the checkpoints of a run. The command itself is in `torchround/commands/manage_checkpoints.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.commands import run_command
from torchround.commands.manage_checkpoints import main

if __name__ == "__main__":
    run_command(main)
