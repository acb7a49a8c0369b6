"""Many partitions at once: their ranks against exact step times, and their memory against the engine's count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_costs import LINKS, costs, limits, partitions
from torchround.pipeline.costs import Costs, KeptCost, LayerCost
from torchround.pipeline.memory import MemoryLimits, device_memory
from torchround.pipeline.pool_count import HostBatch, PoolCount, boundary_pool_bytes
from torchround.pipeline.search.host_table import HostTable
from torchround.pipeline.search.partition_batch import Candidate, batch_of
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


# The search decides about host memory by bounds of the count that the engine reserves by, never against that count.


LAYERS = 6


@st.composite
def batches(draw):
    """Draw micro-batches of up to two sizes, with boundaries that are alike or not, in bytes or in pages.

    Each layer can keep `down`, of the same bytes in each layer or not.
    """
    outputs = st.tuples(*[st.integers(1, 9000)] * LAYERS) | st.builds(lambda n: (n,) * LAYERS, st.integers(1, 9000))
    output_bytes = tuple(draw(st.lists(outputs, min_size=1, max_size=2)))
    keepable = [[{"down": nbytes} for nbytes in draw(outputs)] for _ in output_bytes]
    sizes = draw(st.lists(st.integers(0, len(output_bytes) - 1), min_size=1, max_size=7))
    return HostBatch(
        # Longer micro-batches come first, as a batch is cut.
        sizes=tuple(sorted(sizes)),
        output_bytes=output_bytes,
        integer_bytes=draw(st.sampled_from([None, (100, 5000)[: len(output_bytes)]])),
        frozen_layers=draw(st.sampled_from([0, 2, LAYERS])),
        validates=draw(st.booleans()),
        keepable_bytes=tuple(tuple(of_size) for of_size in keepable),
    )


@given(
    batch=batches(),
    chosen=st.lists(partitions(LAYERS), min_size=1, max_size=3),
    num_devices=st.integers(1, 8),
    rounds=st.integers(1, 7),
    update=st.sampled_from(["sync", "async"]),
    kept=st.lists(st.sampled_from([(), ("down",)]), min_size=LAYERS, max_size=LAYERS),
)
def test_a_plan_fits_exactly_where_the_pool_of_the_engine_does(batch, chosen, num_devices, rounds, update, kept):
    parts = (KeptCost("down", 1, 0.5),)
    layers = (LayerCost(str(n), 1.0, 2.0, boundary_bytes=1, keepable=parts) for n in range(LAYERS))
    costs = Costs(tuple(layers)).keeping(kept)
    rounds, rows = min(rounds, len(batch.sizes)), batch_of(chosen)
    pool, every = PoolCount(batch, num_devices, update), np.ones(len(chosen), dtype=np.bool_)
    nothing = np.zeros(len(chosen), dtype=np.int64)
    counted = [pool.nbytes(partition, rounds, costs.kept) for partition in chosen]

    def table(host_bytes):
        limits = MemoryLimits(host_bytes=host_bytes, batch=batch)
        return HostTable(costs, limits, num_devices, len(batch.sizes), update)

    assert (table(0).bytes_of(rows, rounds, nothing) <= counted).all()
    for limit in {*counted, *(max(0, nbytes - 1) for nbytes in counted)}:
        fits = table(limit).fits(rows, rounds, nothing, every)
        assert fits.tolist() == [nbytes <= limit for nbytes in counted]
