"""Draw the metrics of one or several runs as one HTML page, which needs no network and no account.

    torchround page outputs/my-run outputs/another-run --output compared.html

A run draws its own `page.html` and `loss.png` when it ends. This draws a run that is still training, and compares runs:
each run has a colour, and the table switches runs off and on.
"""

from pathlib import Path

from torchround.commands import end_with_message, new_parser
from torchround.observe.run_page import PAGE_FILE, write_page
from torchround.untrusted.terminal import say


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, with metrics.jsonl")
    add("--output", type=Path, metavar="FILE", help=f"(default: {PAGE_FILE} in the folder of the first run)")
    options = parser.parse_args(arguments)
    output = options.output or options.runs[0] / PAGE_FILE

    def draw() -> None:
        if options.output and not output.parent.is_dir():
            raise ValueError(f"{output} cannot be written: there is no such folder")
        write_page(options.runs, output)
        say(str(output))

    return end_with_message(draw, (OSError, ValueError))
