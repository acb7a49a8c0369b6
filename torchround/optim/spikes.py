"""Bounds beyond which a step's loss or gradient norm is a spike, from the good steps before it.

The bound of step t is fixed by the steps before t, whose updates are complete when step t's begins. Timing plays no
part, so a run repeats, and a resumed one goes on bit for bit.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Steps that are all alike deviate by nothing, and the next one by rounding: at least this share of the median counts.
LEAST_DEVIATION = 0.01


@dataclass(frozen=True)
class Spike:
    """A value above its bound; `name` says which."""

    name: str
    value: float
    bound: float
    median: float

    def __str__(self) -> str:
        return f"the {self.name} {self.value:.4g} is above {self.bound:.4g} (median {self.median:.4g})"


class SpikeBounds:
    """`median + factor x max(median absolute deviation, 1 % of the median)` of the last `window` good steps.

    Without a `factor` nothing is bounded and nothing kept; neither is anything bounded before `window` good steps.
    """

    def __init__(self, factor: float = 0.0, window: int = 100) -> None:
        self._factor = factor
        self._values: dict[str, deque[float]] = {
            name: deque(maxlen=window) for name in ("loss", "gradient norm")
        }

    def spike(self, loss: float, grad_norm: float) -> Spike | None:
        """The first of the two that is above its bound."""
        for (name, window), value in zip(self._values.items(), (loss, grad_norm), strict=True):
            if len(window) == window.maxlen:
                median = statistics.median(window)
                bound = self._bound(median, window)
                if value > bound:
                    return Spike(name, value, bound, median)
        return None

    def record(self, loss: float, grad_norm: float) -> None:
        """A step whose update was applied."""
        if self._factor:
            for window, value in zip(self._values.values(), (loss, grad_norm), strict=True):
                window.append(value)

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs, JSON-able."""
        return {name: list(window) for name, window in self._values.items() if window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a `state_dict`; with an empty one from nothing. Another window keeps the newest that fit.

        Raises `ValueError` for values that no good step has.
        """
        for name, window in self._values.items():
            values = state.get(name, ())
            if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
                raise ValueError(f"the {name} of a good step is a finite number, got {str(values)[:100]}")
            window.clear()
            if self._factor:
                window.extend(values)

    def _bound(self, median: float, window: deque[float]) -> float:
        deviation = statistics.median(abs(value - median) for value in window)
        return median + self._factor * max(deviation, LEAST_DEVIATION * abs(median))
