"""What the optimizer adds to a step: layers of known time, and an optimizer slowed down to a known time."""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.frame import Benchmark, Report, in_turns
from benchmarks.schedule import add_pipeline_options
from benchmarks.timed_layers import (
    BLOCK_BYTES,
    Sleeper,
    measure_plan,
    simulated_step_s,
    sleep_costs,
    with_updates,
)
from torchround.engine.update import Updater
from torchround.planning.costs import Costs
from torchround.planning.memory import MemoryLimits
from torchround.planning.plan import Plan
from torchround.planning.planner import make_plan

MOST_ADDED_PERCENT = 2.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the shape of the pipeline and the optimizer's times."""
    add_pipeline_options(parser)
    parser.add_argument("--update", choices=("sync", "async"), default="sync", help="age of the weights")
    parser.add_argument("--scale", type=float, default=2.0, help="factor on every layer's time")
    parser.add_argument("--turns", type=int, default=3, help="runs of each, of which the median counts")
    parser.add_argument(
        "--optimizer",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75],
        help="optimizer times, as shares of the devices' forward of a step",
    )


def measure(options: argparse.Namespace) -> Report:
    """Measure a step with each optimizer time, in turns, and how much longer it is than with none."""
    torch.set_num_threads(1)
    all_cases = cases(options)

    def one_run(share: float, is_blocking: bool) -> float:
        costs, plan = all_cases[share]
        with slow_optimizer(costs):
            return measure_plan(costs, plan, options.steps, is_blocking=is_blocking).step_s

    pairs = [(0.0, False), *product(options.optimizer, (False, True))]
    runs = in_turns(
        {f"{pair}": lambda pair=pair: one_run(*pair) for pair in pairs},  # type: ignore[misc]
        options.turns,
    )
    step_s = {pair: statistics.median(runs[f"{pair}"]) for pair in pairs}
    free, without = all_cases[0.0]
    return {
        "devices": options.devices,
        "microbatches": options.microbatches,
        "scale": options.scale,
        "partition": [without.partition.forward, without.partition.fused, without.partition.backward],
        "simulated_step_s": without.step_s,
        "step_s": step_s[0.0, False],
        "forward_of_a_micro_batch_s": sum(layer.forward_s for layer in free.layers),
        "with_optimizer": [report_of(share, all_cases, step_s) for share in options.optimizer],
    }


def cases(options: argparse.Namespace) -> dict[float, tuple[Costs, Plan]]:
    """Return the costs with each optimizer time and the plan made for them; 0 is no optimizer."""
    free = sleep_costs(options.blocks, options.scale)
    passes = options.microbatches / options.devices
    limits = MemoryLimits(device_bytes=int(options.stage_blocks * BLOCK_BYTES))
    found = {}
    for share in (0.0, *options.optimizer):
        costs = with_updates(free, [share * layer.forward_s * passes for layer in free.layers])
        found[share] = (
            costs,
            make_plan(costs, options.devices, options.microbatches, options.update, limits=limits),
        )
    return found


@contextmanager
def slow_optimizer(costs: Costs) -> Iterator[None]:
    """Make each layer's update take its `optimizer_s` longer, within the block."""
    original, sleeper = Updater._update_bundle, Sleeper()

    def slow(updater: Updater, bundle: Any, *arguments: Any) -> None:
        sleeper.sleep(costs.layers[bundle.layers[0]].optimizer_s)
        original(updater, bundle, *arguments)

    with patch.object(Updater, "_update_bundle", slow):
        yield


def report_of(
    share: float, all_cases: dict[float, tuple[Costs, Plan]], step_s: dict[tuple[float, bool], float]
) -> dict[str, Any]:
    """Report one optimizer time: measured and simulated, over the step without an optimizer.

    `blocking`: all devices wait for the whole update, so that they drain before it and fill after it.
    """
    (free, without), (costs, plan) = all_cases[0.0], all_cases[share]

    def percent(seconds: float, base_s: float) -> float:
        return 100 * (seconds / base_s - 1)

    optimizer_s = sum(layer.optimizer_s for layer in costs.layers)
    return {
        "optimizer_s": optimizer_s,
        "optimizer_over_forward_of_a_micro_batch": optimizer_s
        / sum(layer.forward_s for layer in free.layers),
        "partition": [plan.partition.forward, plan.partition.fused, plan.partition.backward],
        "step_s": step_s[share, False],
        "added_percent": percent(step_s[share, False], step_s[0.0, False]),
        "blocking_added_percent": percent(step_s[share, True], step_s[0.0, False]),
        "simulated_blocking_added_percent": percent(
            simulated_step_s(free, replace(plan, update="sync")) + optimizer_s, without.step_s
        ),
        "simulated_added_percent": percent(plan.step_s, without.step_s),
        "simulated_added_percent_of_the_plan_without": percent(
            simulated_step_s(costs, without), without.step_s
        ),
    }


def missed_bounds(figures: Report) -> list[str]:
    """List each optimizer that is no slower than one micro-batch's forward and adds too much."""
    return [
        f"an optimizer of {case['optimizer_s']:.3f} s adds {case['added_percent']:.1f} %"
        for case in figures["with_optimizer"]
        if case["optimizer_over_forward_of_a_micro_batch"] <= 1 + 1e-9  # sums of seconds are rounded
        and case["added_percent"] > MOST_ADDED_PERCENT
    ]


def headline(figures: Report) -> tuple[str, str]:
    """Name what each optimizer time adds."""
    cases = figures["with_optimizer"]
    added = ", ".join(f"{case['added_percent']:.1f}" for case in cases)
    simulated = ", ".join(f"{case['simulated_added_percent']:.1f}" for case in cases)
    lengths = ", ".join(f"{case['optimizer_over_forward_of_a_micro_batch']:g}" for case in cases)
    blocking = ", ".join(f"{case['blocking_added_percent']:.1f}" for case in cases)
    return (
        f"optimizer of {lengths} forwards of a micro-batch adds {added} % (simulated {simulated})",
        f"with a barrier {blocking} %; no optimizer: {figures['step_s']:.3f} s per step",
    )


OVERLAP = Benchmark(
    """What the optimizer adds to a step: layers of known time, and an optimizer slowed down to a known time.

The update of each layer sleeps its part of --optimizer times the time that the devices spend on a step's forward
(micro-batches x layers / devices); everything else is the engine as it is. Each case is planned with the update's
times, as a run plans once it has measured them. The simulation is given for that plan and for the plan that knows of
no optimizer. Beside each there is a step at whose end all devices wait for the whole update. --check asks that an optimizer no slower than one micro-batch's forward adds at most 2 %.""",
    add_options,
    measure,
    headline,
    "--devices 2 --microbatches 4 --blocks 6 --steps 2 --turns 1 --optimizer 0.5 --scale 0.5",
    missed_bounds,
)
