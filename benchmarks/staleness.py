"""What stale weights cost: `sync`, `bounded`, `async` and predicted weights on real text, each at its own best rate."""

import argparse
import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.frame import Benchmark, Report
from benchmarks.installed_text import documentation_of
from benchmarks.staleness_cells import FIRST_RATES, StudySize, run_cell, wanted_cells
from benchmarks.staleness_report import draw, final_losses, step_seconds, tables
from benchmarks.study import ResultFile, add_study_options, complete, read_description, with_tables


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the study; the default sizes are the ones of the committed results."""
    size = StudySize()
    add_study_options(parser, "staleness", size.blocks, size.seeds, size.most_rates)
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
        complete(file, partial(wanted_cells, size), partial(run_cell, size, Path(folder)), options.workers)
    return report(size, file, options.picture, options.page)


def read_results(path: Path) -> tuple[StudySize, ResultFile]:
    """Read the results of any study, complete or not, made with any text."""
    description = read_description(path)
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
