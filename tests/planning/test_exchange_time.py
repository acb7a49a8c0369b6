"""The simulated exchange against the step time of one machine, closed forms and what the links must carry."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_costs import costs, partitions
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.exchange_time import Exchange, ExchangedBundle, exchange_step_seconds
from torchround.planning.partition import Partition, split_evenly
from torchround.planning.stage_times import LayerSums
from torchround.planning.step_time import step_seconds

SIZES = {"devices": st.integers(1, 5), "update": st.sampled_from(["sync", "async", "bounded"])}


@st.composite
def exchanges(draw):
    drawn = draw(costs(max_layers=9))
    rounds = draw(st.integers(1, 3))
    sizes = [len(part) for part in split_evenly(draw(st.integers(rounds, 12)), rounds)]
    partition = draw(partitions(drawn.num_layers))
    layers = enumerate(drawn.layers)
    bundles = [ExchangedBundle(draw(st.integers(1, 100)), (index,), layer.optimizer_s) for index, layer in layers]
    return partition, LayerSums(drawn), sizes, tuple(bundles)


def seconds(drawn, devices, update, num_machines, bytes_per_s):
    partition, sums, sizes, bundles = drawn
    exchange = Exchange(bundles, num_machines, bytes_per_s, 2, 2)
    stale = sum(partition.forward) // 2
    times = sums.times(partition, update, len(sizes), stale)
    return exchange_step_seconds(times, sizes, devices, exchange, stale)


@given(drawn=exchanges(), **SIZES)
def test_one_machine_takes_the_step_time_of_its_plan(drawn, devices, update):
    partition, sums, sizes, bundles = drawn
    if update == "bounded":  # whose steps have one round
        sizes = [sum(sizes)]
        drawn = partition, sums, sizes, bundles
    times = sums.times(partition, update, len(sizes), sum(partition.forward) // 2)
    alone_s = step_seconds(times, devices, sum(sizes), len(sizes))
    assert seconds(drawn, devices, update, 1, 1.0) == pytest.approx(alone_s, rel=1e-9, abs=1e-12)


@given(drawn=exchanges(), machines=st.integers(2, 4), rate=st.sampled_from([5.0, 20.0, 60.0]), **SIZES)
def test_no_step_is_shorter_than_what_its_links_must_carry(drawn, devices, update, machines, rate):
    _, _, sizes, bundles = drawn
    gradients, weights = Exchange(bundles, machines, rate, 2, 2).wire_bytes(len(sizes))
    step_s = seconds(drawn, devices, update, machines, rate)
    # The busiest link of the gradients may be another one than that of the weights, but in `sync` one follows the other.
    least_s = (gradients + weights if update == "sync" else max(gradients, weights)) / rate
    assert step_s >= least_s * (1 - 1e-12)
    assert step_s >= seconds(drawn, devices, update, machines, math.inf) * (1 - 1e-12)
    assert step_s <= seconds(drawn, devices, update, machines, rate / 2) * (1 + 1e-12)


def two_equal_layers(update, bytes_per_s):
    """Time two layers in one fused stage on one device: a step computes for 8 s; each machine owns a layer of 100 bytes."""
    costs = Costs((LayerCost("a", 1, 1), LayerCost("b", 1, 1)))
    exchange = Exchange((ExchangedBundle(50, (0,)), ExchangedBundle(50, (1,))), 2, bytes_per_s, 2, 2)
    partition = Partition((), 2, ())
    return exchange_step_seconds(LayerSums(costs).times(partition, update), [2], 1, exchange)


def test_a_single_stage_hides_nothing_in_sync_and_all_it_can_in_async():
    # Gradients leave when the only stage ends, and it cannot begin again before all weights are back.
    assert two_equal_layers("sync", 50.0) == pytest.approx(8 + 2 + 2)
    assert two_equal_layers("bounded", 50.0) == pytest.approx(8 + 2 + 2)
    # One step computes while the exchange of the step before is under way.
    assert two_equal_layers("async", 50.0) == pytest.approx(8)
    assert two_equal_layers("async", 10.0) == pytest.approx(20)


def test_the_busiest_link_carries_the_share_of_all_other_machines():
    bundles = tuple(ExchangedBundle(120, (index,)) for index in range(8))
    for num_machines in (2, 8):
        share = (num_machines - 1) / num_machines
        assert Exchange(bundles, num_machines, 1.0, 2, 2).wire_bytes(3) == (3 * 2 * 960 * share, 2 * 960 * share)
    # Both uses of a tied matrix send a part, and its weights come back once.
    tied = (ExchangedBundle(100, (0, 3)), ExchangedBundle(100, (1,)))
    assert Exchange(tied, 2, 1.0, 2, 2).wire_bytes(1) == (2 * 2 * 100, 2 * 100)
