"""What stale weights cost: `sync`, `bounded`, `async` and predicted weights on real text, each at its own best rate."""

import argparse
import json
import statistics
import tempfile
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.frame import ROOT, Benchmark, Report
from benchmarks.installed_text import documentation_of
from benchmarks.staleness_cells import (
    FIRST_RATES,
    PRETRAINING,
    Cell,
    CellResult,
    StudySize,
    run_cell,
    tuned_rate,
    wanted_cells,
)
from benchmarks.staleness_report import draw, final_losses, step_seconds, tables, with_tables


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


def describe(size: StudySize) -> Report:
    """Return what decides every bit of the results: sizes, texts, and the versions of what computes."""
    texts = {task: documentation_of(size.package(task)) for task in FIRST_RATES}
    return {
        "size": asdict(size),
        "rules": {name: asdict(rule) for name, rule in size.rules().items()},
        "texts": {
            task: {"package": text.package, "version": text.version, "sha256": text.digest}
            for task, text in texts.items()
        },
        "torch": torch.__version__,
    }


def complete(size: StudySize, file: ResultFile, workers: int, folder: Path) -> None:
    """Run every missing cell, `workers` at a time, each with one thread; 0 runs them in this process."""
    if workers == 0:
        while wanted := wanted_cells(size, file.results):
            file.add(run_cell(size, wanted[0], folder, tuned_rate(size, file.results, PRETRAINING, "sync")))
        return
    running: dict[Future[CellResult], Cell] = {}
    with ProcessPoolExecutor(workers, get_context("spawn"), use_one_thread) as pool:
        while True:
            base_lr = tuned_rate(size, file.results, PRETRAINING, "sync")
            free = [cell for cell in wanted_cells(size, file.results) if cell not in running.values()]
            for cell in free[: workers - len(running)]:
                running[pool.submit(run_cell, size, cell, folder, base_lr)] = cell
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                file.add(done.result())
                del running[done]
                print(f"{len(file.results)} cells: {file.path}", flush=True)


def use_one_thread() -> None:
    """Compute with one thread: the bits of products depend on their number."""
    torch.set_num_threads(1)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the study; the default sizes are the ones of the committed results."""
    size = StudySize()
    parser.add_argument(
        "--results", type=Path, default=ROOT / "outputs" / "staleness.jsonl", help="file to continue"
    )
    parser.add_argument("--only-report", action="store_true", help="run nothing: show what the file holds")
    parser.add_argument("--forget", action="store_true", help="keep no results, for a trial")
    parser.add_argument(
        "--workers", type=int, default=2, help="runs at a time, each of one thread; 0: this process"
    )
    parser.add_argument("--picture", type=Path, help="draw the losses into this PNG")
    parser.add_argument("--page", type=Path, help="put the tables between their markers in this page")
    parser.add_argument("--blocks", type=int, default=size.blocks, help="blocks of the model")
    parser.add_argument(
        "--pretraining-package", default=size.pretraining_package, help="its text is learnt first"
    )
    parser.add_argument(
        "--fine-tuning-package", default=size.fine_tuning_package, help="its text is learnt second"
    )
    parser.add_argument(
        "--pretraining-steps", type=int, default=size.pretraining_steps, help="steps of a run"
    )
    parser.add_argument(
        "--fine-tuning-steps", type=int, default=size.fine_tuning_steps, help="steps of a run"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(size.seeds), help="seeds of the final runs"
    )
    parser.add_argument(
        "--most-rates", type=int, default=size.most_rates, help="most learning rates tried for a mode"
    )


def study(options: argparse.Namespace) -> Report:
    """Run what is missing of the study and return its tables."""
    if options.only_report:
        return report(*read_results(options.results), options.picture, options.page)
    size = StudySize(
        pretraining_package=options.pretraining_package,
        fine_tuning_package=options.fine_tuning_package,
        blocks=options.blocks,
        pretraining_steps=options.pretraining_steps,
        fine_tuning_steps=options.fine_tuning_steps,
        seeds=tuple(options.seeds),
        most_rates=options.most_rates,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "staleness.jsonl" if options.forget else options.results
        file = ResultFile(path, describe(size))
        complete(size, file, options.workers, Path(folder))
    return report(size, file, options.picture, options.page)


def read_results(path: Path) -> tuple[StudySize, ResultFile]:
    """Read the results of any study, complete or not, made with any text."""
    description = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    fields = {**description["size"], "seeds": tuple(description["size"]["seeds"])}
    return StudySize(**fields), ResultFile(path, description)


def report(size: StudySize, file: ResultFile, picture: Path | None, page: Path | None) -> Report:
    """Return the figures of a study; draw them, and write their tables, if there is a place for either."""
    shown = tables(size, file.results)
    if picture is not None:
        draw(size, file.results, picture)
    if page is not None:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), shown), encoding="utf-8")
    losses = {
        task: {mode: final_losses(size, file.results, task, mode) for mode in size.rules()}
        for task in FIRST_RATES
    }
    return {
        **file.description,
        "final_losses": losses,
        "simulated_step_s": step_seconds(size),
        "tables": shown,
    }


def headline(figures: Report) -> tuple[str, str]:
    """Return the losses of `async` in both tasks, and those of `sync`."""
    cells = [
        ", ".join(
            f"{statistics.mean(losses[mode].values()):.3f}" for losses in figures["final_losses"].values()
        )
        for mode in ("async", "sync")
    ]
    return f"held-out loss with `async`: {cells[0]} nats per byte", f"`sync`: {cells[1]}"


STALENESS = Benchmark(
    """What stale weights cost: sync, bounded, async and predicted weights, each at its own learning rate.

A small model learns documentation of installed packages, byte by byte: from scratch, and fine-tuned from a model that
`sync` has trained. Rates are tuned with one seed; three others give the result. Takes about ten minutes on two idle cores. An
interrupted study continues; results depend on nothing but the text and PyTorch.""",
    add_options,
    study,
    headline,
    "--forget --workers 0 --blocks 1 --pretraining-package jinja2 --fine-tuning-package torchdata "
    "--pretraining-steps 2 --fine-tuning-steps 2 --seeds 1 --most-rates 3",
    show=lambda figures: "\n\n".join(figures["tables"].values()),
)
