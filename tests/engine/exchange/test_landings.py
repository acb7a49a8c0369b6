"""The memory in which parts of gradients land: which parts share it, and the host memory of each of several machines."""

import pytest
import torch
from torch import nn

from tests.support.toy import toy_model
from torchround.engine.board import Board, Observer
from torchround.engine.exchange import StepExchange
from torchround.engine.store.bundles import Ownership
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel
from torchround.run.numbers import num_parameters


def landings_of(store, pool):
    rank, size = store.ownership.machine, store.ownership.num_machines
    group = type("Group", (), {"rank": rank, "size": size, "peers": (), "on_fault": lambda *_: None})()
    exchange = StepExchange(store, Board(), pool, group)
    return exchange.landings


@pytest.mark.parametrize("num_machines", [2, 3])
def test_each_machine_holds_its_share_of_the_state_and_little_else(num_machines):
    """In bytes per parameter: 2 of weights, 12 / N of state, 4 / N of sums, and the places in which parts land."""
    squares = tuple(nn.Linear(256, 256, bias=False, device="meta") for _ in range(64))
    model = LayeredModel(tuple(f"block.{index}" for index in range(64)), squares)
    for machine in range(num_machines):
        store = HostStore(model, torch.bfloat16, ownership=Ownership(machine, num_machines))
        store.allocate_gradients(rounds=2)
        pool = HostPool(False, Observer())
        landings_of(store, pool)
        held = store.nbytes() + pool.allocated_bytes
        assert held <= (4.3 + 12 / num_machines) * num_parameters(model)[0]
        store.close()


def test_parts_of_one_size_land_in_turn_and_those_of_shared_bundles_apart():
    store, pool = HostStore(toy_model(tied=True), ownership=Ownership(0, 2)), HostPool(False, Observer())
    store.allocate_gradients(rounds=1)
    landings = landings_of(store, pool)
    tied, *blocks, head = [bundle.index for bundle in store.trained]
    assert landings.keys() == {(tied, 0), (tied, 1), (head, 0)} | {(index, 0) for index in blocks}
    for lower, one, deeper in zip(blocks, blocks[1:], blocks[2:], strict=False):
        assert landings[lower, 0] is landings[deeper, 0] is not landings[one, 0]
    memory = {place.content.memory.data_ptr(): place.content.memory.numel() for place in landings.values()}
    assert len(memory) == 3 + 2
    assert sum(memory.values()) == pool.reserved_bytes == pool.allocated_bytes
