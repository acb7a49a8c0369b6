"""How close the engine comes to its own simulation, beside what other pipelines make of the same layers."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.frame import Benchmark, Report
from benchmarks.rival_pipelines import rival_bubbles
from benchmarks.timed_layers import BLOCK_BYTES, measure_plan, simulated_step_s, sleep_costs, with_updates
from torchround.engine.store.bundles import POLICIES
from torchround.planning.costs import Costs
from torchround.planning.memory import MemoryLimits
from torchround.planning.partition import StageKind
from torchround.planning.plan import Plan
from torchround.planning.planner import make_plan

# The bounds hold where layers take at least `CHECKED_SCALE` times their time: shorter layers drown in the engine's own
# work on a machine that has fewer cores than the benchmark has devices.
CHECKED_SCALE = 5.0
MOST_ASYNC_BUBBLE = 0.02
MOST_SYNC_DIFFERENCE_POINTS = 1.5
RIVALS = "torch.distributed.pipelining"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the shape of the pipeline and what to compare."""
    add_pipeline_options(parser)
    parser.add_argument("--scales", type=float, nargs="+", default=[5.0, 1.0], help="factors on layer times")
    parser.add_argument("--updates", nargs="+", choices=sorted(POLICIES), default=["async", "sync"])
    parser.add_argument("--rivals", type=int, default=2, help="measured steps of each rival; 0: none")
    parser.add_argument("--slow-device", type=float, help="speed of device 0; the others have 1")


def add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    """Add the shape of a pipeline of timed layers."""
    parser.add_argument("--devices", type=int, default=8, help="virtual devices")
    parser.add_argument("--microbatches", type=int, default=16, help="micro-batches per step")
    parser.add_argument(
        "--blocks", type=int, default=32, help="blocks before the head; rivals need a multiple of 4 x devices"
    )
    parser.add_argument(
        "--stage-blocks", type=float, default=3, help="blocks whose activations fit on a device (head: 2.3)"
    )
    parser.add_argument("--steps", type=int, default=8, help="measured steps; a multiple of the devices")


def measure(options: argparse.Namespace) -> Report:
    """Plan, simulate and run at each scale, with the rivals beside."""
    torch.set_num_threads(1)
    speeds = [options.slow_device] + [1.0] * (options.devices - 1) if options.slow_device else []
    by_scale: dict[str, Any] = {}
    for scale in options.scales:
        figures = {update: compare(options, scale, update, speeds) for update in options.updates}
        if options.rivals:
            figures[RIVALS] = rival_bubbles(
                options.devices, options.microbatches, options.blocks, scale, options.rivals
            )
        by_scale[f"{scale:g}"] = figures
    return {
        "devices": options.devices,
        "microbatches": options.microbatches,
        "speeds": speeds or "equal",
        "scales": by_scale,
    }


def compare(
    options: argparse.Namespace, scale: float, update: str, speeds: Sequence[float]
) -> dict[str, Any]:
    """Plan for equal devices, run on devices of the given speeds, and simulate what was run."""
    costs = sleep_costs(options.blocks, scale)
    limits = MemoryLimits(device_bytes=int(options.stage_blocks * BLOCK_BYTES))
    plan = make_plan(costs, options.devices, options.microbatches, update, limits=limits)
    measured = measure_plan(costs, plan, options.steps, speeds)
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


def work_seconds(costs: Costs, plan: Plan) -> float:
    """Add up the layer time of one step at full speed, recomputation included."""
    per_micro_batch = sum(
        layer.forward_s + (0.0 if stage.kind is StageKind.FORWARD else layer.backward_s)
        for stage in plan.partition.stages()
        for layer in costs.layers[stage.start : stage.stop]
    )
    return per_micro_batch * plan.num_micro_batches


def missed_bounds(figures: Report) -> list[str]:
    """List each bound that was missed, one line each; short layers have none."""
    missed = []
    for scale, by_update in figures["scales"].items():
        if float(scale) < CHECKED_SCALE:
            continue
        if "async" in by_update:
            bubble = by_update["async"]["measured"]["bubble"]
            if bubble > MOST_ASYNC_BUBBLE:
                missed.append(
                    f"scale {scale}: async bubble {100 * bubble:.2f} %, at most {100 * MOST_ASYNC_BUBBLE} %"
                )
        if "sync" in by_update:
            points = by_update["sync"]["difference_points"]
            if points > MOST_SYNC_DIFFERENCE_POINTS:
                missed.append(
                    f"scale {scale}: sync bubble {points:.2f} points above the simulation, at most "
                    f"{MOST_SYNC_DIFFERENCE_POINTS}"
                )
    return missed


def headline(figures: Report) -> tuple[str, str]:
    """Name the bubbles of the first scale, ours and the best rival's."""
    scale, by_update = next(iter(figures["scales"].items()))
    ours = ", ".join(
        f"{update} {100 * found['measured']['bubble']:.2f} % (simulated {100 * found['simulated']['bubble']:.2f})"
        for update, found in by_update.items()
        if update != RIVALS
    )
    rivals = by_update.get(RIVALS, {})
    best = min(rivals, key=lambda name: rivals[name]["bubble"], default="none")
    beside = f"best of {RIVALS}: {best} {100 * rivals[best]['bubble']:.1f} %" if rivals else "no rival"
    return f"bubble at scale {scale}: {ours}", beside


SCHEDULE = Benchmark(
    """How close the engine comes to its own simulation, and what other pipelines make of the same layers.

Layers sleep for a known time, all else is real: blocks of 4 ms forward and 8 ms backward (12 with recomputation) and a
head of 2.3 blocks, multiplied by each of --scales, on virtual devices that hold the activations of --stage-blocks
blocks, so that a real pipeline is planned. Bubble: 1 - work / (devices x step time), so all time that is not the
layers' own counts as idle. `simulated` includes the optimizer's measured time. Beside it the schedules of
torch.distributed.pipelining at each scale, one gloo process per device. --check asks for the bounds at 5 times the
times or more: async bubble at most 2 %, sync within 1.5 points of the simulation. Takes about 7 minutes.""",
    add_options,
    measure,
    headline,
    "--devices 2 --microbatches 4 --blocks 8 --steps 2 --rivals 1 --scales 1",
    missed_bounds,
)
