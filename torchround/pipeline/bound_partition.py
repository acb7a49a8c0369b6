"""Layers -> stages that are bound to devices: PACI's memory-constrained min-max partition (appendix D.5).

The schedules that keep a stage on one device (GPipe, 1F1B, PACI, ...) need contiguous layers split so that
the slowest stage is as fast as possible. RoundPipe does not: see `partition.py` and `plan.py`.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

Score = tuple[int, float]
WORST: Score = (2**127, float("inf"))


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

    def score(stage: int, start: int, stop: int) -> Score:
        used = static_sums[stop] - static_sums[start]
        used += (num_stages - stage) * (flight_sums[stop] - flight_sums[start])
        overshoot = 0 if limit_bytes is None else max(0, used - limit_bytes)
        return overshoot, time_sums[stop] - time_sums[start]

    # best[i]: the first i layers in the stages so far. Overshoot first makes one pass do for both of PACI's:
    # it is 0 exactly where a split within the limit exists.
    best = [score(0, 0, stop) if stop else WORST for stop in range(num_layers + 1)]
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        before, best, cut = best, [WORST] * (num_layers + 1), [0] * (num_layers + 1)
        for stop in range(stage + 1, num_layers + 1):
            for start in range(stage, stop):
                overshoot, seconds = score(stage, start, stop)
                candidate = max(before[start][0], overshoot), max(before[start][1], seconds)
                if candidate < best[stop]:
                    best[stop], cut[stop] = candidate, start
        cuts.append(cut)
    bounds = [num_layers]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    bounds.append(0)
    bounds.reverse()
    return tuple(stop - start for start, stop in pairwise(bounds))
