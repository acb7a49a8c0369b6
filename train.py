"""Train a model: `python train.py --config debug.toml`. The command itself is in `torchround/commands/train_model.py`."""

import sys

from torchround.commands.train_model import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
