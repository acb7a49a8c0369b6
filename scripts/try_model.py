"""Score text with a trained model, and let it continue prompts. The command itself is in `torchround/commands/try_model.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.commands import run_command
from torchround.commands.try_model import main

if __name__ == "__main__":
    run_command(main)
