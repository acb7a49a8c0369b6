"""What all studies of training share: runs as lines of a file that continues, tuned learning rates, and tables.

A cell is one training run. Its result is one line of JSON and a function of the cell and the text alone, so a study
that was interrupted continues where it was.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.frame import ROOT, Report

TUNING_SEED = 0


@dataclass(frozen=True)
class Cell:
    """One training run: a mode on a task, with a peak learning rate and a seed."""

    task: str
    mode: str
    lr: float
    seed: int


@dataclass(frozen=True)
class CellResult:
    """What a run leaves: held-out losses after `evaluated` steps. A run that diverged has a null among them."""

    cell: Cell
    evaluated: tuple[int, ...]
    losses: tuple[float | None, ...]

    @property
    def final_loss(self) -> float:
        """The held-out loss at the end, infinite if the run diverged."""
        last = self.losses[-1]
        return math.inf if last is None else last

    def to_json(self) -> str:
        """Return the result as one line."""
        return json.dumps({**asdict(self.cell), "evaluated": self.evaluated, "losses": self.losses})

    @classmethod
    def from_json(cls, line: str) -> "CellResult":
        """Read a line that `to_json` wrote."""
        content = json.loads(line)
        cell = Cell(*(content[key] for key in ("task", "mode", "lr", "seed")))
        return cls(cell, tuple(content["evaluated"]), tuple(content["losses"]))


Results = Mapping[Cell, CellResult]


def add_study_options(
    parser: argparse.ArgumentParser, name: str, blocks: int, seeds: Sequence[int], most_rates: int
) -> None:
    """Add the options that all studies have. Results are kept in `outputs/<name>.jsonl`."""
    parser.add_argument(
        "--results", type=Path, default=ROOT / "outputs" / f"{name}.jsonl", help="file to continue"
    )
    parser.add_argument("--only-report", action="store_true", help="run nothing: show what the file holds")
    parser.add_argument("--forget", action="store_true", help="keep no results, for a trial")
    parser.add_argument(
        "--workers", type=int, default=2, help="runs at a time, each of one thread; 0: this process"
    )
    parser.add_argument("--picture", type=Path, help="draw the losses into this PNG")
    parser.add_argument("--page", type=Path, help="put the tables between their markers in this page")
    parser.add_argument("--blocks", type=int, default=blocks, help="blocks of the model")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="seeds of the final runs")
    parser.add_argument(
        "--most-rates", type=int, default=most_rates, help="most learning rates tried for a mode"
    )


# The file of results.


class AnotherStudyError(ValueError):
    """A file of results that belongs to another study: other sizes, another text or another PyTorch."""


class ResultFile:
    """Results as lines of JSON: the first line describes the study, each other one is a cell."""

    def __init__(self, path: Path, description: Report) -> None:
        """Continue the file if there is one. Raises `AnotherStudyError` if it describes another study."""
        self.path, self.description = path, description
        self.results: dict[Cell, CellResult] = {}
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(description) + "\n", encoding="utf-8")
        first, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if json.loads(first) != json.loads(json.dumps(description)):
            raise AnotherStudyError(f"{path} holds another study; give --results another name, or remove it")
        # A line without its end is of a run that was killed while it wrote; the cell is run again.
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):
            path.write_text("".join([first, *whole]), encoding="utf-8")
        for line in whole:
            result = CellResult.from_json(line)
            self.results[result.cell] = result

    def add(self, result: CellResult) -> None:
        """Append one cell."""
        self.results[result.cell] = result
        with self.path.open("a", encoding="utf-8") as file:
            file.write(result.to_json() + "\n")


def read_description(path: Path) -> Report:
    """Read what a file of results says of its study."""
    description: Report = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    return description


def complete(
    file: ResultFile,
    wanted: Callable[[Results], list[Cell]],
    run: Callable[[Cell, Results], CellResult],
    workers: int,
) -> None:
    """Run every missing cell, `workers` at a time, each with one thread; 0 runs them in this process.

    `wanted` lists the cells that can be run now and are not among the results. `run` must be picklable.
    """
    if workers == 0:
        while missing := wanted(file.results):
            file.add(run(missing[0], file.results))
        return
    running: dict[Future[CellResult], Cell] = {}
    with ProcessPoolExecutor(workers, get_context("spawn"), use_one_thread) as pool:
        while True:
            free = [cell for cell in wanted(file.results) if cell not in running.values()]
            for cell in free[: workers - len(running)]:
                # A copy: it is pickled later, by another thread.
                running[pool.submit(run, cell, dict(file.results))] = cell
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                file.add(done.result())
                del running[done]
                print(f"{len(file.results)} cells: {file.path}", flush=True)


def use_one_thread() -> None:
    """Compute with one thread: the bits of products depend on their number."""
    torch.set_num_threads(1)


# Learning rates.


def tuning_cells(
    task: str, mode: str, first_rates: Sequence[float], most_rates: int, results: Results
) -> list[Cell]:
    """Return the cells of a mode's tuning as far as they are known: the first rates, then beyond the better end."""
    rates = sorted(first_rates)
    while len(rates) < most_rates:
        cells = [Cell(task, mode, lr, TUNING_SEED) for lr in rates]
        if any(cell not in results for cell in cells):
            break
        losses = [results[cell].final_loss for cell in cells]
        best = losses.index(min(losses))
        if 0 < best < len(rates) - 1:
            break
        rates = [rates[0] / 2, *rates] if best == 0 else [*rates, rates[-1] * 2]
    return [Cell(task, mode, lr, TUNING_SEED) for lr in rates]


def best_rate(cells: Sequence[Cell], results: Results) -> float | None:
    """Return the rate of the cell with the lowest loss, or None while one of them has not run."""
    if any(cell not in results for cell in cells):
        return None
    return min(cells, key=lambda cell: results[cell].final_loss).lr


# What the results say.


def losses_by_seed(results: Results, cells: Iterable[Cell]) -> dict[int, float]:
    """Return the held-out loss at the end of each cell that has run, by its seed."""
    return {cell.seed: results[cell].final_loss for cell in cells if cell in results}


def mean_curve(results: Results, cells: Iterable[Cell]) -> tuple[list[int], list[float]]:
    """Return steps and the mean loss over the cells that ran to the end."""
    curves = [results[cell] for cell in cells if cell in results and None not in results[cell].losses]
    if not curves:
        return [], []
    means = [statistics.mean(losses) for losses in zip(*(curve.losses for curve in curves), strict=True)]  # type: ignore[arg-type]
    return list(curves[0].evaluated), means


def losses_table(
    title: str,
    rates: Mapping[str, float | None],
    found: Mapping[str, Mapping[int, float]],
    rival: str,
) -> str:
    """Make the table of final losses: the tuned rate, mean and range over seeds, and the distance to the rival."""
    rows = []
    for mode, losses in found.items():
        if not losses:
            continue
        apart = [losses[seed] - found[rival][seed] for seed in losses if seed in found[rival]]
        rows.append(
            [
                mode,
                f"{rates[mode]:g}",
                f"{statistics.mean(losses.values()):.4f}",
                f"{min(losses.values()):.4f} to {max(losses.values()):.4f}",
                f"{statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})" if apart else "",
            ]
        )
    return markdown([title, "tuned rate", "mean loss", "over seeds", f"above `{rival}`, same seed"], rows)


def rates_table(task: str, modes: Iterable[str], results: Results) -> str:
    """Make the table of tuning: the final loss of the tuning seed for each mode and rate."""
    tried = sorted({cell.lr for cell in results if cell.task == task and cell.seed == TUNING_SEED})
    rows = []
    for mode in modes:
        cells = [Cell(task, mode, lr, TUNING_SEED) for lr in tried]
        shown = [f"{results[cell].final_loss:.4f}" if cell in results else "" for cell in cells]
        rows.append([mode, *shown])
    return markdown([f"{task}, rate", *(f"{lr:g}" for lr in tried)], rows)


def with_tables(page: str, named: Mapping[str, str]) -> str:
    """Return the page with each table between its markers, `<!-- table NAME -->` and `<!-- end -->`."""
    for name, table in named.items():
        before, marker, rest = page.partition(f"<!-- table {name} -->\n")
        assert marker, f"the page has no place for the table {name}"
        page = f"{before}{marker}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table, its first column to the left."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
