"""What optimizers and formats of their state learn: AdamW and Muon, exact and compact, on real text."""

import argparse
import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.frame import Benchmark, Report
from benchmarks.installed_text import documentation_of
from benchmarks.optimizer_cells import (
    EXACT,
    MODES,
    RATES,
    TASK,
    OptimizerStudySize,
    final_cells,
    run_cell,
    tuned_rate,
    wanted_cells,
)
from benchmarks.study import (
    Cell,
    ResultFile,
    Results,
    add_study_options,
    complete,
    losses_by_seed,
    losses_table,
    markdown,
    mean_curve,
    rates_table,
    read_description,
    with_tables,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the study; the default sizes are the ones of the committed results."""
    size = OptimizerStudySize()
    add_study_options(parser, "optimizers", size.blocks, size.seeds, size.most_rates)
    parser.add_argument("--package", default=size.package, help="package whose text is learnt")
    parser.add_argument("--steps", type=int, default=size.steps, help="steps of a run")


def study(options: argparse.Namespace) -> Report:
    """Run what is missing of the study and return its tables."""
    if options.only_report:
        return report(*read_results(options.results), options.picture, options.page)
    size = OptimizerStudySize(
        package=options.package,
        blocks=options.blocks,
        steps=options.steps,
        seeds=tuple(options.seeds),
        most_rates=options.most_rates,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimizers.jsonl" if options.forget else options.results
        file = ResultFile(path, describe(size))
        complete(file, partial(wanted_cells, size), partial(run_cell, size), options.workers)
    return report(size, file, options.picture, options.page)


def describe(size: OptimizerStudySize) -> Report:
    """Return what decides every bit of the results: sizes, settings, the text, and the version of PyTorch."""
    text = documentation_of(size.package)
    return {
        "size": asdict(size),
        "optimizers": {mode: table.model_dump(mode="json") for mode, table in MODES.items()},
        "text": {"package": text.package, "version": text.version, "sha256": text.digest},
        "torch": torch.__version__,
    }


def read_results(path: Path) -> tuple[OptimizerStudySize, ResultFile]:
    """Read the results of any study, complete or not, made with any text."""
    description = read_description(path)
    fields = {**description["size"], "seeds": tuple(description["size"]["seeds"])}
    return OptimizerStudySize(**fields), ResultFile(path, description)


# What the results say.


def report(size: OptimizerStudySize, file: ResultFile, picture: Path | None, page: Path | None) -> Report:
    """Return the figures of a study; draw them, and write their tables, if there is a place for either."""
    shown = tables(size, file.results)
    if picture is not None:
        draw(size, file.results, picture)
    if page is not None:
        page.write_text(with_tables(page.read_text(encoding="utf-8"), shown), encoding="utf-8")
    return {**file.description, "final_losses": final_losses(size, file.results), "tables": shown}


def final_losses(size: OptimizerStudySize, results: Results) -> dict[str, dict[int, float]]:
    """Return the held-out loss at the end by mode and seed."""
    return {mode: losses_by_seed(results, final_cells(size, results, mode)) for mode in MODES}


def tables(size: OptimizerStudySize, results: Results) -> dict[str, str]:
    """Return the tables of the page by name: final losses, tuning, and steps until AdamW's final loss."""
    rates = {mode: tuned_rate(size, results, mode) for mode in MODES}
    return {
        "optimizers": losses_table(TASK, rates, final_losses(size, results), EXACT),
        "optimizers-rates": rates_table(TASK, RATES, results),
        "optimizers-steps": steps_table(size, results),
    }


def steps_table(size: OptimizerStudySize, results: Results) -> str:
    """Make the table of the first evaluation at which a mode is at AdamW's final loss of the same seed, or below."""
    goal = final_losses(size, results)[EXACT]
    rows = []
    for mode, table in MODES.items():
        if table.name == MODES[EXACT].name:
            continue
        found = [
            steps_to_reach(results, cell, goal[cell.seed])
            for cell in final_cells(size, results, mode)
            if cell in results and cell.seed in goal
        ]
        rows.append([mode, *("never" if steps is None else str(steps) for steps in found)])
    return markdown(["steps until AdamW's final loss", *(f"seed {seed}" for seed in goal)], rows)


def steps_to_reach(results: Results, cell: Cell, loss: float) -> int | None:
    """Return the first evaluated step at which a run's held-out loss is `loss` or lower, None if there is none."""
    result = results[cell]
    reached = (
        step
        for step, held_out in zip(result.evaluated, result.losses, strict=True)
        if held_out is not None and held_out <= loss
    )
    return next(reached, None)


def draw(size: OptimizerStudySize, results: Results, picture: Path) -> None:
    """Draw the held-out loss of each mode over steps into a PNG: all of them, and the second half.

    Thin lines are seeds, thick ones their mean.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, first in zip(figure.subplots(1, 2), (0, size.steps // 2), strict=True):
        for colour, mode in enumerate(MODES):
            cells = final_cells(size, results, mode)
            # Dashed, because curves of compact state cover the ones of exact state.
            line = f"C{colour}--" if MODES[mode].state == "compact" else f"C{colour}-"
            for cell in cells:
                axes.plot(*_after(first, *mean_curve(results, [cell])), line, linewidth=0.5, alpha=0.5)
            axes.plot(*_after(first, *mean_curve(results, cells)), line, label=mode)
        axes.set_xlabel("steps")
        axes.set_ylabel("held-out loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend(title="thick: mean of the seeds, thin: one seed each")
    figure.savefig(picture, dpi=110, format="png")


def _after(first: int, steps: list[int], losses: list[float]) -> tuple[list[int], list[float]]:
    """Return the part of a curve after step `first`."""
    begin = sum(step <= first for step in steps)
    return steps[begin:], losses[begin:]


def headline(figures: Report) -> tuple[str, str]:
    """Return the losses of all modes, and AdamW's with exact state."""
    means = {
        mode: statistics.mean(losses.values()) for mode, losses in figures["final_losses"].items() if losses
    }
    others = ", ".join(f"`{mode}` {loss:.3f}" for mode, loss in means.items() if mode != EXACT)
    return f"held-out loss: {others} nats per byte", f"`{EXACT}`: {means[EXACT]:.3f}"


OPTIMIZER_STUDY = Benchmark(
    """What optimizers learn: AdamW and Muon, with exact and compact state, each optimizer at its own learning rate.

A Llama of 1.1 M parameters learns documentation of an installed package, byte by byte, through the engine in bfloat16.
Rates are tuned with one seed; three others give the result. Takes about half an hour on two idle cores. An interrupted
study continues; results depend on nothing but the text and PyTorch.""",
    add_options,
    study,
    headline,
    "--forget --workers 0 --blocks 1 --package jinja2 --steps 2 --seeds 1 --most-rates 4",
    show=lambda figures: "\n\n".join(figures["tables"].values()),
)
