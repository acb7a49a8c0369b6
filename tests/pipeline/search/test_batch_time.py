"""Ranking many partitions at once against the exact step time of each."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.random_costs import LINKS, all_partitions, costs, limits, partitions
from torchround.pipeline.memory import MemoryLimits, device_memory
from torchround.pipeline.pool_count import boundary_pool_bytes
from torchround.pipeline.search.partition_batch import Candidate, batch_of, joined
from torchround.pipeline.search.planning_problem import PlanningProblem

UPDATES = st.sampled_from(["sync", "async"])


@given(
    data=st.data(),
    costs=costs(jobs=True),
    update=UPDATES,
    devices=st.integers(1, 5),
    micro_batches=st.integers(1, 6),
    recompute=st.sampled_from(["stage", "layer"]),
    link=LINKS,
)
def test_a_rank_is_the_exact_step_time_or_less(data, costs, update, devices, micro_batches, recompute, link):
    """It is less only if a recomputation waits for its boundary, or devices work for updates; ranking leaves out both."""
    limits = MemoryLimits(recompute=recompute)
    problem = PlanningProblem(costs, devices, micro_batches, update, limits, link=link)
    chosen = data.draw(st.lists(partitions(costs.num_layers), min_size=1, max_size=6))
    rounds = data.draw(st.integers(1, micro_batches))
    ranks = problem.estimate_s(batch_of(chosen), rounds)
    for partition, rank in zip(chosen, ranks.tolist(), strict=True):
        exact = problem.exact_s(Candidate(partition, rounds))
        assert rank <= exact * (1 + 1e-9) + 1e-12
        times = problem.sums.times(partition.forward, partition.fused, partition.backward, rounds=rounds)
        if max(times.boundary_from) < 0 and not times.jobs:
            assert rank == pytest.approx(exact, rel=1e-9, abs=1e-12)


def test_rows_hold_the_layers_of_each_stage():
    for partition in all_partitions(5):
        rows = joined([batch_of([partition]), batch_of(all_partitions(5)[:3])])
        starts, stops = rows.ranges(5)
        stages = partition.stages()
        assert starts[0, : len(stages)].tolist() == [stage.start for stage in stages]
        assert stops[0, : len(stages)].tolist() == [stage.stop for stage in stages]
        assert not stops[0, len(stages) :].any()
        assert rows.partition(0) == partition


@settings(max_examples=100)  # they take milliseconds
@given(
    data=st.data(),
    costs=costs(jobs=True),
    limits=limits(),
    update=UPDATES,
    devices=st.integers(1, 9),
    micro_batches=st.integers(1, 8),
)
def test_rows_fit_exactly_if_the_memory_model_says_so(data, costs, limits, update, devices, micro_batches):
    problem = PlanningProblem(costs, devices, micro_batches, update, limits)
    chosen = data.draw(st.lists(partitions(costs.num_layers), min_size=1, max_size=6))
    rounds = data.draw(st.integers(1, micro_batches))
    expected = []
    for partition in chosen:
        device = device_memory(partition, costs, devices, -(-micro_batches // rounds), limits).total_bytes
        host = boundary_pool_bytes(partition, costs, devices, micro_batches, rounds, update)
        fits_device = limits.device_bytes is None or device <= limits.device_bytes
        expected.append(fits_device and (limits.host_bytes is None or host <= limits.host_bytes))
    assert np.asarray(problem.fits(batch_of(chosen), rounds)).tolist() == expected
