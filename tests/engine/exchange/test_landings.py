"""The landing window: its places, who had them before, and the host memory of each of several machines."""

import random

import pytest
import torch
from torch import nn

from tests.support.toy import toy_model
from torchround.engine.board import Board, Observer
from torchround.engine.exchange.landings import RingLandings, overlapped_places, ring_places
from torchround.engine.ordering import Ordering
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.store.ownership import Ownership
from torchround.layer import LayeredModel
from torchround.planning.machine_shares import landing_window_bytes


def test_a_part_waits_for_exactly_the_parts_that_had_its_memory():
    """Let parts land one after the other for three rounds, and write down who was the last on each byte."""
    generator = random.Random(0)
    for _ in range(200):
        sizes = [generator.randrange(1, 9) for _ in range(generator.randrange(1, 12))]
        window = landing_window_bytes(sizes) + generator.randrange(3)
        starts = ring_places(sizes, window)
        overlapped = overlapped_places(sizes, starts)
        last_on = {}
        for round_index in range(3):
            for position, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                assert start >= 0 and start + size <= window
                seen = {last_on[byte] for byte in range(start, start + size) if byte in last_on}
                if round_index:  # the first round finds memory that no part had
                    assert seen == {(at, round_index - back) for at, back in overlapped[position]}
                last_on |= dict.fromkeys(range(start, start + size), (position, round_index))


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
        landings = RingLandings(store, pool, Ordering(Board(), store.policy.versions))
        assert not landings.needed(), "no bundle of this model is shared"
        held = store.nbytes() + pool.allocated_bytes
        assert held <= (4.3 + 12 / num_machines) * store.num_parameters()
        store.close()


def test_parts_of_shared_bundles_land_outside_the_window():
    store = HostStore(toy_model(tied=True), ownership=Ownership(0, 2))
    landings = RingLandings(store, HostPool(False, Observer()), Ordering(Board(), 1))
    [tied] = [bundle for bundle in store.bundles if len(bundle.layers) > 1]
    assert landings.needed() == {tied.numel * 4: 2}
    assert landings.take(tied) is not landings.take(tied)
    for bundle in store.trained:
        if bundle is not tied:
            assert landings.take(bundle) is landings.take(bundle)
