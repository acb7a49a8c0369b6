"""How close the engine comes to its own simulation: layers that sleep for a known time, all else is real.

    python scripts/bench_schedule.py --devices 8 --microbatches 16 --scale 1

Blocks of 4 ms forward and 8 ms backward (12 with recompute) and a head of 2.3 blocks, times `--scale`, on
devices that hold the activations of `--stage-blocks` blocks, so that a real pipeline is planned. The measured bubble counts everything that is not the layers' own time as idle: 1 - work / (N x step time), median
over the steps. Prints JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from torchround.config import OptimizerTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine, EngineSettings
from torchround.engine.host_store import HostStore
from torchround.engine.results import StepResult
from torchround.engine.update_policy import POLICIES
from torchround.layer import LayeredModel, MicroBatch
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.partition import StageKind
from torchround.pipeline.plan import Plan, make_plan

BLOCK_FORWARD_S, BLOCK_BACKWARD_S = 0.004, 0.008
HEAD_BLOCKS = 2.3
BLOCK_BYTES = 2**20  # what a block keeps for its backward; sets how many fit into a stage
WARMUP_STEPS = 1


class Sleeper:
    """Sleeps exactly on average: makes up for what earlier sleeps took too long.

    All layers of a worker share one; the engine gives each worker its own copy of the layers.
    """

    def __init__(self) -> None:
        self._too_long_s = 0.0

    def sleep(self, seconds: float) -> None:
        """Return `seconds` later, less what earlier calls ran over."""
        start = time.perf_counter()
        time.sleep(max(seconds - self._too_long_s, 0.0))
        self._too_long_s += time.perf_counter() - start - seconds


class SleepFunction(torch.autograd.Function):
    """Passes `hidden` on after `forward_s`, and its gradient after `backward_s`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, sleeper: Sleeper, forward_s: float, backward_s: float
    ) -> Tensor:
        ctx.sleeper, ctx.backward_s = sleeper, backward_s
        sleeper.sleep(forward_s)
        return hidden + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        ctx.sleeper.sleep(ctx.backward_s)
        return gradient, gradient.sum((0, 1)), None, None, None


class SleepLayer(nn.Module):
    """A layer whose time is known. The last one returns a loss."""

    def __init__(self, sleeper: Sleeper, forward_s: float, backward_s: float, is_last: bool) -> None:
        super().__init__()
        self.sleeper = sleeper
        self.weight = nn.Parameter(torch.empty(8, device="meta"))
        self.seconds = (forward_s, backward_s)
        self.is_last = is_last

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        if hidden is None:
            hidden = torch.zeros(*micro_batch.tokens.shape, 8)
        hidden = SleepFunction.apply(hidden, self.weight, self.sleeper, *self.seconds)
        return hidden.sum() if self.is_last else hidden

    def init_weights(self, generator: torch.Generator) -> None:
        """Any value does: time is what is measured."""
        self.weight.zero_()


def sleep_costs(num_blocks: int, scale: float) -> Costs:
    """The blocks and the head as costs."""
    sizes = [1.0] * num_blocks + [HEAD_BLOCKS]
    return Costs(
        tuple(
            LayerCost(
                f"layer.{index}",
                BLOCK_FORWARD_S * size * scale,
                BLOCK_BACKWARD_S * size * scale,
                activation_bytes=int(size * BLOCK_BYTES),
            )
            for index, size in enumerate(sizes)
        )
    )


def measure(costs: Costs, plan: Plan, steps: int) -> dict[str, float]:
    """Median step time of the real engine, and the bubble in it."""
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
    seconds, busy_s = [], 0.0
    with Engine(
        model, store, devices, plan.partition, optimizer=OptimizerTable(), settings=settings
    ) as engine:
        results = []
        for _ in range(WARMUP_STEPS + steps):
            results.append(engine.forward_backward(micro_batches))
            engine.step(lr=1e-3)
            if len(results) > 1:
                seconds.append(_finish(results[-2]))
        seconds.append(_finish(results[-1]))
        busy_s = sum(times.busy_s for times in results[-1].device_times(plan.num_devices))
    step_s = statistics.median(
        b - a for a, b in zip(seconds[WARMUP_STEPS - 1 :], seconds[WARMUP_STEPS:], strict=False)
    )
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
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every layer's time")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--update", choices=sorted(POLICIES), default="sync", help="update policy")
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
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
