"""Train a model: `python train.py --config debug.toml`. The command itself is in `torchround/commands/train_model.py`."""

from torchround.commands import run_command
from torchround.commands.train_model import main

if __name__ == "__main__":
    run_command(main)
