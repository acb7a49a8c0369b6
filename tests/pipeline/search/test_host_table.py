"""The search decides about host memory by bounds of the count that the engine reserves by, never against that count."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_costs import partitions
from torchround.pipeline.costs import Costs, KeptCost, LayerCost
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.pool_count import HostBatch, PoolCount
from torchround.pipeline.search.host_table import HostTable
from torchround.pipeline.search.partition_batch import batch_of

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
