"""Say what this machine has and what fits it. The command itself is in `torchround/commands/doctor.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.commands import run_command
from torchround.commands.doctor import main

if __name__ == "__main__":
    run_command(main)
