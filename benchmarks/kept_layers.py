"""Timed layers that can keep parts of themselves, and the real engine run over them on devices with a modelled link.

A layer's time is a sum over its parts, and a part's time passes when its product runs: a replay that takes the product's
result from the host takes no time. The backward takes a time of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.modelled_link import LinkedDevice, ModelledTime
from benchmarks.timed_layers import empty_micro_batches
from torchround.accelerators import PLANNED_KIND
from torchround.config import AdamWTable
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import POLICIES
from torchround.engine.store.host_store import HostStore
from torchround.keeping import keep
from torchround.layer import KeptWork, LayeredModel, LayerWork, MicroBatch
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.plan import Plan

FP32_BYTES = 4
WARM_UP_STEPS = 2


class ProductsTakeTime(TorchDispatchMode):
    """Let each product that really runs take `seconds` of the device's time."""

    def __init__(self, clock: ModelledTime, seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            self._clock.sleep(self._seconds)
        return func(*args, **kwargs or {})


class BackwardTakesTime(torch.autograd.Function):
    """Identity plus a weight whose backward takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, clock: ModelledTime, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return hidden + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.clock.sleep(ctx.seconds)
        return gradient.contiguous(), gradient.sum((0, 1)), None, None


class KeptLayer(nn.Module):
    """A layer of known time whose parts keep results of known size. The last layer returns a loss."""

    def __init__(self, clock: ModelledTime, cost: LayerCost, is_last: bool) -> None:
        super().__init__()
        self.clock, self.cost, self.is_last = clock, cost, is_last
        self.rest_s = cost.forward_s - sum(part.seconds for part in cost.keepable)
        self.weight = nn.Parameter(torch.empty(8, device="meta"))

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Take the time, and pass on the hidden states, (B, T, 8), or their sum as the loss."""
        if hidden is None:
            hidden = torch.zeros(*micro_batch.tokens.shape, 8)
        self.clock.sleep(self.rest_s)
        for part in self.cost.keepable:
            with ProductsTakeTime(self.clock, part.seconds):
                result = keep(
                    part.name,
                    torch.mm,
                    hidden.new_zeros(1, 1),
                    hidden.new_zeros(1, part.nbytes // FP32_BYTES),
                )
            hidden = hidden + result[0, 0]
        hidden = BackwardTakesTime.apply(hidden, self.weight, self.clock, self.cost.backward_s)
        return hidden.sum() if self.is_last else hidden

    def work(self, batch: int, tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count what the layer keeps, so that the engine reserves host buffers for it."""
        kept = tuple(KeptWork(part.name, part.nbytes, 0.0) for part in self.cost.keepable)
        return LayerWork(boundary_bytes=batch * tokens * 8 * FP32_BYTES, keepable=kept)

    def init_weights(self, generator: torch.Generator) -> None:
        """Set any value: only time is measured."""
        self.weight.zero_()


def kept_model(costs: Costs, clock: ModelledTime) -> LayeredModel:
    """Build a model of layers with these costs, the last one the loss."""
    last = costs.num_layers - 1
    layers = [KeptLayer(clock, cost, index == last) for index, cost in enumerate(costs.layers)]
    return LayeredModel(tuple(cost.name for cost in costs.layers), tuple(layers))


@dataclass(frozen=True)
class MeasuredKept:
    """Mean step time in the steady state, and per step and device the time of copies up and down the link.

    `peak_bytes` is the most memory that one device held.
    """

    step_s: float
    up_s: float
    down_s: float
    peak_bytes: int


def measure_kept(costs: Costs, plan: Plan, bytes_per_s: float, steps: int, pace: float) -> MeasuredKept:
    """Run the real engine under `plan`, kept parts included, on devices whose links move `bytes_per_s` each way.

    `steps` should be a multiple of the devices, because each step starts on another one. With `is_real` the times are the
    machine's, otherwise `ModelledTime`'s.
    """
    clock = ModelledTime(pace)
    model = kept_model(costs, clock)
    store = HostStore(model, policy=POLICIES[plan.update])
    store.initialize(model, seed=0)
    micro_batches = empty_micro_batches(plan.num_micro_batches)
    devices = [LinkedDevice(index, clock, bytes_per_s) for index in range(plan.num_devices)]
    settings = EngineSettings(rounds=plan.rounds, kept=plan.kept)
    ends: list[float] = []
    with Engine(
        model, store, devices, plan.partition, optimizer=AdamWTable(), settings=settings, observer=clock
    ) as engine:
        before = None
        for _ in range(WARM_UP_STEPS + steps + 1):
            result = engine.forward_backward(micro_batches)
            engine.step(lr=1e-3)
            # A step is collected after the next one was handed out, so that neighbouring steps can overlap.
            if before is not None:
                before.collect()
                ends.append(clock.now())
            before = result
        assert before is not None, "there is at least one step"
        before.collect()
        peak_bytes = max(device.peak_bytes() for device in devices)
    # Of all steps: at the end of one of them devices may have begun to copy for the next one, as threads come.
    up_s, down_s = (
        sum(device.link_s[is_up] for device in devices) / (WARM_UP_STEPS + steps + 1) / plan.num_devices
        for is_up in (True, False)
    )
    return MeasuredKept((ends[-1] - ends[WARM_UP_STEPS - 1]) / steps, up_s, down_s, peak_bytes)
