"""Export a checkpoint as a Hugging Face folder. The command itself is in `torchround/commands/export_hf.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.commands import run_command
from torchround.commands.export_hf import main

if __name__ == "__main__":
    run_command(main)
