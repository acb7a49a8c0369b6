"""Draw the metrics of one or several runs as one HTML page, which needs no network and no account.

    torchround page outputs/my-run outputs/another-run --output compared.html

A run draws its own `page.html` when it ends. This draws a run that is still training, and compares runs: each run has
a colour, and the table switches runs off and on.
"""

import argparse
import sys
from pathlib import Path

from torchround.observe.run_page import PAGE_FILE, write_page
from torchround.untrusted.terminal import say, terminal_safe


def main(arguments: list[str]) -> int:
    """Draw the page. Returns the exit code: 2 if a folder has no metrics or the page cannot be written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, with metrics.jsonl"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="HTML",
        help=f"the page (default: {PAGE_FILE} in the folder of the first run)",
    )
    options = parser.parse_args(arguments)
    page = options.output or options.runs[0] / PAGE_FILE
    try:
        write_page(options.runs, page)
    except FileNotFoundError as error:
        reason = f"{error.filename} is not there; legal: folders of runs that logged a step"
        print(f"page: {terminal_safe(reason)}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"page: {terminal_safe(error)}", file=sys.stderr)
        return 2
    say(str(page))
    return 0
