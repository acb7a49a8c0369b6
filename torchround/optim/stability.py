"""Stable training: clipping by global norm, loss scaling for float16, and bounds that detect spikes.

Each is a function of the steps before, never of timing, so a run repeats, and a resumed run continues bit for bit.

Clipping comes in parts that the engine can run as gradients arrive: each parameter contributes one `sum_of_squares`;
the caller adds them in a fixed order, takes the root and passes `clip_scale`'s factor to the update. No gradient is
rewritten.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

# Rows are summed one by one, so that the order of additions depends on the data's length alone. torch.sum over a
# long vector splits it by the number of threads.
_ROW = 4096
# 256 Ki elements are 2 MiB of float64 scratch. Measured on 2 cores, bf16, Gelement/s by elements per chunk:
# 64 Ki 2.0, 256 Ki 2.8, 1 Mi 1.2 (one thread).
_CHUNK_ROWS = 64

# What torch.nn.utils.clip_grad_norm_ adds to the norm.
_NORM_EPS = 1e-6


def sum_of_squares(flat: Tensor) -> Tensor:
    """Compute the sum of squares of a 1-D tensor of any floating dtype, as a `[]` float64 tensor.

    Squares and sums are float64, so a finite 16-bit or 32-bit gradient never overflows to an infinite norm. The bits
    are the same for any number of threads. Takes at most 2 MiB of scratch.
    """
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    num_whole_rows = flat.numel() // _ROW
    rows = flat[: num_whole_rows * _ROW].view(num_whole_rows, _ROW)  # the rest is added at the end
    for chunk in rows.split(_CHUNK_ROWS) if num_whole_rows else ():  # of no rows there would be one chunk
        total += chunk.to(torch.float64, copy=True).square_().sum(dim=1).sum()
    total += flat[num_whole_rows * _ROW :].to(torch.float64, copy=True).square_().sum()
    return total


def clip_scale(total_norm: float | Tensor, max_norm: float) -> float:
    """Compute the factor that brings gradients of norm `total_norm` to at most `max_norm`, as `clip_grad_norm_` does.

    It is `min(1, max_norm / (total_norm + 1e-6))`, and 1 when `max_norm` is 0, which turns clipping off. A norm that
    is not finite has no useful factor (the result is 0 or nan): the caller skips such an update altogether.
    """
    if max_norm == 0:
        return 1.0
    factor = max_norm / (float(total_norm) + _NORM_EPS)
    return min(factor, 1.0)


def layer_max_norm(max_norm: float, numel: int, all_numel: int) -> float:
    """Share `max_norm` by root of size: squares add up to it, and layers of like elements are clipped alike."""
    return max_norm * math.sqrt(numel / all_numel)


# Powers of two: scaling and its undoing are exact.
INITIAL_SCALE = 2.0**16
LOWEST_SCALE, HIGHEST_SCALE = 1.0, 2.0**24
GROWTH_INTERVAL_STEPS = 2000
DELAY_STEPS = 2


@dataclass(frozen=True)
class ScaleState:
    """The loss scale after some step, and the number of steps without an overflow since it last changed."""

    scale: float
    good_steps: int = 0

    def after(self, used_scale: float, overflowed: bool) -> "ScaleState":
        """Compute the state after one more step, which used `used_scale`.

        An overflow halves the scale that the step used, not the current one: when two steps in flight overflow with
        the same scale, the second one halves nothing further.
        """
        if overflowed:
            return ScaleState(max(min(self.scale, used_scale / 2), LOWEST_SCALE))
        if self.good_steps + 1 < GROWTH_INTERVAL_STEPS:
            return ScaleState(self.scale, self.good_steps + 1)
        return ScaleState(min(self.scale * 2, HIGHEST_SCALE))


class LossScaling:
    """The loss scale of each step: dynamic as in mixed precision training (arXiv 1710.03740), or constantly 1.

    The scale of step t is fixed by the results of steps up to t - 2, because step t may be dispatched while step t - 1
    is still computing. `record` must be called for every step in order.
    """

    def __init__(self, dynamic: bool, initial_scale: float = INITIAL_SCALE) -> None:
        self.dynamic = dynamic
        self._initial = ScaleState(initial_scale if dynamic else 1.0)
        self.load_state_dict(0, {})

    def scale_of(self, step: int) -> float:
        """Compute the factor on the loss of step `step`; needs the records up to step - 2."""
        return self._after[step - DELAY_STEPS].scale

    def can_fall(self, scale: float) -> bool:
        """Check whether a lower scale can answer an overflow under `scale`: then it is no fault."""
        return self.dynamic and scale > LOWEST_SCALE

    def record(self, step: int, overflowed: bool) -> None:
        """Record whether the gradient of step `step` was not finite (`overflowed`)."""
        before = self._after[step - 1]
        self._after[step] = before.after(self.scale_of(step), overflowed) if self.dynamic else before
        self._after.pop(step - DELAY_STEPS - 1, None)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Save what a run that resumes at `step` needs, JSON-able. Every earlier step must be recorded."""
        if not self.dynamic:
            return {}
        return {"after": [asdict(self._after[step - back]) for back in (2, 1)]}

    def load_state_dict(self, step: int, state: Mapping[str, Any]) -> None:
        """Resume at `step` from a `state_dict(step)`; an empty one (no scaling before) gives the initial scale."""
        after = [self._initial] * 2
        if self.dynamic and state:
            after = [ScaleState(**values) for values in state["after"]]
        self._after = {step - back: values for back, values in zip((2, 1), after, strict=True)}


# Equal steps have a deviation of 0, and the next one differs by a rounding: the deviation is at least this share of
# the median.
LEAST_DEVIATION = 0.01


@dataclass(frozen=True)
class Spike:
    """A loss or gradient norm above its bound; `name` says which of the two."""

    name: str
    value: float
    bound: float
    median: float

    def __str__(self) -> str:
        return f"the {self.name} {self.value:.4g} is above {self.bound:.4g} (median {self.median:.4g})"


class SpikeBounds:
    """Bounds of loss and gradient norm, from the last `window` good steps.

    A bound is `median + factor x max(median absolute deviation, 1 % of the median)`. The bound of step t is fixed by
    the steps before t, whose updates are complete when that of step t begins. There is no bound before `window` good
    steps, and none at all if `factor` is 0.
    """

    def __init__(self, factor: float = 0.0, window: int = 100) -> None:
        self._factor = factor
        self._values: dict[str, deque[float]] = {
            name: deque(maxlen=window) for name in ("loss", "gradient norm")
        }

    def spike(self, loss: float, grad_norm: float) -> Spike | None:
        """Find the first of the two values that is above its bound, if any."""
        for (name, window), value in zip(self._values.items(), (loss, grad_norm), strict=True):
            if len(window) == window.maxlen:
                median = statistics.median(window)
                bound = self._bound(median, window)
                if value > bound:
                    return Spike(name, value, bound, median)
        return None

    def record(self, loss: float, grad_norm: float) -> None:
        """Record a good step: one whose update was applied."""
        if self._factor:
            for window, value in zip(self._values.values(), (loss, grad_norm), strict=True):
                window.append(value)

    def state_dict(self) -> dict[str, Any]:
        return {name: list(window) for name, window in self._values.items() if window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; an empty one starts anew. A smaller window keeps the newest. Raises `ValueError`."""
        for name, window in self._values.items():
            window.clear()
            if self._factor:
                window.extend(map(float, state.get(name, ())))
            if not all(map(math.isfinite, window)):
                raise ValueError(f"a {name} of an earlier step is not finite")

    def _bound(self, median: float, window: deque[float]) -> float:
        deviation = statistics.median(abs(value - median) for value in window)
        return median + self._factor * max(deviation, LEAST_DEVIATION * abs(median))
