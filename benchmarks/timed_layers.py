"""Layers that take a known time and do next to nothing else: what schedules are measured with.

Blocks of 4 ms forward and 8 ms backward without recompute, and a head of 2.3 blocks.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchround.layer import MicroBatch
from torchround.pipeline.costs import Costs, LayerCost

BLOCK_FORWARD_S, BLOCK_BACKWARD_S = 0.004, 0.008
HEAD_BLOCKS = 2.3
BLOCK_BYTES = 2**20  # what a block keeps for its backward; sets how many fit into a stage


class Sleeper:
    """Sleeps exactly on average: makes up for what earlier sleeps took too long.

    All layers of a worker share one; the engine gives each worker its own copy of the layers. `speeds`: of
    threads, by name, that are not at full speed 1.
    """

    def __init__(self, speeds: Mapping[str, float] | None = None) -> None:
        self._too_long_s = 0.0
        self._speeds = speeds or {}

    def sleep(self, seconds: float) -> None:
        """Return `seconds` later at full speed, less what earlier calls ran over."""
        if self._speeds:
            seconds /= self._speeds.get(threading.current_thread().name, 1.0)
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
        return gradient.contiguous(), gradient.sum((0, 1)), None, None, None


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
