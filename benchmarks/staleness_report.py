"""What the results of the study of staleness say: tables of final losses, and pictures of loss over tokens and time."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.staleness_cells import FIRST_RATES, TUNING_SEED, Cell, Results, StudySize, tuned_rate
from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import GIB, MemoryLimits
from torchround.pipeline.planner import make_plan

COSTS = Path(__file__).parents[1] / "docs" / "costs" / "rtx4090_llama3_8b.json"
DEVICES, MICRO_BATCHES, DEVICE_GIB = 8, 16, 24


def final_losses(size: StudySize, results: Results, task: str, mode: str) -> dict[int, float]:
    """Return the held-out loss at the end by seed, at the mode's tuned rate; only the seeds that have run."""
    rate = tuned_rate(size, results, task, mode)
    if rate is None:
        return {}
    cells = [Cell(task, mode, rate, seed) for seed in size.seeds]
    return {cell.seed: results[cell].final_loss for cell in cells if cell in results}


def tables(size: StudySize, results: Results) -> dict[str, str]:
    """Return the tables of the page by name: final losses and tuning of each task, and what time makes of them."""
    losses = {task: losses_table(size, results, task) for task in FIRST_RATES}
    tuning = {f"{task}-rates": rates_table(size, results, task) for task in FIRST_RATES}
    return {**losses, **tuning}


def losses_table(size: StudySize, results: Results, task: str) -> str:
    """Make the table of final losses: the tuned rate, mean and range over seeds, and the distance to `sync`."""
    rows = []
    sync = final_losses(size, results, task, "sync")
    for mode in size.rules():
        found = final_losses(size, results, task, mode)
        if not found:
            continue
        apart = [found[seed] - sync[seed] for seed in found if seed in sync]
        rows.append(
            [
                mode,
                f"{tuned_rate(size, results, task, mode):g}",
                f"{statistics.mean(found.values()):.4f}",
                f"{min(found.values()):.4f} to {max(found.values()):.4f}",
                f"{statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})" if apart else "",
            ]
        )
    return markdown([task, "tuned rate", "mean loss", "over seeds", "above `sync`, same seed"], rows)


def rates_table(size: StudySize, results: Results, task: str) -> str:
    """Make the table of tuning: the final loss of the tuning seed for each mode and rate."""
    tried = sorted({cell.lr for cell in results if cell.task == task and cell.seed == TUNING_SEED})
    rows = []
    for mode in size.rules():
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


# Time on 8 GPUs.


def step_seconds(size: StudySize) -> dict[str, float]:
    """Return the planner's seconds per step for each mode: Llama-3.1-8B on 8 cards of 24 GiB, 16 micro-batches.

    The plan of `bounded` has the fewest stale layers that cost no time, except for K = 0. The study's larger K is not
    faster.
    """
    costs = Costs.from_json(COSTS.read_text(encoding="utf-8"))
    limits = MemoryLimits(device_bytes=DEVICE_GIB * GIB)
    seconds: dict[tuple[str, int | None], float] = {}
    questions = {}
    for mode, rule in size.rules().items():
        stale_layers = 0 if rule.update == "bounded" and rule.stale_layers == 0 else None
        question = questions[mode] = (rule.update, stale_layers)
        if question not in seconds:
            plan = make_plan(costs, DEVICES, MICRO_BATCHES, rule.update, 1, limits, stale_layers=stale_layers)
            seconds[question] = plan.step_s
    return {mode: seconds[question] for mode, question in questions.items()}


def draw(size: StudySize, results: Results, picture: Path) -> None:
    """Draw the mean held-out loss of each mode into a PNG: a row for each task, over tokens and over simulated time."""
    from matplotlib.figure import Figure

    seconds = step_seconds(size)
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(len(FIRST_RATES), 2, squeeze=False)
    for row, task in zip(grid, FIRST_RATES, strict=True):
        for axes, label in zip(row, ("bytes", "simulated hours on 8 GPUs"), strict=True):
            for colour, mode in enumerate(size.rules()):
                steps, losses = _mean_curve(size, results, task, mode)
                scale = size.sequences * size.tokens if label == "bytes" else seconds[mode] / 3600
                axes.plot([step * scale for step in steps], losses, f"C{colour}.-", label=mode)
            axes.set_xlabel(label)
            axes.set_ylabel("held-out loss (nats per byte)")
            axes.set_title(task, fontsize="medium")
            axes.grid(alpha=0.3)
    grid[0][0].legend()
    figure.savefig(picture, dpi=110, format="png")


def _mean_curve(size: StudySize, results: Results, task: str, mode: str) -> tuple[list[int], list[float]]:
    """Return steps and the mean loss over the seeds that ran to the end at the tuned rate."""
    rate = tuned_rate(size, results, task, mode)
    cells = [Cell(task, mode, rate or 0.0, seed) for seed in size.seeds]
    curves = [results[cell] for cell in cells if cell in results and None not in results[cell].losses]
    if not curves:
        return [], []
    means = [statistics.mean(losses) for losses in zip(*(curve.losses for curve in curves), strict=True)]  # type: ignore[arg-type]
    return list(curves[0].evaluated), means
