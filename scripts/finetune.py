"""Fine-tune a released model on your data. The command itself is in `torchround/commands/finetune.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.commands import run_command
from torchround.commands.finetune import main

if __name__ == "__main__":
    run_command(main)
