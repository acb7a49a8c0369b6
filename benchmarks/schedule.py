"""How close the engine comes to its own simulation."""

import argparse
from typing import Any

import torch

from benchmarks.frame import Benchmark, Option, Report
from benchmarks.timed_layers import BLOCK_BYTES, block_costs, measure_plan, simulated_step_s, with_updates
from torchround.planning.costs import Costs
from torchround.planning.memory import MemoryLimits
from torchround.planning.partition import StageKind
from torchround.planning.plan import Plan
from torchround.planning.planner import make_plan
from torchround.planning.update_modes import MODES

# The bounds hold where layers take at least `CHECKED_SCALE` times their time: shorter layers drown in the engine's own
# work on a machine that has fewer cores than the benchmark has devices.
CHECKED_SCALE = 5.0
MOST_ASYNC_BUBBLE = 0.02
MOST_SYNC_DIFFERENCE_POINTS = 1.5


def measure(options: argparse.Namespace) -> Report:
    """Plan, simulate and run at each scale."""
    torch.set_num_threads(1)
    return {
        "devices": options.devices,
        "microbatches": options.microbatches,
        "scales": {
            f"{scale:g}": {update: compare(options, scale, update) for update in options.updates}
            for scale in options.scales
        },
    }


def compare(options: argparse.Namespace, scale: float, update: str) -> dict[str, Any]:
    """Run a plan, and simulate what was run with the optimizer's measured time."""
    costs = block_costs(options.blocks, scale)
    limits = MemoryLimits(device_bytes=int(options.stage_blocks * BLOCK_BYTES))
    plan = make_plan(costs, options.devices, options.microbatches, update, limits=limits)
    step_s, update_s = measure_plan(costs, plan, options.steps)
    simulated_s = simulated_step_s(with_updates(costs, update_s), plan)
    work_s = work_seconds(costs, plan)

    def bubble(seconds: float) -> float:
        return 1 - work_s / (plan.num_devices * seconds)

    return {
        "partition": [plan.partition.forward, plan.partition.fused, plan.partition.backward],
        "rounds": plan.rounds,
        "optimizer_s": sum(update_s),
        "simulated": {"step_s": simulated_s, "bubble": bubble(simulated_s)},
        "measured": {"step_s": step_s, "bubble": bubble(step_s)},
        "difference_points": 100 * (bubble(step_s) - bubble(simulated_s)),
    }


def work_seconds(costs: Costs, plan: Plan) -> float:
    """Add up the layer time of one step, recomputation included."""
    per_micro_batch = sum(
        layer.forward_s + (0.0 if stage.kind is StageKind.FORWARD else layer.backward_s)
        for stage in plan.partition.stages()
        for layer in costs.layers[stage.start : stage.stop]
    )
    return per_micro_batch * plan.num_micro_batches


def missed_bounds(figures: Report) -> list[str]:
    """List each bound that was missed; short layers have none."""
    missed = []
    for scale, found in figures["scales"].items():
        if float(scale) < CHECKED_SCALE:
            continue
        if "async" in found and (bubble := found["async"]["measured"]["bubble"]) > MOST_ASYNC_BUBBLE:
            missed.append(f"scale {scale}: async bubble {bubble:.2%}, at most {MOST_ASYNC_BUBBLE:.0%}")
        if "sync" in found and (points := found["sync"]["difference_points"]) > MOST_SYNC_DIFFERENCE_POINTS:
            above = f"{points:.2f} points above the simulation, at most {MOST_SYNC_DIFFERENCE_POINTS}"
            missed.append(f"scale {scale}: sync bubble {above}")
    return missed


def headline(figures: Report) -> tuple[str, str]:
    """Name the bubbles of the first scale, measured and simulated."""
    scale, by_update = next(iter(figures["scales"].items()))
    measured, simulated = (
        ", ".join(f"{update} {100 * found[kind]['bubble']:.2f} %" for update, found in by_update.items())
        for kind in ("measured", "simulated")
    )
    return f"bubble at scale {scale}: {measured}", f"simulated: {simulated}"


SCHEDULE = Benchmark(
    """How close the engine comes to its own simulation, on layers of known time.

Layers sleep for a known time, all else is real: blocks of 4 ms forward and 8 ms backward (12 with recomputation) and a
head of 2.3 blocks, multiplied by each of --scales, on virtual devices that hold the activations of --stage-blocks
blocks, so that a real pipeline is planned. Bubble: 1 - work / (devices x step time), so all time that is not the
layers' own counts as idle. `simulated` includes the optimizer's measured time. --check asks for the bounds at 5 times
the times or more: async bubble at most 2 %, sync within 1.5 points of the simulation.""",
    {
        "--devices": Option(8, "virtual devices"),
        "--microbatches": Option(16, "micro-batches per step"),
        "--blocks": Option(32, "blocks before the head"),
        "--stage-blocks": Option(3.0, "blocks whose activations fit on a device (head: 2.3)"),
        "--steps": Option(8, "measured steps; a multiple of the devices"),
        "--scales": Option([5.0, 1.0], "factors on layer times"),
        "--updates": Option(["async", "sync"], "age of the weights", sorted(MODES)),
    },
    measure,
    headline,
    "--devices 2 --microbatches 4 --blocks 8 --steps 2 --scales 1",
    missed_bounds,
)
