"""How long planning takes and how good its plans are, on the paper's five measured models and on longer ones."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.frame import GIB, ROOT, Benchmark, Report
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.memory import MemoryLimits
from torchround.planning.plan import Plan
from torchround.planning.planner import make_plan

COSTS = ROOT / "docs" / "costs"
NUM_DEVICES, NUM_MICRO_BATCHES = 8, 16


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the limits and the repetitions."""
    parser.add_argument("--rounds", default="1", help='rounds per step, or "auto"')
    parser.add_argument("--device-memory-gib", type=float, help="limit per device (default: none)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the fastest counts")
    parser.add_argument("--models", nargs="+", help="only models whose name contains one of these")


def measure(options: argparse.Namespace) -> Report:
    """Plan each model with both update rules."""
    limit = options.device_memory_gib
    limits = MemoryLimits(device_bytes=None if limit is None else int(limit * GIB))
    rounds = options.rounds if options.rounds == "auto" else int(options.rounds)
    return {
        "plans": [
            measured(name, costs, update, rounds, limits, options.repeats)
            for name, costs in models()
            if options.models is None or any(part in name for part in options.models)
            for update in ("sync", "async")
        ]
    }


def models() -> Iterator[tuple[str, Costs]]:
    """Yield the published layer times, 96 layers that all differ as measured ones do, and 1000 equal layers."""
    for path in sorted(COSTS.glob("rtx4090_*.json")):
        yield path.stem.removeprefix("rtx4090_"), Costs.from_json(path.read_text(encoding="utf-8"))
    uneven = [1 + 0.02 * ((7 * layer) % 11 - 5) for layer in range(95)]
    yield "96 uneven layers", _blocks([(0.043 * part, 0.058 * part) for part in uneven], 0.042, 0.043)
    yield "1000 layers", _blocks([(0.043, 0.058)] * 999, 0.042, 0.043)


def _blocks(seconds: Sequence[tuple[float, float]], head_forward_s: float, head_backward_s: float) -> Costs:
    blocks = [
        LayerCost(f"block.{index}", forward_s, backward_s)
        for index, (forward_s, backward_s) in enumerate(seconds)
    ]
    return Costs((*blocks, LayerCost("head", head_forward_s, head_backward_s)), hop_s=0.0032)


def measured(
    name: str, costs: Costs, update: str, rounds: int | str, limits: MemoryLimits, repeats: int
) -> dict[str, Any]:
    """Plan several times, and report the plan with the time of the fastest planning."""
    fastest_s, plan = min(
        (_timed(costs, update, rounds, limits) for _ in range(repeats)), key=lambda run: run[0]
    )
    return {
        "model": name,
        "layers": costs.num_layers,
        "update": update,
        "planning_ms": 1e3 * fastest_s,
        "step_s": plan.step_s,
        "bubble": plan.bubble,
        "rounds": plan.rounds,
        "stages": plan.partition.num_stages,
        "fused_layers": plan.partition.fused,
    }


def _timed(costs: Costs, update: str, rounds: int | str, limits: MemoryLimits) -> tuple[float, Plan]:
    # Processor time: planning is one thread that waits for nothing, so the time of other programs is left out.
    start_s = time.thread_time()
    plan = make_plan(costs, NUM_DEVICES, NUM_MICRO_BATCHES, update, rounds, limits)
    return time.thread_time() - start_s, plan


def table_of(figures: Report) -> str:
    """Format the plans as a table."""
    table = Table(title=f"{NUM_DEVICES} devices, {NUM_MICRO_BATCHES} micro-batches", box=SIMPLE_HEAD)
    for column in ("model", "update"):
        table.add_column(column)
    for column in (
        "layers",
        "planning ms",
        "step s",
        "bubble %",
        "rounds",
        "stages",
        "fused",
    ):
        table.add_column(column, justify="right")
    for row in figures["plans"]:
        table.add_row(
            row["model"],
            row["update"],
            f"{row['layers']}",
            f"{row['planning_ms']:.1f}",
            f"{row['step_s']:.4f}",
            f"{100 * row['bubble']:.2f}",
            f"{row['rounds']}",
            f"{row['stages']}",
            f"{row['fused_layers']}",
        )
    text = StringIO()
    Console(file=text, width=None if sys.stdout.isatty() else 120).print(table)
    return text.getvalue().rstrip()


def headline(figures: Report) -> tuple[str, str]:
    """Name the longest planning of a published model."""
    published = [row for row in figures["plans"] if not row["model"].endswith("layers")] or figures["plans"]
    longest = max(published, key=lambda row: row["planning_ms"])
    return (
        f"planning takes at most {longest['planning_ms']:.0f} ms ({longest['model']}, {longest['update']})",
        f"its plan has a bubble of {100 * longest['bubble']:.2f} %",
    )


PLANNER = Benchmark(
    """How long planning takes and how good its plans are, on the paper's five measured models and on longer ones.

The paper's partitioner takes 2.9, 2.9, 2.6, 5.0 and 1470 ms on the five (RoundPipe section 5.6.1). Each time is the
least processor time of several runs.""",
    add_options,
    measure,
    headline,
    "--repeats 1 --models 1_7b",
    show=table_of,
)
