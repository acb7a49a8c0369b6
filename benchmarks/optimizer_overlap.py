"""What the optimizer adds to a sync step: layers of known time, and an optimizer slowed down to a known time.

    python benchmarks/optimizer_overlap.py --check

The layers of benchmarks/schedule.py. The update of each layer sleeps its share of `--optimizer` times the time
that the devices spend on a step's forward (micro-batches x layers / devices); everything else is the engine as it
is. Each is planned with the update's times, as a run plans once it has measured them. Beside each figure what the
simulation says, for that plan and for the plan that knows of no optimizer. The runs take turns, of which the median
counts. `--check` ends with 1 where an optimizer that is no slower than one micro-batch's forward adds more than 2 %.
Prints JSON.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.schedule import measure, simulated_step_s, with_updates
from benchmarks.timed_layers import BLOCK_BYTES, Sleeper, sleep_costs
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.plan import Plan
from torchround.pipeline.planner import make_plan

MOST_ADDED_PERCENT = 2.0


@contextmanager
def slow_optimizer(costs: Costs) -> Iterator[None]:
    """Within the block, each layer's update takes its `optimizer_s` longer."""
    original, sleeper = OptimizerWorker._update_bundle, Sleeper()

    def slow(worker: OptimizerWorker, bundle: Any, *arguments: Any) -> None:
        sleeper.sleep(costs.layers[bundle.layers[0]].optimizer_s)
        original(worker, bundle, *arguments)

    OptimizerWorker._update_bundle = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        OptimizerWorker._update_bundle = original  # type: ignore[method-assign]


def cases(options: argparse.Namespace) -> dict[float, tuple[Costs, Plan]]:
    """Costs with each optimizer time and the plan made for them; 0 is no optimizer."""
    free = sleep_costs(options.blocks, options.scale)
    passes = options.microbatches / options.devices
    limits = MemoryLimits(device_bytes=int(options.stage_blocks * BLOCK_BYTES))
    found = {}
    for share in (0.0, *options.optimizer):
        costs = with_updates(free, [share * layer.forward_s * passes for layer in free.layers])
        found[share] = costs, make_plan(costs, options.devices, options.microbatches, "sync", limits=limits)
    return found


def report_of(
    share: float, all_cases: dict[float, tuple[Costs, Plan]], step_s: dict[float, list[float]]
) -> dict[str, Any]:
    """One optimizer time: measured and simulated, over the step without an optimizer."""
    (free, without), (costs, plan) = all_cases[0.0], all_cases[share]

    def percent(seconds: float, base_s: float) -> float:
        return 100 * (seconds / base_s - 1)

    optimizer_s = sum(layer.optimizer_s for layer in costs.layers)
    return {
        "optimizer_s": optimizer_s,
        "optimizer_over_forward_of_a_micro_batch": optimizer_s
        / sum(layer.forward_s for layer in free.layers),
        "partition": [plan.partition.forward, plan.partition.fused, plan.partition.backward],
        "step_s": statistics.median(step_s[share]),
        "added_percent": percent(statistics.median(step_s[share]), statistics.median(step_s[0.0])),
        "simulated_added_percent": percent(plan.step_s, without.step_s),
        "simulated_added_percent_of_the_plan_without": percent(
            simulated_step_s(costs, without), without.step_s
        ),
    }


def main() -> int:
    """Measure a step with each optimizer time, in turns, and print how much longer it is than with none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="virtual devices")
    parser.add_argument("--microbatches", type=int, default=16, help="micro-batches per step")
    parser.add_argument("--blocks", type=int, default=32, help="blocks before the head")
    parser.add_argument("--stage-blocks", type=float, default=3, help="blocks that fit on a device")
    parser.add_argument("--scale", type=float, default=2.0, help="factor on every layer's time")
    parser.add_argument("--steps", type=int, default=8, help="measured steps; a multiple of the devices")
    parser.add_argument("--turns", type=int, default=3, help="runs of each, of which the median counts")
    parser.add_argument(
        "--optimizer",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75],
        help="optimizer times, in forwards",
    )
    parser.add_argument("--check", action="store_true", help="end with 1 where the bound is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    all_cases = cases(options)
    step_s: dict[float, list[float]] = {share: [] for share in all_cases}
    for _ in range(options.turns):
        for share, (costs, plan) in all_cases.items():
            with slow_optimizer(costs):
                step_s[share].append(measure(costs, plan, options.steps).step_s)
    with_optimizer = [report_of(share, all_cases, step_s) for share in options.optimizer]
    missed = [
        case
        for case in with_optimizer
        if case["optimizer_over_forward_of_a_micro_batch"] <= 1 + 1e-9
        and case["added_percent"] > MOST_ADDED_PERCENT
    ]
    free, without = all_cases[0.0]
    report = {
        "devices": options.devices,
        "microbatches": options.microbatches,
        "scale": options.scale,
        "load_average": os.getloadavg()[0],
        "partition": [without.partition.forward, without.partition.fused, without.partition.backward],
        "simulated_step_s": without.step_s,
        "step_s": statistics.median(step_s[0.0]),
        "forward_of_a_micro_batch_s": sum(layer.forward_s for layer in free.layers),
        "with_optimizer": with_optimizer,
    }
    print(json.dumps(report, indent=2))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
