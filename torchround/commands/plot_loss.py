"""Draw the loss curves of one or several runs over each other.

    torchround plot_loss outputs/my-run outputs/another-run --output compared.png

A run draws its own `loss.png` when it ends. This draws a run that is still training, and compares runs.
"""

import argparse
import sys
from pathlib import Path

from torchround.observe.run_page import PICTURE_FILE, draw_losses


def main(arguments: list[str]) -> int:
    """Draw the picture. Returns the exit code: 2 if a folder has no metrics or no loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, with metrics.jsonl"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PNG",
        help=f"the picture (default: {PICTURE_FILE} in the folder of the first run)",
    )
    options = parser.parse_args(arguments)
    picture = options.output or options.runs[0] / PICTURE_FILE
    try:
        draw_losses(options.runs, picture)
    except ImportError as error:
        print(f"plot_loss: drawing needs matplotlib: pip install matplotlib ({error})", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(
            f"plot_loss: {error.filename} is not there; legal: folders of runs that logged a step",
            file=sys.stderr,
        )
        return 2
    except (OSError, ValueError) as error:
        print(f"plot_loss: {error}", file=sys.stderr)
        return 2
    print(picture)
    return 0
