"""The landing window: its places, who had them before, and the host memory of each of several machines."""

import itertools
import random

import pytest
import torch
from torch import nn

from tests.support.toy import toy_model
from torchround.engine.board import Observer
from torchround.engine.landings import Landings, ring_places, shared_pieces
from torchround.engine.store.bundles import Ownership
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel
from torchround.planning.machine_shares import landing_window_bytes


def test_places_share_pieces_exactly_if_they_overlap():
    generator = random.Random(0)
    for _ in range(200):
        sizes = [generator.randrange(1, 9) for _ in range(generator.randrange(1, 12))]
        window = landing_window_bytes(sizes) + generator.randrange(3)
        starts = ring_places(sizes, window)
        assert all(start >= 0 and start + size <= window for start, size in zip(starts, sizes, strict=True))
        taken = [set(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
        pieces = [set(map(id, own)) for own in shared_pieces(starts, sizes)]
        for first, second in itertools.combinations(range(len(sizes)), 2):
            assert bool(taken[first] & taken[second]) is bool(pieces[first] & pieces[second])


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(256, 256, device="meta"))


@pytest.mark.parametrize("num_machines", [2, 3])
def test_each_machine_holds_its_share_of_the_state_and_little_else(num_machines):
    """In bytes per parameter: 2 of weights, 12 / N of state, 4 / N of sums, and the landing window."""
    model = LayeredModel(tuple(f"block.{index}" for index in range(64)), tuple(Square() for _ in range(64)))
    for machine in range(num_machines):
        store = HostStore(model, torch.bfloat16, ownership=Ownership(machine, num_machines))
        store.allocate_gradients(rounds=2)
        pool = HostPool(False, Observer())
        landings = Landings(store, pool)
        assert not landings.needed(), "no bundle of this model is shared"
        held = store.nbytes() + pool.allocated_bytes
        assert held <= (4.3 + 12 / num_machines) * store.num_parameters()
        store.close()


def test_parts_of_shared_bundles_land_outside_the_window():
    store = HostStore(toy_model(tied=True), ownership=Ownership(0, 2))
    store.allocate_gradients(rounds=1)
    landings = Landings(store, HostPool(False, Observer()))
    [tied] = [bundle for bundle in store.bundles if len(bundle.layers) > 1]
    assert landings.needed() == {tied.numel * 4: 2}
    assert landings.take(tied) is not landings.take(tied)
    for bundle in store.trained:
        if bundle is not tied:
            assert landings.take(bundle) is landings.take(bundle)
