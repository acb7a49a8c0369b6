"""The frame of every benchmark: options, turns between rivals, tables, and one report that names its machine.

A benchmark is a constant of type `Benchmark`. This file imports no torch, so that planning is measured without.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

ROOT = Path(__file__).parents[1]
GIB = 2**30
Report = dict[str, Any]
T = TypeVar("T")


class Option(NamedTuple):
    """One option. The default gives its type; a list takes several values, and `type` serves a default of None."""

    default: Any
    help: str
    choices: Sequence[str] | None = None
    type: Callable[[str], Any] | None = None

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add the option to a command line."""
        several = isinstance(self.default, list)
        kind = self.type or type(self.default[0] if several else self.default)
        nargs = "+" if several else None
        parser.add_argument(
            name, default=self.default, help=self.help, choices=self.choices, type=kind, nargs=nargs
        )


def as_json(figures: Report) -> str:
    """Show the figures as they are."""
    return json.dumps(figures, indent=2)


@dataclass(frozen=True)
class Benchmark:
    """One measurement that a command prints.

    `purpose` says how it measures, and is the command's help. `headline` turns the figures into two cells of the
    results table: our figure, and the rival's or the bound. `tiny` holds options that make a run take seconds; its
    test uses them. `missed_bounds` lists each bound that `--check` asks for and the figures miss. `show` is what the
    command prints.
    """

    purpose: str
    options: Mapping[str, Option]
    measure: Callable[[argparse.Namespace], Report]
    headline: Callable[[Report], tuple[str, str]]
    tiny: str
    missed_bounds: Callable[[Report], list[str]] | None = None
    show: Callable[[Report], str] = as_json

    def parse(self, name: str, arguments: Sequence[str]) -> argparse.Namespace:
        """Read the command line; a wrong option ends the process with exit code 2."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {name}",
            description=self.purpose,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for option_name, option in self.options.items():
            option.add_to(parser, option_name)
        parser.add_argument("--json", type=Path, help="also write the report to this file")
        if self.missed_bounds is not None:
            parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
        return parser.parse_args(arguments)

    def run(self, name: str, arguments: Sequence[str]) -> int:
        """Measure, print the figures and the row for the results table, and return the exit code."""
        options = self.parse(name, arguments)
        load_before = os.getloadavg()[0]
        start_s = time.perf_counter()
        figures = self.measure(options)
        missed = self.missed_bounds(figures) if self.missed_bounds is not None else []
        report = {
            "command": " ".join(["python -m benchmarks", name, *arguments]),
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
            "load_average": [load_before, os.getloadavg()[0]],
            "seconds": time.perf_counter() - start_s,
            **figures,
            "missed_bounds": missed,
        }
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(result_row(report, self.headline(figures)), file=sys.stderr)
        print(self.show(report))
        # Without --check a missed bound is a figure like any other: a loaded machine misses many.
        return int(bool(missed) and options.check)


def machine() -> dict[str, Any]:
    """Describe the machine that a figure belongs to."""
    torch = sys.modules.get("torch")  # imported by the benchmark, if it needs it
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "host_gib": psutil.virtual_memory().total / GIB,
        "python": platform.python_version(),
        "torch": torch.__version__ if torch is not None else None,
    }


def processor_name() -> str:
    """Name the processor as Linux does; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def result_row(report: Report, headline: tuple[str, str]) -> str:
    """Format one row of the table in docs/benchmarks.md; the person who adds it names the machine by its letter."""
    found = report["machine"]
    where = f"{found['processor']}, {found['cores']} cores, load {report['load_average'][0]:.1f}"
    return "| " + " | ".join([*headline, f"`{report['command']}`", where, report["date"]]) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a table of text: the first column to the left, numbers and others to the right."""
    lines = [list(map(str, line)) for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for first, *rest in lines:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        texts.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(texts)


# Turns and times.


def timed(work: Callable[[], object]) -> float:
    """Measure the seconds that `work` takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def in_turns(works: Mapping[str, Callable[[], T]], turns: int, warm_up_turns: int = 0) -> dict[str, list[T]]:
    """Collect what each work returns in each turn, warm-up turns left out.

    The works alternate, so that a machine that slows down disturbs all alike. Each turn begins with another work:
    what runs first may find the processor or the disk in another state.
    """
    results: dict[str, list[T]] = {name: [] for name in works}
    names = list(works)
    for turn in range(warm_up_turns + turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            result = works[name]()
            if turn >= warm_up_turns:
                results[name].append(result)
    return results


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Compare turn by turn: a disturbance that lasts several turns cancels in each of the ratios."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
