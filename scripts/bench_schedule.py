"""How close the engine comes to its own simulation: layers that sleep for a known time, all else is real.

    python scripts/bench_schedule.py --devices 8 --microbatches 16 --scale 5

Blocks of 4 ms forward and 8 ms backward (12 with recompute) and a head of 2.3 blocks, times `--scale`, on
devices that hold the activations of `--stage-blocks` blocks, so that a real pipeline is planned. The measured
bubble counts everything that is not the layers' own time as idle: 1 - work / (N x step time). Prints JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from scripts.bench_rival_pipelines import bubbles
from scripts.timed_layers import BLOCK_BYTES, Sleeper, SleepLayer, sleep_costs
from torchround.config import OptimizerTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine, EngineSettings
from torchround.engine.host_store import HostStore
from torchround.engine.results import StepResult
from torchround.engine.update_policy import POLICIES
from torchround.layer import LayeredModel, MicroBatch
from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.partition import StageKind
from torchround.pipeline.plan import Plan, make_plan

WARMUP_STEPS = 2


def measure(costs: Costs, plan: Plan, steps: int) -> dict[str, float]:
    """Mean step time of the real engine in the steady state, and the bubble in it.

    The steps repeat only after as many as there are devices, each starting on another one, so a single step
    says little. The first steps and the last one, which nothing follows, are left out.
    """
    last, sleeper = len(costs.layers) - 1, Sleeper()
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
    seconds = []
    with Engine(
        model, store, devices, plan.partition, optimizer=OptimizerTable(), settings=settings
    ) as engine:
        results = []
        for _ in range(WARMUP_STEPS + steps + 1):
            results.append(engine.forward_backward(micro_batches))
            engine.step(lr=1e-3)
            if len(results) > 1:
                seconds.append(_finish(results[-2]))
        seconds.append(_finish(results[-1]))
        busy_s = sum(times.busy_s for times in results[-2].device_times(plan.num_devices))
    step_s = (seconds[-2] - seconds[WARMUP_STEPS - 1]) / steps
    devices_s = plan.num_devices * step_s
    return {
        "step_s": step_s,
        "bubble": 1 - work_seconds(costs, plan) / devices_s,
        "bubble_by_device_clocks": 1 - busy_s / devices_s,
    }


def _finish(result: StepResult) -> float:
    result.collect()
    return time.perf_counter()


def work_seconds(costs: Costs, plan: Plan) -> float:
    """Layer time of one step, recomputation included."""
    per_micro_batch = sum(
        layer.forward_s + (0.0 if stage.kind is StageKind.FORWARD else layer.backward_s)
        for stage in plan.partition.stages()
        for layer in costs.layers[stage.start : stage.stop]
    )
    return per_micro_batch * plan.num_micro_batches


def main() -> None:
    """Plan, simulate, run, and print all three."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8, help="virtual devices")
    parser.add_argument("--microbatches", type=int, default=16, help="micro-batches per step")
    parser.add_argument("--blocks", type=int, default=32, help="blocks before the head")
    parser.add_argument(
        "--stage-blocks", type=float, default=3, help="blocks whose activations fit on a device (head: 2.3)"
    )
    parser.add_argument("--scale", type=float, default=5.0, help="factor on every layer's time")
    parser.add_argument("--steps", type=int, default=8, help="measured steps; a multiple of the devices")
    parser.add_argument("--update", choices=sorted(POLICIES), default="sync", help="update policy")
    parser.add_argument(
        "--rivals", action="store_true", help="torch.distributed.pipelining on the same layers too"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = sleep_costs(options.blocks, options.scale)
    limits = MemoryLimits(device_bytes=int(options.stage_blocks * BLOCK_BYTES))
    plan = make_plan(costs, options.devices, options.microbatches, options.update, limits=limits)
    measured = measure(costs, plan, options.steps)
    report = {
        "devices": options.devices,
        "microbatches": options.microbatches,
        "update": options.update,
        "scale": options.scale,
        "partition": {
            "forward": plan.partition.forward,
            "fused": plan.partition.fused,
            "backward": plan.partition.backward,
        },
        "rounds": plan.rounds,
        "simulated": {"step_s": plan.step_s, "bubble": plan.bubble},
        "measured": measured,
        "difference_points": 100 * (measured["bubble"] - plan.bubble),
    }
    if options.rivals:
        report["torch.distributed.pipelining"] = bubbles(options)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
