"""Partitions described by a few numbers each, to search the whole range of plans before single layers move.

A shape says how many stages there are, how many of them are forward stages, how many layers the fused stage
holds, and how the stages near the first layer differ from the rest. Stages that start small fill the devices
sooner, and stages that end small drain them sooner, provided that a device that finishes a small stage early
finds its next input ready.

Shapes: K partitions, S stages of one direction over the layers `0 .. split` before the fused stage, L layers.
"""

from dataclasses import dataclass, fields

import numpy as np

from torchround.pipeline.search.partition_batch import Floats, Integers, PartitionBatch
from torchround.pipeline.search.planning_problem import PlanningProblem

# Smallest relative length of a direction's stages near
# layer 0, and most turns of the devices until full length.
SMALLEST_RATIO, MOST_TURNS = 0.15, 3.0
# Forward stages relative to the number that makes all stages equally long.
FORWARD_FACTOR = (0.55, 1.7)
# Fused stage relative to a mean stage, unless it is the smallest possible.
FUSED_FACTOR = (0.3, 1.5)
# The grid of shapes with even stages.
EVEN_FUSED_FACTORS, EVEN_FORWARD_FACTORS = (0.6, 0.8, 1.0, 1.2), (0.85, 1.0, 1.15)
# Share of the random shapes with the smallest fused stage. A larger one saves work, but holds up the filling.
SMALLEST_FUSED_SHARE = {"sync": 0.6, "async": 0.2}
# Share of the random shapes whose stages near layer 0 are smaller by a step rather than by a ramp.
STEP_SHARE = 0.5
# Share of the random shapes that have even stages in a direction: `async` has no fill and drain to shorten.
EVEN_SHARE = {"sync": 0.1, "async": 0.75}


@dataclass(frozen=True)
class CandidateShapes:
    """K shapes as arrays: `stages`, `fused` (layers) and `forward` (stages) [K]; the rest [K, 2] by direction.

    `ratio`: length of the stages at layer 0 relative to the others. `turns`: turns of the devices over which
    they reach full length. `step`: 1 if they stay at `ratio` until then, 0 if they grow evenly.
    """

    stages: Integers
    fused: Integers
    forward: Integers
    ratio: Floats
    turns: Floats
    step: Floats

    def take(self, rows: Integers) -> "CandidateShapes":
        """Select shapes by their indices."""
        return CandidateShapes(*(getattr(self, field.name)[rows] for field in fields(self)))

    def followed_by(self, others: "CandidateShapes") -> "CandidateShapes":
        """Append the others."""
        pairs = ((getattr(self, field.name), getattr(others, field.name)) for field in fields(self))
        return CandidateShapes(*(np.concatenate(pair) for pair in pairs))


@dataclass(frozen=True)
class ShapeRange:
    """The range that memory allows: fewest forward and backward stages, most layers of the fused stage."""

    num_layers: int
    fewest_forward: int
    fewest_backward: int
    most_fused: int
    most_stages: int

    @property
    def fewest_stages(self) -> int:
        return self.fewest_forward + 1 + self.fewest_backward

    def clip(self, shapes: CandidateShapes) -> CandidateShapes:
        """Bring the numbers into range, with at least one layer in each stage."""
        fused = np.clip(shapes.fused, 1, self.most_fused)
        split = self.num_layers - fused
        least = np.minimum(self.fewest_backward, split)
        stages = np.clip(shapes.stages, self.fewest_stages, max(self.most_stages, self.fewest_stages))
        stages = np.minimum(stages, 2 * split + 1)
        lowest = np.maximum(self.fewest_forward, stages - 1 - split)
        forward = np.clip(shapes.forward, lowest, np.minimum(split, stages - 1 - least))
        return CandidateShapes(stages, fused, forward, shapes.ratio, shapes.turns, shapes.step)


def random_shapes(
    problem: PlanningProblem, random: np.random.Generator, number: int, allowed: ShapeRange
) -> CandidateShapes:
    """Draw shapes over the whole range; the logarithm of the number of stages is uniform."""
    least, most = allowed.fewest_stages, max(allowed.most_stages, allowed.fewest_stages)
    stages = np.exp(random.uniform(np.log(least), np.log(most), number)).round().astype(np.int64)
    smallest = random.random(number) < SMALLEST_FUSED_SHARE[problem.overlap]
    fused_factor = np.where(smallest, 0.0, random.uniform(*FUSED_FACTOR, number))
    forward_factor = np.exp(random.uniform(np.log(FORWARD_FACTOR[0]), np.log(FORWARD_FACTOR[1]), number))
    fused, forward = _sizes(problem, stages, fused_factor, forward_factor)
    shapes = CandidateShapes(
        stages,
        fused,
        forward,
        np.where(
            random.random((number, 2)) < EVEN_SHARE[problem.overlap],
            1.0,
            random.uniform(SMALLEST_RATIO, 1.0, (number, 2)),
        ),
        random.uniform(0.0, MOST_TURNS, (number, 2)),
        (random.random((number, 2)) < STEP_SHARE).astype(np.float64),
    )
    return allowed.clip(shapes)


def even_shapes(problem: PlanningProblem, allowed: ShapeRange) -> CandidateShapes:
    """List even stages, up to two turns of the devices, with fused stages of about the same length."""
    most = min(allowed.most_stages, 2 * problem.num_devices + 1)
    grid = [
        (stages, fused, forward)
        for stages in range(allowed.fewest_stages, most + 1)
        for fused in EVEN_FUSED_FACTORS
        for forward in EVEN_FORWARD_FACTORS
    ]
    numbers = np.array(grid, dtype=np.float64).reshape(len(grid), 3)
    stages = numbers[:, 0].astype(np.int64)
    fused_layers, forward_stages = _sizes(problem, stages, numbers[:, 1], numbers[:, 2])
    even = np.ones((len(grid), 2))
    return allowed.clip(CandidateShapes(stages, fused_layers, forward_stages, even, 0 * even, 0 * even))


def _sizes(
    problem: PlanningProblem, stages: Integers, fused_factor: Floats, forward_factor: Floats
) -> tuple[Integers, Integers]:
    """Turn relative sizes into layers of the fused stage and numbers of forward stages, both [K].

    `fused_factor` is relative to a mean stage, `forward_factor` to the share of forward stages that makes all
    equally long.
    """
    layers = problem.num_layers
    both_s, fused_s = np.array(problem.both_s), np.array(problem.fused_s)
    mean_s = (problem.forward_s[-1] + both_s[-1]) / stages
    fused = layers - np.searchsorted(fused_s, fused_s[-1] - fused_factor * mean_s)
    fused = np.clip(fused, 1, layers - 1)
    split = layers - fused
    forward_s = problem.forward_s[split]
    share = forward_s / np.maximum(forward_s + both_s[split], 1e-300)
    return fused, np.round((stages - 1) * share * forward_factor).astype(np.int64)


def varied(shapes: CandidateShapes, random: np.random.Generator, allowed: ShapeRange) -> CandidateShapes:
    """Change each shape a little at random."""
    number = len(shapes.stages)
    changed = CandidateShapes(
        _nearby(shapes.stages, random, 0.08),
        np.where(random.random(number) < 0.4, _nearby(shapes.fused, random, 0.15), shapes.fused),
        _nearby(shapes.forward, random, 0.08),
        np.clip(shapes.ratio + random.normal(0.0, 0.15, (number, 2)), SMALLEST_RATIO, 1.0),
        np.clip(shapes.turns + random.normal(0.0, 0.3, (number, 2)), 0.0, MOST_TURNS),
        np.where(random.random((number, 2)) < 0.1, 1 - shapes.step, shapes.step),
    )
    return allowed.clip(changed)


def _nearby(values: Integers, random: np.random.Generator, share: float) -> Integers:
    """Draw integers around `values`, off by about one plus `share` of the value."""
    steps = random.normal(0.0, 1.0 + share * values)
    return values + np.round(steps).astype(np.int64)


def shaped_partitions(problem: PlanningProblem, shapes: CandidateShapes) -> PartitionBatch:
    """Build the partitions of these shapes."""
    split = problem.num_layers - shapes.fused
    # Both halves are cut from layer 0 on. Forward stages are
    # dispatched in that order, backward ones in the reverse.
    both_s = np.array(problem.both_s)
    left = _half(problem, problem.forward_s, split, shapes.forward, shapes, 0)
    right = _half(problem, both_s, split, shapes.stages - 1 - shapes.forward, shapes, 1)
    position = np.arange(int(shapes.stages.max()))
    from_start = np.minimum(position, left.shape[1] - 1) + 0 * split[:, None]
    from_end = np.clip(shapes.stages[:, None] - 1 - position, 0, right.shape[1] - 1)
    counts = np.where(
        position < shapes.forward[:, None],
        np.take_along_axis(left, from_start, axis=1),
        np.take_along_axis(right, from_end, axis=1),
    )
    counts = np.where(position == shapes.forward[:, None], shapes.fused[:, None], counts)
    return PartitionBatch(np.where(position < shapes.stages[:, None], counts, 0), shapes.forward)


def _half(
    problem: PlanningProblem,
    sums_s: Floats,
    split: Integers,
    stages: Integers,
    shapes: CandidateShapes,
    direction: int,
) -> Integers:
    """Cut the layers `0 .. split` into stages: layers per stage [K, S], fewest first, padded with zeros.

    `sums_s` [L + 1] are running sums of the layers' seconds. The cuts are those nearest to the wanted shares
    of the time, moved so that every stage keeps at least one layer.
    """
    position = np.arange(int(stages.max()))
    exists = position < stages[:, None]
    shares = np.cumsum(np.where(exists, _weights(problem, position, shapes, direction), 0.0), axis=1)
    wanted_s = shares / shares[:, -1:] * sums_s[split][:, None]
    cuts = np.searchsorted((sums_s[:-1] + sums_s[1:]) / 2, wanted_s, side="right")
    steps = np.minimum(position + 1, stages[:, None])
    cuts = np.minimum(cuts, (split - stages)[:, None] + steps)
    cuts = np.maximum.accumulate(np.maximum(cuts - steps, 0), axis=1) + steps
    cuts = np.where(position + 1 < stages[:, None], cuts, split[:, None])
    counts = np.diff(cuts, axis=1, prepend=0)
    # Rounding to layers can put a smaller stage behind a
    # larger one; the shape asks for small stages at layer 0.
    ascending = np.sort(np.where(exists, counts, problem.num_layers), axis=1)
    return np.where(exists, ascending, 0)


def _weights(problem: PlanningProblem, position: Integers, shapes: CandidateShapes, direction: int) -> Floats:
    """Compute relative lengths of the stages [K, S], which rise to 1 in a step or evenly."""
    ratio, step = shapes.ratio[:, direction, None], shapes.step[:, direction, None]
    rising = np.maximum(shapes.turns[:, direction, None] * problem.num_devices, 1e-9)
    evenly = np.minimum(1.0, ratio + (1 - ratio) * position / rising)
    return np.where(step > 0, np.where(position < rising, ratio, 1.0), evenly)
