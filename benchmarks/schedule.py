"""How close the engine comes to its own simulation, and what other pipelines make of the same layers in the same run.

    python benchmarks/schedule.py --check

Layers that sleep for a known time, all else is real: blocks of 4 ms forward and 8 ms backward (12 with recompute)
and a head of 2.3 blocks, times each of `--scales`, on virtual devices that hold the activations of `--stage-blocks`
blocks, so that a real pipeline is planned. Bubble: 1 - work / (N x step time), so whatever is not the layers' own
time counts as idle. `simulated` includes the optimizer's measured time. Beside it `torch.distributed.pipelining` at
each scale (bench_rival_pipelines.py). `--check` ends with 1 where a bound is missed at 5 times the times or more:
async bubble at most 2 %, sync within 1.5 points of the simulation. Takes about 7 minutes. Prints JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.rival_pipelines import bubbles
from benchmarks.timed_layers import BLOCK_BYTES, Sleeper, SleepLayer, sleep_costs
from torchround.config import OptimizerTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine, EngineSettings
from torchround.engine.results import StepResult
from torchround.engine.store.bundles import POLICIES
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch
from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.partition import StageKind
from torchround.pipeline.plan import Plan
from torchround.pipeline.planner import make_plan
from torchround.pipeline.simulation.dispatch import dispatch_tasks
from torchround.pipeline.simulation.simulator import at_speeds, steady_state

WARMUP_STEPS = 2
# What `--check` asks for, where layers take at least `CHECKED_SCALE` times their time.
CHECKED_SCALE = 5.0
MOST_ASYNC_BUBBLE = 0.02
MOST_SYNC_DIFFERENCE_POINTS = 1.5


@dataclass(frozen=True)
class Measured:
    """Mean step time in the steady state, device time by the devices' own clocks, and each layer's update."""

    step_s: float
    busy_s: float
    update_s: tuple[float, ...]


def measure(costs: Costs, plan: Plan, steps: int, speeds: Sequence[float] = ()) -> Measured:
    """The real engine under `plan`; `speeds` of its devices, all 1 if not given.

    The steps repeat only after as many as there are devices, each starting on another one, so a single step
    says little. The first steps and the last one, which nothing follows, are left out.
    """
    last = len(costs.layers) - 1
    sleeper = Sleeper({f"torchround cpu:{index}": speed for index, speed in enumerate(speeds) if speed != 1})
    layers = tuple(
        SleepLayer(sleeper, layer.forward_s, layer.backward_s, index == last)
        for index, layer in enumerate(costs.layers)
    )
    model = LayeredModel(tuple(layer.name for layer in costs.layers), layers)
    store = HostStore(model, policy=POLICIES[plan.update])
    store.initialize(model, seed=0)
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    micro_batches = [MicroBatch(zeros, zeros, zeros, zeros)] * plan.num_micro_batches
    devices = [CpuDevice(index) for index in range(plan.num_devices)]
    settings = EngineSettings(rounds=plan.rounds)
    results: list[StepResult] = []
    seconds = []
    with Engine(
        model, store, devices, plan.partition, optimizer=OptimizerTable(), settings=settings
    ) as engine:
        for _ in range(WARMUP_STEPS + steps + 1):
            results.append(engine.forward_backward(micro_batches))
            engine.step(lr=1e-3)
            if len(results) > 1:
                seconds.append(_finish(results[-2]))
        seconds.append(_finish(results[-1]))
        busy_s = sum(report.busy_s for report in results[-2].reports())
    return Measured(
        step_s=(seconds[-2] - seconds[WARMUP_STEPS - 1]) / steps,
        busy_s=busy_s,
        update_s=_update_seconds(results[WARMUP_STEPS:], len(costs.layers)),
    )


def _finish(result: StepResult) -> float:
    result.collect()
    return time.perf_counter()


def _update_seconds(results: Sequence[StepResult], num_layers: int) -> tuple[float, ...]:
    """Median seconds of each layer's update."""
    seconds: list[list[float]] = [[] for _ in range(num_layers)]
    for result in results:
        for update in result.update().bundles:
            seconds[update.layer].append(update.end_s - update.start_s)
    return tuple(statistics.median(layer) if layer else 0.0 for layer in seconds)


def with_updates(costs: Costs, update_s: Sequence[float]) -> Costs:
    """The same layers with these seconds of the optimizer for each."""
    layers = (replace(c, optimizer_s=s) for c, s in zip(costs.layers, update_s, strict=True))
    return Costs(tuple(layers), costs.hop_s)


def simulated_step_s(costs: Costs, plan: Plan, speeds: Sequence[float] = ()) -> float:
    """Seconds per step of the plan's schedule, updates included, on devices of these speeds."""

    def tasks(steps: int) -> list[Any]:
        made = dispatch_tasks(
            plan.partition,
            costs,
            plan.num_devices,
            plan.num_micro_batches,
            plan.rounds,
            update=plan.update,
            steps=steps,
        )
        return at_speeds(made, speeds) if speeds else made

    return steady_state(tasks, plan.num_devices)[1]


def work_seconds(costs: Costs, plan: Plan) -> float:
    """Layer time of one step, recomputation included, at full speed."""
    per_micro_batch = sum(
        layer.forward_s + (0.0 if stage.kind is StageKind.FORWARD else layer.backward_s)
        for stage in plan.partition.stages()
        for layer in costs.layers[stage.start : stage.stop]
    )
    return per_micro_batch * plan.num_micro_batches


def compare(
    options: argparse.Namespace, scale: float, update: str, speeds: Sequence[float]
) -> dict[str, Any]:
    """Plan for equal devices, run on those given, simulate what was run."""
    costs = sleep_costs(options.blocks, scale)
    limits = MemoryLimits(device_bytes=int(options.stage_blocks * BLOCK_BYTES))
    plan = make_plan(costs, options.devices, options.microbatches, update, limits=limits)
    measured = measure(costs, plan, options.steps, speeds)
    simulated_s = simulated_step_s(with_updates(costs, measured.update_s), plan, speeds)
    devices_s = sum(speeds) if speeds else plan.num_devices  # in seconds of a device at full speed

    def bubble(step_s: float) -> float:
        return 1 - work_seconds(costs, plan) / (devices_s * step_s)

    return {
        "partition": [plan.partition.forward, plan.partition.fused, plan.partition.backward],
        "rounds": plan.rounds,
        "optimizer_s": sum(measured.update_s),
        "simulated_without_optimizer": {"step_s": plan.step_s, "bubble": plan.bubble},
        "simulated": {"step_s": simulated_s, "bubble": bubble(simulated_s)},
        "measured": {
            "step_s": measured.step_s,
            "bubble": bubble(measured.step_s),
            "busy_by_device_clocks": measured.busy_s / (plan.num_devices * measured.step_s),
        },
        "difference_points": 100 * (bubble(measured.step_s) - bubble(simulated_s)),
    }


def missed_bounds(by_scale: dict[str, Any]) -> list[str]:
    """What `--check` asks for and did not get, one line each."""
    missed = []
    for scale, figures in by_scale.items():
        if float(scale) < CHECKED_SCALE:
            continue
        bubble = figures["async"]["measured"]["bubble"]
        if bubble > MOST_ASYNC_BUBBLE:
            missed.append(
                f"scale {scale}: async bubble {100 * bubble:.2f} %, at most {100 * MOST_ASYNC_BUBBLE} %"
            )
        points = figures["sync"]["difference_points"]
        if points > MOST_SYNC_DIFFERENCE_POINTS:
            missed.append(
                f"scale {scale}: sync bubble {points:.2f} points above the simulation, at most "
                f"{MOST_SYNC_DIFFERENCE_POINTS}"
            )
    return missed


def main() -> int:
    """Plan, simulate, run, and print all of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="virtual devices")
    parser.add_argument("--microbatches", type=int, default=16, help="micro-batches per step")
    parser.add_argument("--blocks", type=int, default=32, help="blocks before the head")
    parser.add_argument(
        "--stage-blocks", type=float, default=3, help="blocks whose activations fit on a device (head: 2.3)"
    )
    parser.add_argument("--scales", type=float, nargs="+", default=[5.0, 1.0], help="factors on layer times")
    parser.add_argument("--steps", type=int, default=8, help="measured steps; a multiple of the devices")
    parser.add_argument("--updates", nargs="+", choices=sorted(POLICIES), default=["async", "sync"])
    parser.add_argument("--rivals", type=int, default=2, help="measured steps of each rival; 0: none")
    parser.add_argument("--slow-device", type=float, help="speed of device 0; the others have 1")
    parser.add_argument("--check", action="store_true", help="end with 1 where a bound is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speeds = [options.slow_device] + [1.0] * (options.devices - 1) if options.slow_device else []
    by_scale: dict[str, Any] = {}
    for scale in options.scales:
        figures = {update: compare(options, scale, update, speeds) for update in options.updates}
        if options.rivals:
            rivals = argparse.Namespace(**{**vars(options), "scale": scale, "steps": options.rivals})
            figures["torch.distributed.pipelining"] = bubbles(rivals)
        by_scale[f"{scale:g}"] = figures
    missed = missed_bounds(by_scale) if options.check else []
    report = {
        "devices": options.devices,
        "microbatches": options.microbatches,
        "speeds": speeds or "equal",
        "load_average": os.getloadavg()[0],
        "scales": by_scale,
        "missed": missed,
    }
    print(json.dumps(report, indent=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
