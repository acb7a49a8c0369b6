"""Layers that take a known time, and the real engine run over them: what schedules are measured with.

A block takes 4 ms forward and 8 ms backward, recomputation not counted; the head takes 2.3 times as long.
"""

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.results import StepResult
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import POLICIES
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.plan import Plan
from torchround.simulate.dispatch import dispatch_tasks
from torchround.simulate.events import steady_state

BLOCK_FORWARD_S, BLOCK_BACKWARD_S = 0.004, 0.008
HEAD_BLOCKS = 2.3
BLOCK_BYTES = 2**20  # what a block keeps for its backward; sets how many blocks fit into a stage
WARM_UP_STEPS = 2


class Sleeper:
    """A clock that sleeps exactly on average: each sleep makes up for what earlier ones took too long.

    All layers of a worker share one; the engine gives each worker its own copy of the layers. `speeds` maps the name
    of a slow thread to its speed; every other thread has speed 1.
    """

    def __init__(self, speeds: Mapping[str, float] | None = None) -> None:
        self._too_long_s = 0.0
        self._speeds = speeds or {}

    def sleep(self, seconds: float) -> None:
        """Return `seconds` later at full speed, less the time by which earlier calls were late."""
        if self._speeds:
            seconds /= self._speeds.get(threading.current_thread().name, 1.0)
        start = time.perf_counter()
        time.sleep(max(seconds - self._too_long_s, 0.0))
        self._too_long_s += time.perf_counter() - start - seconds


class SleepFunction(torch.autograd.Function):
    """Identity whose forward takes `forward_s` and whose backward takes `backward_s`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, sleeper: Sleeper, forward_s: float, backward_s: float
    ) -> Tensor:
        ctx.sleeper, ctx.backward_s = sleeper, backward_s
        sleeper.sleep(forward_s)
        return hidden + weight  # the weight takes part, so that there is a gradient to download

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # type: ignore[override]
        ctx.sleeper.sleep(ctx.backward_s)
        return gradient.contiguous(), gradient.sum((0, 1)), None, None, None


class SleepLayer(nn.Module):
    """A layer whose time is known. The last layer returns a loss.

    `unused_parameters` is the size of a weight that no computation uses, but that is updated and saved.
    """

    def __init__(
        self,
        sleeper: Sleeper,
        seconds: tuple[float, float],
        is_last: bool,
        unused_parameters: int = 0,
    ) -> None:
        super().__init__()
        self.sleeper = sleeper
        self.weight = nn.Parameter(torch.empty(8, device="meta"))
        if unused_parameters:
            self.ballast = nn.Parameter(torch.empty(unused_parameters, device="meta"))
        self.seconds = seconds  # forward, backward
        self.is_last = is_last

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Sleep, and pass on the hidden states, (B, T, 8), or their sum as the loss."""
        if hidden is None:
            hidden = torch.zeros(*micro_batch.tokens.shape, 8)
        hidden = SleepFunction.apply(hidden, self.weight, self.sleeper, *self.seconds)
        return hidden.sum() if self.is_last else hidden

    def init_weights(self, generator: torch.Generator) -> None:
        """Set any value: only time is measured."""
        self.weight.zero_()


def sleep_model(
    seconds: Sequence[tuple[float, float]], sleeper: Sleeper | None = None, unused_parameters: int = 0
) -> LayeredModel:
    """Build a model of layers with these forward and backward seconds, the last one the loss."""
    sleeper = sleeper or Sleeper()
    last = len(seconds) - 1
    return LayeredModel(
        tuple(f"layer.{index}" for index in range(len(seconds))),
        tuple(
            SleepLayer(sleeper, pair, index == last, unused_parameters) for index, pair in enumerate(seconds)
        ),
    )


def empty_micro_batches(count: int) -> list[MicroBatch]:
    """Return micro-batches of one sequence of two tokens."""
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    return [MicroBatch(zeros, zeros, zeros, zeros)] * count


def sleep_costs(num_blocks: int, scale: float) -> Costs:
    """Return the blocks and the head as the planner's costs, all times multiplied by `scale`."""
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


def with_updates(costs: Costs, update_s: Sequence[float]) -> Costs:
    """Return the same layers with these seconds of the optimizer for each."""
    layers = (replace(c, optimizer_s=s) for c, s in zip(costs.layers, update_s, strict=True))
    return Costs(tuple(layers), costs.hop_s)


@dataclass(frozen=True)
class Measured:
    """Mean step time in the steady state, device time by the devices' own clocks, and each layer's update time."""

    step_s: float
    busy_s: float
    update_s: tuple[float, ...]


def measure_plan(costs: Costs, plan: Plan, steps: int, speeds: Sequence[float] = ()) -> Measured:
    """Run the real engine under `plan` on virtual devices of these speeds, all 1 if none are given.

    The schedule repeats only after as many steps as there are devices, because each step starts on another device.
    So single steps differ, and `steps` should be a multiple of the devices. The warm-up steps and the last step,
    which no other step follows, are left out.
    """
    sleeper = Sleeper({f"torchround cpu:{index}": speed for index, speed in enumerate(speeds) if speed != 1})
    model = sleep_model([(layer.forward_s, layer.backward_s) for layer in costs.layers], sleeper)
    store = HostStore(model, policy=POLICIES[plan.update])
    store.initialize(model, seed=0)
    micro_batches = empty_micro_batches(plan.num_micro_batches)
    devices = [CpuDevice(index) for index in range(plan.num_devices)]
    clip: Literal["global", "layer"] = "layer" if plan.update == "bounded" else "global"
    settings = EngineSettings(rounds=plan.rounds, clip=clip, stale_layers=plan.stale_layers)
    results: list[StepResult] = []
    seconds = []  # the moments at which steps ended
    with Engine(model, store, devices, plan.partition, optimizer=AdamWTable(), settings=settings) as engine:
        for _ in range(WARM_UP_STEPS + steps + 1):
            results.append(engine.forward_backward(micro_batches))
            engine.step(lr=1e-3)
            # Collect a step only after the next one was handed out, so that neighbouring steps can overlap.
            if len(results) > 1:
                seconds.append(_finish(results[-2]))
        seconds.append(_finish(results[-1]))
        busy_s = sum(report.busy_s for report in results[-2].reports())
    return Measured(
        step_s=(seconds[-2] - seconds[WARM_UP_STEPS - 1]) / steps,
        busy_s=busy_s,
        update_s=_update_seconds(results[WARM_UP_STEPS:], len(costs.layers)),
    )


def _finish(result: StepResult) -> float:
    result.collect()
    return time.perf_counter()


def _update_seconds(results: Sequence[StepResult], num_layers: int) -> tuple[float, ...]:
    """Return the median seconds of each layer's update."""
    seconds: list[list[float]] = [[] for _ in range(num_layers)]
    for result in results:
        for update in result.update().bundles:
            seconds[update.layer].append(update.end_s - update.start_s)
    return tuple(statistics.median(layer) if layer else 0.0 for layer in seconds)


def simulated_step_s(costs: Costs, plan: Plan, speeds: Sequence[float] = ()) -> float:
    """Simulate the plan's schedule, updates included, on devices of these speeds; return seconds per step."""

    speed = dict(enumerate(speeds))

    def tasks(steps: int) -> list[Any]:
        run = plan.partition, costs, plan.num_devices, plan.num_micro_batches, plan.rounds
        made = dispatch_tasks(*run, update=plan.update, stale_layers=plan.stale_layers, steps=steps)
        return [replace(task, duration_s=task.duration_s / speed.get(task.device, 1.0)) for task in made]

    return steady_state(tasks, plan.num_devices)[1]
