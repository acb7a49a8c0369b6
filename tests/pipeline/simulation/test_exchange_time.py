"""The simulated exchange against the step time of one machine, closed forms and what the links must carry."""

import math
import random

import pytest

from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.partition import Partition, split_evenly
from torchround.pipeline.simulation.exchange_time import Exchange, ExchangedBundle, exchange_step_seconds
from torchround.pipeline.simulation.step_time import stage_times, step_seconds

MODES = ("sync", "async")


def random_run(seed):
    """Draw a partition, its costs, devices, the micro-batches of each round and the trained parameters of each layer."""
    draw = random.Random(seed)

    def cut(total):
        counts = []
        while total:
            counts.append(draw.randint(1, total))
            total -= counts[-1]
        return tuple(counts)

    layers = [
        LayerCost(f"{index}", draw.uniform(0.5, 2), draw.uniform(1, 4), optimizer_s=draw.choice([0, 0.3]))
        for index in range(draw.randint(3, 9))
    ]
    split, rounds = draw.randint(1, len(layers) - 1), draw.randint(1, 3)
    partition = Partition(cut(split), len(layers) - split, cut(split))
    sizes = [len(part) for part in split_evenly(draw.randint(rounds, 12), rounds)]
    bundles = tuple(
        ExchangedBundle(draw.randint(1, 100), (index,), layer.optimizer_s) for index, layer in enumerate(layers)
    )
    return partition, Costs(tuple(layers), 0.1), draw.randint(1, 5), sizes, bundles


def seconds(seed, update, num_machines, bytes_per_s):
    partition, costs, devices, sizes, bundles = random_run(seed)
    exchange = Exchange(bundles, num_machines, bytes_per_s, 2, 2)
    times = stage_times(partition, costs, rounds=len(sizes))
    return exchange_step_seconds(partition, times, sizes, devices, update, exchange)


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_one_machine_takes_the_step_time_of_its_plan(update, seed):
    partition, costs, devices, sizes, _ = random_run(seed)
    times = stage_times(partition, costs, rounds=len(sizes))
    alone_s = step_seconds(times, devices, sum(sizes), len(sizes), update)
    assert seconds(seed, update, 1, 1.0) == pytest.approx(alone_s, rel=1e-9)


@pytest.mark.parametrize("update", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_no_step_is_shorter_than_what_its_links_must_carry(update, seed):
    _, _, _, sizes, bundles = random_run(seed)
    for num_machines, rate in ((2, 20.0), (3, 60.0), (4, 5.0)):
        exchange = Exchange(bundles, num_machines, rate, 2, 2)
        gradients, weights = exchange.wire_bytes(len(sizes))
        step_s = seconds(seed, update, num_machines, rate)
        # The busiest link of the gradients may be another one than that of the weights, but in `sync` one follows the other.
        least_s = (gradients + weights if update == "sync" else max(gradients, weights)) / rate
        assert step_s >= least_s * (1 - 1e-12)
        assert step_s >= seconds(seed, update, num_machines, math.inf) * (1 - 1e-12)
        assert step_s <= seconds(seed, update, num_machines, rate / 2) * (1 + 1e-12)


def two_equal_layers(update, bytes_per_s):
    """Time two layers in one fused stage on one device: a step computes for 8 s; each machine owns a layer of 100 bytes."""
    costs = Costs((LayerCost("a", 1, 1), LayerCost("b", 1, 1)))
    exchange = Exchange((ExchangedBundle(50, (0,)), ExchangedBundle(50, (1,))), 2, bytes_per_s, 2, 2)
    partition = Partition((), 2, ())
    return exchange_step_seconds(partition, stage_times(partition, costs), [2], 1, update, exchange)


def test_a_single_stage_hides_nothing_in_sync_and_all_it_can_in_async():
    # Gradients leave when the only stage ends, and it cannot begin again before all weights are back.
    assert two_equal_layers("sync", 50.0) == pytest.approx(8 + 2 + 2)
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
    with pytest.raises(ValueError, match="bounded"):
        seconds(0, "bounded", 2, 1.0)
