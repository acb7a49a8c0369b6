"""Draw the metrics of runs as an HTML page. The command itself is in `torchround/commands/draw_page.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.commands import run_command
from torchround.commands.draw_page import main

if __name__ == "__main__":
    run_command(main)
