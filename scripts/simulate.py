"""Simulate pipeline schedules side by side. The command itself is in `simulate/command.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.commands import run_command
from torchround.simulate.command import main

if __name__ == "__main__":
    run_command(main)
