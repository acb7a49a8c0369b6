"""Draw the loss curves of runs. The command itself is in `torchround/commands/plot_loss.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.commands import run_command
from torchround.commands.plot_loss import main

if __name__ == "__main__":
    run_command(main)
