"""Tokens per second and MFU, over the right interval and the right tokens.

The interval is the time from one report to the next, less what is spent in validation and checkpoints:
those come every so many steps and would make the rate of a step depend on whether it happens to be followed
by one. Waiting for data counts, because it slows training. Tokens are all
that are computed but padding, whether or not the loss counts them: in conversations it counts few.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchround.layer import LayerWork


@dataclass(frozen=True)
class Interval:
    """Means over the steps of one interval: seconds per step, and those of them spent waiting for data."""

    num_steps: int
    tokens_per_s: float
    step_s: float
    data_s: float


class Throughput:
    """Counts steps and tokens. The interval starts when it is made, and anew at each `report`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._restart()

    def count(self, tokens: int) -> None:
        """One more step is done, of `tokens` tokens without padding."""
        self._num_steps += 1
        self._tokens += tokens

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Around validation and checkpoints: the time does not count."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._excluded_s += self._clock() - start_s

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the loader: the time counts, and is reported as `data_s` too."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._data_s += self._clock() - start_s

    def report(self) -> Interval:
        """The interval since the last report. Raises `ValueError` if no step was counted in it."""
        if self._num_steps == 0:
            raise ValueError("no step was counted since the last report, so there is no rate")
        training_s = self._clock() - self._start_s - self._excluded_s
        interval = Interval(
            num_steps=self._num_steps,
            tokens_per_s=self._tokens / training_s if training_s > 0 else 0.0,
            step_s=training_s / self._num_steps,
            data_s=self._data_s / self._num_steps,
        )
        self._restart()
        return interval

    def _restart(self) -> None:
        self._start_s = self._clock()
        self._excluded_s = 0.0
        self._data_s = 0.0
        self._num_steps = 0
        self._tokens = 0


def train_flops_per_token(works: Iterable[LayerWork], num_tokens: int) -> float:
    """FLOPs of training per token, from the layers' work for `num_tokens`: forward and backward.

    Recompute is not among them: it is a price of the engine, not work of the model (PaLM, appendix B). Nor are gradients
    of frozen weights, which nobody computes: a LoRA run has 4 FLOPs per token and frozen weight, not 6.
    """
    return sum(work.forward_flops + work.backward_flops for work in works) / num_tokens


def mfu(
    tokens_per_s: float, flops_per_token: float, peak_flops_per_s: float | None, num_devices: int
) -> float | None:
    """Model FLOPs utilisation as a fraction; `None` where the device's peak is not known."""
    if peak_flops_per_s is None:
        return None
    return tokens_per_s * flops_per_token / (peak_flops_per_s * num_devices)
