"""Random layers, partitions and limits for the planner's tests."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from torchround.pipeline.costs import Costs, KeptCost, LayerCost
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.partition import Partition
from torchround.pipeline.simulation.kept_link import KeptLink

SECONDS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.floats(0.01, 5.0))
BYTES = st.integers(0, 100)


@st.composite
def costs(draw: st.DrawFn, max_layers: int = 8, updates: bool = True, jobs: bool = False) -> Costs:
    """Draw up to `max_layers` layers, often equal, some without time; half of the draws have updates.

    Half of them keep parts of some layers. With `jobs`, half have jobs of the update on devices; their copies take
    no longer than any job computes.
    """
    num_layers = draw(st.integers(1, max_layers))
    updates = updates and draw(st.booleans())
    equal = draw(st.booleans())
    layer = draw(_layer(updates))
    layers = [layer if equal else draw(_layer(updates)) for _ in range(num_layers - 1)] + [draw(_layer(updates))]
    named = tuple(_named(part, index) for index, part in enumerate(layers))
    drawn = Costs(named, draw(st.sampled_from([0.0, 0.1, 0.7])))
    if jobs and draw(st.booleans()):
        link_s = draw(st.sampled_from([0.0, 0.2]))
        busy = [layer if draw(st.booleans()) else _with_job(draw, layer, link_s) for layer in drawn.layers]
        drawn = Costs(tuple(busy), drawn.hop_s)
    if not draw(st.booleans()):
        return drawn
    return drawn.keeping([draw(kept_of(layer)) for layer in drawn.layers])


def _with_job(draw: st.DrawFn, layer: LayerCost, link_s: float) -> LayerCost:
    job_s = draw(st.floats(0.2, 3.0))
    return replace(layer, job_s=job_s, job_link_s=link_s, job_slot_bytes=draw(BYTES), job_scratch_bytes=draw(BYTES))


def kept_of(layer: LayerCost) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw names of parts that the layer can keep."""
    names = [part.name for part in layer.keepable]
    return st.sets(st.sampled_from(names)).map(lambda kept: tuple(sorted(kept))) if names else st.just(())


@st.composite
def _layer(draw: st.DrawFn, updates: bool) -> LayerCost:
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


def _named(layer: LayerCost, index: int) -> LayerCost:
    return LayerCost(**{**vars(layer), "name": f"layer.{index}"})


@st.composite
def partitions(draw: st.DrawFn, num_layers: int) -> Partition:
    """Draw any partition of the layers."""
    fused = draw(st.integers(1, num_layers))
    left, right = (draw(compositions(num_layers - fused)) for _ in range(2))
    return Partition(left, fused, right)


@st.composite
def compositions(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """Draw positive integers with the given sum."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1)))) if total > 1 else []
    ends = [0, *cuts, total]
    return tuple(stop - start for start, stop in pairwise(ends) if stop > start)


LINKS = st.one_of(
    st.none(), st.builds(KeptLink, st.sampled_from([10.0, 30.0, 100.0, 1e6]), st.sampled_from([0.5, 1.0]))
)
"""Links on which a stage's bytes take between nothing and many times its seconds."""


def limits(tightest: int = 200, loosest: int = 2500) -> st.SearchStrategy[MemoryLimits]:
    """Draw limits: often none, often so tight that some or all partitions do not fit."""
    bounds = st.one_of(st.none(), st.integers(tightest, loosest))
    return st.builds(
        MemoryLimits,
        device_bytes=bounds,
        host_bytes=bounds,
        integer_bytes=st.integers(0, 5),
        recompute=st.sampled_from(["stage", "layer"]),
    )


def all_partitions(num_layers: int) -> list[Partition]:
    """Yield every partition, by plain recursion."""
    found = []
    for fused in range(1, num_layers + 1):
        ways = _ways(num_layers - fused)
        found += [Partition(left, fused, right) for left in ways for right in ways]
    return found


def _ways(total: int) -> list[tuple[int, ...]]:
    if total == 0:
        return [()]
    return [(first, *rest) for first in range(1, total + 1) for rest in _ways(total - first)]
