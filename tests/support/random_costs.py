"""Random layers, partitions and limits for the planner's tests."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from torchround.planning import step_time
from torchround.planning.costs import Costs, KeptCost, LayerCost
from torchround.planning.memory import MemoryLimits
from torchround.planning.partition import Partition
from torchround.planning.search import Search
from torchround.planning.stage_times import KeptLink, LayerSums
from torchround.simulate.dispatch import dispatch_tasks
from torchround.simulate.events import simulate

SECONDS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.floats(0.01, 5.0))
BYTES = st.integers(0, 100)


@st.composite
def costs(draw, max_layers=8, updates=True, jobs=False):
    """Draw up to `max_layers` layers, often equal, some without time; half of the draws have updates.

    Half of them keep parts of some layers. With `jobs`, half have jobs of the update on devices; their copies take
    no longer than any job computes.
    """
    num_layers = draw(st.integers(1, max_layers))
    updates = updates and draw(st.booleans())
    equal = draw(st.booleans())
    layer = draw(_layer(updates))
    layers = [layer if equal else draw(_layer(updates)) for _ in range(num_layers - 1)] + [draw(_layer(updates))]
    named = tuple(replace(layer, name=f"layer.{index}") for index, layer in enumerate(layers))
    drawn = Costs(named, draw(st.sampled_from([0.0, 0.1, 0.7])))
    if jobs and draw(st.booleans()):
        link_s = draw(st.sampled_from([0.0, 0.2]))
        busy = [layer if draw(st.booleans()) else _with_job(draw, layer, link_s) for layer in drawn.layers]
        drawn = Costs(tuple(busy), drawn.hop_s)
    if not draw(st.booleans()):
        return drawn
    return drawn.keeping([draw(kept_of(layer)) for layer in drawn.layers])


def _with_job(draw, layer, link_s):
    job_s = draw(st.floats(0.2, 3.0))
    return replace(layer, job_s=job_s, job_link_s=link_s, job_slot_bytes=draw(BYTES), job_scratch_bytes=draw(BYTES))


def kept_of(layer):
    names = [part.name for part in layer.keepable]
    return st.sets(st.sampled_from(names)).map(lambda kept: tuple(sorted(kept))) if names else st.just(())


@st.composite
def _layer(draw, updates):
    return LayerCost(
        name="layer",
        forward_s=draw(SECONDS),
        backward_s=draw(SECONDS),
        weight_bytes=draw(BYTES),
        gradient_bytes=draw(BYTES),
        activation_bytes=draw(BYTES),
        boundary_bytes=draw(BYTES),
        workspace_bytes=draw(BYTES),
        optimizer_s=draw(SECONDS) if updates else 0.0,
        keepable=tuple(
            KeptCost(name, draw(BYTES), draw(SECONDS) / 2)
            for name in draw(st.sampled_from([(), ("attention",), ("attention", "down")]))
        ),
    )


@st.composite
def partitions(draw, num_layers):
    fused = draw(st.integers(1, num_layers))
    left, right = (draw(compositions(num_layers - fused)) for _ in range(2))
    return Partition(left, fused, right)


@st.composite
def compositions(draw, total):
    cuts = sorted(draw(st.sets(st.integers(1, total - 1)))) if total > 1 else []
    ends = [0, *cuts, total]
    return tuple(stop - start for start, stop in pairwise(ends) if stop > start)


LINKS = st.one_of(
    st.none(), st.builds(KeptLink, st.sampled_from([10.0, 30.0, 100.0, 1e6]), st.sampled_from([0.5, 1.0]))
)
"""Links on which a stage's bytes take between nothing and many times its seconds."""


def limits(tightest=200, loosest=2500):
    bounds = st.one_of(st.none(), st.integers(tightest, loosest))
    return st.builds(
        MemoryLimits,
        device_bytes=bounds,
        host_bytes=bounds,
        integer_bytes=st.integers(0, 5),
        recompute=st.sampled_from(["stage", "layer"]),
    )


def all_partitions(num_layers):
    found = []
    for fused in range(1, num_layers + 1):
        ways = _ways(num_layers - fused)
        found += [Partition(left, fused, right) for left in ways for right in ways]
    return found


def _ways(total):
    if total == 0:
        return [()]
    return [(first, *rest) for first in range(1, total + 1) for rest in _ways(total - first)]


def exact_step_s(
    partition, costs, devices, micro_batches, rounds, update, recompute="stage", link=None, stale_layers=0
):
    sums = LayerSums(costs, recompute, link, micro_batches)
    times = sums.times(partition, update, rounds, stale_layers)
    return step_time.step_seconds(times, devices, micro_batches, rounds)


def simulated_step_s(partition, costs, devices, micro_batches, rounds, update, **settings):
    settled, counted = 40, 120  # a multiple of every period that so few devices have
    settings |= {"update": update, "steps": settled + counted}
    tasks = dispatch_tasks(partition, costs, devices, micro_batches, rounds, **settings)
    ends = [0.0] * (settled + counted)
    for task, end in zip(tasks, simulate(tasks, devices).end_s, strict=True):
        if task.device >= 0:
            ends[task.step] = max(ends[task.step], end)
    return (ends[-1] - ends[settled - 1]) / counted


@contextmanager
def short_search():
    """Search an eighth as long: for what holds for any plan of a search, however fast the plan is."""
    anneal = Search.anneal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "anneal", lambda search, starts, share=1.0: anneal(search, starts, share / 8))
        yield


def in_both_ways(steady_state_s, *arguments):
    """Return the steady state by Karp's theorem without waiting, and by waiting until the state repeats."""
    found = []
    for most_steps in (0, 200):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_time, "MAX_WARM_UP_STEPS", most_steps)
            found.append(steady_state_s(*arguments))
    return found
