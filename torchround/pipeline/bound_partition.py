"""Layers -> stages that are bound to devices: PACI's memory-constrained min-max partition (appendix D.5).

The schedules that keep a stage on one device (GPipe, 1F1B, PACI, ...) need contiguous layers split so that
the slowest stage is as fast as possible. RoundPipe does not: see `plan.py`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise


class BindError(ValueError):
    """Fewer layers than stages, or lists of different lengths."""


def bind_stages(
    costs_s: Sequence[float],
    memory_bytes: Sequence[int],
    num_stages: int,
    limit_bytes: int | None,
    in_flight_bytes: Sequence[int] = (),
) -> tuple[int, ...]:
    """Layer counts per stage that minimise the slowest stage's seconds within `limit_bytes` per stage.

    `memory_bytes` of a layer are resident however many micro-batches are in flight; `in_flight_bytes` (if
    given) are paid `num_stages - j` times in stage j, counted from 0, as 1F1B keeps them (equation 12).
    Where nothing fits, the worst overshoot is minimised first and the slowest stage second. Among equals the
    split with the earliest cuts is returned.
    """
    num_layers = len(costs_s)
    if not 1 <= num_stages <= num_layers:
        raise BindError(f"cannot bind {num_layers} layers to {num_stages} non-empty stages")
    if len(memory_bytes) != num_layers or (in_flight_bytes and len(in_flight_bytes) != num_layers):
        raise BindError(
            f"{num_layers} layers have {len(memory_bytes)} memory and {len(in_flight_bytes)} in-flight figures"
        )
    time_sums = list(accumulate(costs_s, initial=0.0))
    static_sums = list(accumulate(memory_bytes, initial=0))
    flight_sums = list(accumulate(in_flight_bytes or [0] * num_layers, initial=0))

    def overshoot(stage: int, start: int, stop: int) -> float:
        used = static_sums[stop] - static_sums[start]
        used += (num_stages - stage) * (flight_sums[stop] - flight_sums[start])
        return 0 if limit_bytes is None else max(0, used - limit_bytes)

    # Two passes, not one over pairs: the best pair of a prefix need not be part of the best pair of the whole.
    least, _ = _min_max(num_layers, num_stages, overshoot)

    def seconds(stage: int, start: int, stop: int) -> float:
        allowed = overshoot(stage, start, stop) <= least
        return time_sums[stop] - time_sums[start] if allowed else float("inf")

    _, bounds = _min_max(num_layers, num_stages, seconds)
    return tuple(stop - start for start, stop in pairwise(bounds))


def _min_max(
    num_layers: int, num_stages: int, cost: Callable[[int, int, int], float]
) -> tuple[float, list[int]]:
    """The least possible largest `cost(stage, start, stop)`, and bounds that reach it (equation 15)."""
    infinite = float("inf")
    # best[i]: the first i layers in the stages so far.
    best = [infinite, *(cost(0, 0, stop) for stop in range(1, num_layers + 1))]
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        # Without a finite choice any non-empty stages do.
        before, best, cut = best, [infinite] * (num_layers + 1), [stage] * (num_layers + 1)
        for stop in range(stage + 1, num_layers + 1):
            for start in range(stage, stop):
                candidate = max(before[start], cost(stage, start, stop))
                if candidate < best[stop]:
                    best[stop], cut[stop] = candidate, start
        cuts.append(cut)
    bounds = [num_layers]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return best[num_layers], [0, *reversed(bounds)]
