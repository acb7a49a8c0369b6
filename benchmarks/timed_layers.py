"""Layers that take a known time, and the real engine run over them: what schedules are measured with.

A block takes 4 ms forward and 8 ms backward, recomputation not counted; the head takes 2.3 times as long.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchround.accelerators import PLANNED_KIND
from torchround.config import AdamWTable
from torchround.engine.board import Observer
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.passes import StepResult
from torchround.engine.settings import EngineSettings
from torchround.engine.store.host_store import HostStore
from torchround.keeping import keep
from torchround.layer import KeptWork, LayeredModel, LayerWork, MicroBatch
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.plan import Plan
from torchround.planning.update_modes import MODES
from torchround.simulate.dispatch import dispatch_tasks
from torchround.simulate.events import steady_state

BLOCK_FORWARD_S, BLOCK_BACKWARD_S = 0.004, 0.008
HEAD_BLOCKS = 2.3
BLOCK_BYTES = 2**20  # what a block keeps for its backward; sets how many blocks fit into a stage
WARM_UP_STEPS = 2
FP32_BYTES = 4


class Clock(Protocol):
    """The time that layers take."""

    def sleep(self, seconds: float) -> None:
        """Let the calling device's computation take so much longer."""


class Sleeper:
    """A clock that sleeps exactly on average: each sleep makes up for what earlier ones took too long.

    All layers of a worker share one; the engine gives each worker its own copy of the layers.
    """

    def __init__(self) -> None:
        self._too_long_s = 0.0

    def sleep(self, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(max(seconds - self._too_long_s, 0.0))
        self._too_long_s += time.perf_counter() - start - seconds


class SleepFunction(torch.autograd.Function):
    """Identity whose forward takes `forward_s` and whose backward takes `backward_s`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, clock: Clock, forward_s: float, backward_s: float
    ) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.sleep(forward_s)
        return hidden + weight  # the weight takes part, so that there is a gradient to download

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        ctx.clock.sleep(ctx.backward_s)
        return gradient.contiguous(), gradient.sum((0, 1)), None, None, None


class ProductsTakeTime(TorchDispatchMode):
    """Let each product that really runs take `seconds` of the device's time."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            self._clock.sleep(self._seconds)
        return func(*args, **kwargs or {})


class TimedLayer(nn.Module):
    """A layer of known time whose parts keep results of known size. The last layer returns a loss.

    A part's time passes when its product runs: a replay that takes the result from the host takes none.
    `unused_parameters` is the size of a weight that no computation uses, but that is updated and saved.
    """

    def __init__(self, clock: Clock, cost: LayerCost, is_last: bool, unused_parameters: int = 0) -> None:
        super().__init__()
        self.clock, self.cost, self.is_last = clock, cost, is_last
        self.rest_s = cost.forward_s - sum(part.seconds for part in cost.keepable)
        self.weight = nn.Parameter(torch.empty(8, device="meta"))
        if unused_parameters:
            self.ballast = nn.Parameter(torch.empty(unused_parameters, device="meta"))

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Take the time, and pass on the hidden states, (B, T, 8), or their sum as the loss."""
        if hidden is None:
            hidden = torch.zeros(*micro_batch.tokens.shape, 8)
        for part in self.cost.keepable:
            with ProductsTakeTime(self.clock, part.seconds):
                shapes = (1, 1), (1, part.nbytes // FP32_BYTES)
                result = keep(part.name, torch.mm, *(hidden.new_zeros(shape) for shape in shapes))
            hidden = hidden + result[0, 0]
        hidden = SleepFunction.apply(hidden, self.weight, self.clock, self.rest_s, self.cost.backward_s)
        return hidden.sum() if self.is_last else hidden

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count what the layer keeps, so that the engine reserves host buffers for it."""
        kept = tuple(KeptWork(part.name, part.nbytes, 0.0) for part in self.cost.keepable)
        return LayerWork(boundary_bytes=batch * tokens * 8 * FP32_BYTES, keepable=kept)

    def init_weights(self, generator: torch.Generator) -> None:
        """Set any value: only time is measured."""
        self.weight.zero_()


def timed_model(
    costs: Costs, clock: Clock | None = None, unused_parameters: Sequence[int] = ()
) -> LayeredModel:
    """Build a model of layers with these costs, the last one the loss. Without a clock they sleep."""
    clock, last = clock or Sleeper(), costs.num_layers - 1
    sizes = unused_parameters or [0] * costs.num_layers
    layers = [
        TimedLayer(clock, cost, index == last, size)
        for index, (cost, size) in enumerate(zip(costs.layers, sizes, strict=True))
    ]
    return LayeredModel(tuple(cost.name for cost in costs.layers), tuple(layers))


def empty_micro_batches(count: int) -> list[MicroBatch]:
    """Make micro-batches of one sequence of two tokens."""
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    return [MicroBatch(zeros, zeros, zeros, zeros)] * count


def block_costs(num_blocks: int, scale: float = 1.0) -> Costs:
    """Make equal blocks and a head, as the planner's costs. All times are multiplied by `scale`."""
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
    """Give the same layers these seconds of the optimizer for each."""
    layers = (replace(c, optimizer_s=s) for c, s in zip(costs.layers, update_s, strict=True))
    return Costs(tuple(layers), costs.hop_s)


def measure_plan(costs: Costs, plan: Plan, steps: int) -> tuple[float, tuple[float, ...]]:
    """Run the real engine under `plan` on virtual devices and sleeping layers; `steps` as in `run_plan`.

    Returns the mean seconds of a step in the steady state, and the median seconds of each layer's update.
    """
    devices = [CpuDevice(index) for index in range(plan.num_devices)]
    settings = EngineSettings(
        rounds=plan.rounds,
        clip="layer" if plan.update == "bounded" else "global",
        stale_layers=plan.stale_layers,
    )
    step_s, results = run_plan(timed_model(costs), plan, devices, settings, steps)
    seconds: list[list[float]] = [[] for _ in costs.layers]
    for result in results[WARM_UP_STEPS:]:
        for update in result.update().bundles:
            seconds[update.layers.start].append(update.seconds)
    return step_s, tuple(statistics.median(layer) if layer else 0.0 for layer in seconds)


def run_plan(
    model: LayeredModel,
    plan: Plan,
    devices: Sequence[CpuDevice],
    settings: EngineSettings,
    steps: int,
    now: Callable[[], float] = time.perf_counter,
    observer: Observer | None = None,
) -> tuple[float, list[StepResult]]:
    """Run the real engine under `plan`; return the mean seconds of a step by `now`, and all results.

    The schedule repeats only after as many steps as there are devices, because each step starts on another device.
    So single steps differ, and `steps` should be a multiple of the devices. The warm-up steps and the last step,
    which no other step follows, are left out.
    """
    store = HostStore(model, mode=MODES[plan.update])
    store.initialize(model, seed=0)
    micro_batches = empty_micro_batches(plan.num_micro_batches)
    parts = model, store, devices, plan.partition
    with Engine(*parts, optimizer=AdamWTable(), settings=settings, observer=observer) as engine:
        return steady_step_s(engine, lambda: engine.forward_backward(micro_batches), steps, now)


def steady_step_s(
    engine: Engine,
    dispatch: Callable[[], StepResult],
    steps: int,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[float, list[StepResult]]:
    """Train the warm-up steps, `steps` measured ones and one more; return the mean seconds of a measured step."""
    results: list[StepResult] = []
    ends_s: list[float] = []
    for _ in range(WARM_UP_STEPS + steps + 1):
        results.append(dispatch())
        engine.step(lr=1e-3)
        # Collect a step only after the next one was dispatched, so that neighbouring steps can overlap.
        if len(results) > 1:
            results[-2].collect()
            ends_s.append(now())
    results[-1].collect()
    return (ends_s[-1] - ends_s[WARM_UP_STEPS - 1]) / steps, results


def simulated_step_s(costs: Costs, plan: Plan) -> float:
    """Simulate the plan's schedule, updates included; return seconds per step."""

    def tasks(steps: int) -> list[Any]:
        run = plan.partition, costs, plan.num_devices, plan.num_micro_batches, plan.rounds
        return dispatch_tasks(*run, update=plan.update, stale_layers=plan.stale_layers, steps=steps)

    return steady_state(tasks, plan.num_devices)[1]
