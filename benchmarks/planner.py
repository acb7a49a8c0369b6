"""How long planning takes and how good its plans are, on the paper's five measured models and on longer ones."""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.frame import ROOT, Benchmark, Option, Report, table
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.planner import make_plan

COSTS = ROOT / "docs" / "costs"
NUM_DEVICES, NUM_MICRO_BATCHES = 8, 16


def measure(options: argparse.Namespace) -> Report:
    """Plan each model with both update rules."""
    return {
        "plans": [
            measured(name, costs, update, options.repeats)
            for name, costs in models()
            if any(part in name for part in options.models)
            for update in ("sync", "async")
        ]
    }


def models() -> Iterator[tuple[str, Costs]]:
    """Yield the published layer times, 96 layers that all differ as measured ones do, and 1000 equal layers."""
    for path in sorted(COSTS.glob("rtx4090_*.json")):
        yield path.stem.removeprefix("rtx4090_"), Costs.from_json(path.read_text(encoding="utf-8"))
    uneven = [1 + 0.02 * ((7 * layer) % 11 - 5) for layer in range(95)]
    yield "96 uneven layers", _blocks([(0.043 * part, 0.058 * part) for part in uneven])
    yield "1000 layers", _blocks([(0.043, 0.058)] * 999)


def _blocks(seconds: Sequence[tuple[float, float]]) -> Costs:
    blocks = [LayerCost(f"block.{index}", *pair) for index, pair in enumerate(seconds)]
    return Costs((*blocks, LayerCost("head", 0.042, 0.043)), hop_s=0.0032)


def measured(name: str, costs: Costs, update: str, repeats: int) -> dict[str, Any]:
    """Plan several times, and report the plan with the time of the fastest planning."""
    times_s = []
    for _ in range(repeats):
        # Processor time: planning is one thread that waits for nothing, so the time of other programs is left out.
        start_s = time.thread_time()
        plan = make_plan(costs, NUM_DEVICES, NUM_MICRO_BATCHES, update, rounds=1)
        times_s.append(time.thread_time() - start_s)
    return {
        "model": name,
        "update": update,
        "layers": costs.num_layers,
        "planning_ms": 1e3 * min(times_s),
        "step_s": plan.step_s,
        "bubble": plan.bubble,
        "stages": plan.partition.num_stages,
        "fused_layers": plan.partition.fused,
    }


def table_of(figures: Report) -> str:
    """Format the plans as a table."""
    rows = [
        [
            *(row["model"], row["update"], row["layers"], f"{row['planning_ms']:.1f}"),
            *(f"{row['step_s']:.4f}", f"{row['bubble']:.2%}", row["stages"], row["fused_layers"]),
        ]
        for row in figures["plans"]
    ]
    head = ["model", "update", "layers", "planning ms", "step s", "bubble", "stages", "fused"]
    return f"{NUM_DEVICES} devices, {NUM_MICRO_BATCHES} micro-batches\n{table(head, rows)}"


def headline(figures: Report) -> tuple[str, str]:
    """Name the longest planning of a published model."""
    published = [row for row in figures["plans"] if not row["model"].endswith("layers")] or figures["plans"]
    longest = max(published, key=lambda row: row["planning_ms"])
    return (
        f"planning takes at most {longest['planning_ms']:.0f} ms ({longest['model']}, {longest['update']})",
        f"its plan has a bubble of {longest['bubble']:.2%}",
    )


PLANNER = Benchmark(
    """How long planning takes and how good its plans are, on the paper's five measured models and on longer ones.

The paper's partitioner takes 2.9, 2.9, 2.6, 5.0 and 1470 ms on the five (RoundPipe section 5.6.1). Each time is the
least processor time of several runs.""",
    {
        "--repeats": Option(5, "runs of which the fastest counts"),
        "--models": Option([""], "only models whose name contains one of these"),
    },
    measure,
    headline,
    "--repeats 1 --models 1_7b",
    show=table_of,
)
