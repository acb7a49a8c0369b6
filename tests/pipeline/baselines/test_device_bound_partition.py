"""PACI's min-max partition against brute force over all cuts."""

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchround.pipeline.baselines.device_bound import ScheduleError, bind_stages

BYTES = st.integers(0, 20)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[int], list[int], int, int | None]:
    layers = draw(st.integers(1, 8))
    seconds = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), min_size=layers, max_size=layers))
    static, flying = (draw(st.lists(BYTES, min_size=layers, max_size=layers)) for _ in range(2))
    return (seconds, static, flying, draw(st.integers(1, layers)), draw(st.one_of(st.none(), st.integers(0, 120))))


@settings(max_examples=400, deadline=None)
@given(problems())
# The best overshoot of the first two stages must be given up for the best of all three.
@example(([0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0] * 6, [0, 0, 0, 1, 1, 4], 3, 0))
def test_no_other_cut_has_a_smaller_overshoot_or_a_faster_slowest_stage_at_the_same_overshoot(
    problem: tuple[list[float], list[int], list[int], int, int | None],
) -> None:
    seconds, static, flying, stages, limit = problem

    def score(counts: tuple[int, ...]) -> tuple[int, float]:
        start, overshoot, slowest = 0, 0, 0.0
        for stage, count in enumerate(counts):
            part = slice(start, start + count)
            used = sum(static[part]) + (stages - stage) * sum(flying[part])
            overshoot = max(overshoot, 0 if limit is None else used - limit)
            slowest = max(slowest, sum(seconds[part]))
            start += count
        return overshoot, slowest

    counts = bind_stages(seconds, static, stages, limit, flying)
    assert len(counts) == stages and sum(counts) == len(seconds) and min(counts) >= 1
    best = min(
        score(tuple(stop - start for start, stop in zip((0, *cut), (*cut, len(seconds)), strict=True)))
        for cut in combinations(range(1, len(seconds)), stages - 1)
    )
    assert score(counts) == pytest.approx(best)


@pytest.mark.parametrize(("seconds", "memory", "stages"), [([1.0], [1], 2), ([1.0, 1.0], [1], 2), ([1.0], [1], 0)])
def test_stages_that_cannot_be_bound_are_an_error(seconds: list[float], memory: list[int], stages: int) -> None:
    with pytest.raises(ScheduleError):
        bind_stages(seconds, memory, stages, None)
