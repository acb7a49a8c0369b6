"""The frame that every benchmark runs in: options, turns between rivals, and one report that names its machine.

A benchmark is a constant of type `Benchmark`. It imports no torch itself, so that planning is measured without.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).parents[1]
GIB = 2**30
Report = dict[str, Any]
T = TypeVar("T")


def as_json(figures: Report) -> str:
    """Show the figures as they are."""
    return json.dumps(figures, indent=2)


@dataclass(frozen=True)
class Benchmark:
    """One measurement that a command prints.

    `purpose` says how it measures, and is the command's help. `headline` turns the figures into two cells of the
    results table: our figure, and the rival's or the bound. `tiny` holds options that make a run take seconds; its
    test uses them. `missed_bounds` lists each bound that `--check` asks for and the figures miss. `show` is what the
    command prints. With `takes_overrides`, options that the parser does not know become `options.overrides`.
    """

    purpose: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace], Report]
    headline: Callable[[Report], tuple[str, str]]
    tiny: str
    missed_bounds: Callable[[Report], list[str]] | None = None
    show: Callable[[Report], str] = as_json
    takes_overrides: bool = False

    def parse(self, name: str, arguments: Sequence[str]) -> argparse.Namespace:
        """Read the command line; a wrong option ends the process with exit code 2."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {name}",
            description=self.purpose,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_options(parser)
        parser.add_argument("--json", type=Path, help="also write the report to this file")
        if self.missed_bounds is not None:
            parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
        if not self.takes_overrides:
            return parser.parse_args(arguments)
        options, options.overrides = parser.parse_known_args(arguments)
        return options

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
    """Return the median of the ratios turn by turn: a disturbance that lasts several turns cancels in each of them."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


# Memory of this process.


def resident_bytes() -> int:
    """Read the resident set of this process."""
    return _status_bytes("VmRSS:")


def peak_bytes() -> int:
    """Read the largest resident set since the process began or `reset_peak` was called."""
    return _status_bytes("VmHWM:")


def reset_peak() -> None:
    """Let the peak begin again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a module's function in a process of its own, whose memory holds nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()
