"""What the results of the study of staleness say: tables of final losses, and pictures of loss over tokens and time."""

from pathlib import Path

from benchmarks.staleness_cells import FIRST_RATES, StudySize, tuned_rate
from benchmarks.study import Cell, Results, losses_by_seed, losses_table, mean_curve, rates_table
from torchround.planning.costs import Costs
from torchround.planning.memory import GIB, MemoryLimits
from torchround.planning.planner import make_plan

COSTS = Path(__file__).parents[1] / "docs" / "costs" / "rtx4090_llama3_1_8b.json"
DEVICES, MICRO_BATCHES, DEVICE_GIB = 8, 16, 24


def final_losses(size: StudySize, results: Results, task: str, mode: str) -> dict[int, float]:
    """Return the held-out loss at the end by seed, at the mode's tuned rate; only the seeds that have run."""
    return losses_by_seed(results, _tuned_cells(size, results, task, mode))


def _tuned_cells(size: StudySize, results: Results, task: str, mode: str) -> list[Cell]:
    """Return the final runs of a mode; none while it is not tuned."""
    rate = tuned_rate(size, results, task, mode)
    return [] if rate is None else [Cell(task, mode, rate, seed) for seed in size.seeds]


def tables(size: StudySize, results: Results) -> dict[str, str]:
    """Return the tables of the page by name: final losses and tuning of each task."""
    losses, tuning = {}, {}
    for task in FIRST_RATES:
        rates = {mode: tuned_rate(size, results, task, mode) for mode in size.rules()}
        found = {mode: final_losses(size, results, task, mode) for mode in size.rules()}
        losses[task] = losses_table(task, rates, found, "sync")
        tuning[f"{task}-rates"] = rates_table(task, size.rules(), results)
    return {**losses, **tuning}


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
                steps, losses = mean_curve(results, _tuned_cells(size, results, task, mode))
                scale = size.sequences * size.tokens if label == "bytes" else seconds[mode] / 3600
                axes.plot([step * scale for step in steps], losses, f"C{colour}.-", label=mode)
            axes.set_xlabel(label)
            axes.set_ylabel("held-out loss (nats per byte)")
            axes.set_title(task, fontsize="medium")
            axes.grid(alpha=0.3)
    grid[0][0].legend()
    figure.savefig(picture, dpi=110, format="png")
