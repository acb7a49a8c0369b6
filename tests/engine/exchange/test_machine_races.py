"""The race checker finds nothing on any of several machines, and a race for each wait of the exchange that orders nothing.

Each machine's run is judged by itself, by what was synchronised and not by what happened to run first.
"""

import pytest
import torch

from tests.support.faults import DeafLog
from tests.support.machines import run_machines
from tests.support.shared_steps import Case
from tests.support.toy import PARTITIONS, toy_batches, toy_model
from torchround.engine.exchange.weight_encoding import SPACE_FREE
from torchround.engine.exchange.weights import REWRITTEN
from torchround.engine.ordering import GRADIENT_LANDED, PART_CONSUMED, SENT, UPLOADED, WEIGHTS, Ordering
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC
from torchround.engine.watch.race_checker import AccessLog, find_races

UNEVEN = [batch[:count] for batch, count in zip(toy_batches(4, 8), (8, 2, 5, 8), strict=True)]


def case_of(policy):
    return Case(UNEVEN, num_devices=2, store={"policy": policy}, evaluates=True)


def tied(policy, **options):
    options = {"num_devices": 3, "partition": PARTITIONS["backward coarser"], "dtype": torch.bfloat16} | options
    return Case(UNEVEN, lambda: toy_model(tied=True), store={"policy": policy}, **{"evaluates": True, **options})


def poison(store):
    for device_weights in store.bundles[1].device_weights:
        device_weights.fill_(torch.inf)


def races(case, num_machines=2, log=AccessLog):
    """Return the races of all machines of a recorded run."""

    def run(group):
        own = log()
        case.run(group, own)
        assert sum(entry.action == "access" for entry in own.entries) > 100
        return find_races(own.entries)

    return [race for found in run_machines(num_machines, run) for race in found]


COMPRESSED = {"settings": {"compress_weights": True}, "spikes": (0.01, 1), "num_devices": 2}
CLEAN = {
    "sync, three machines": (3, tied(SYNC, rounds=2)),
    "async, two machines": (2, tied(ASYNC, rounds=2)),
    "predict, three machines": (3, tied(ASYNC_PREDICT, rounds=2)),
    "skipped steps": (2, Case(UNEVEN[:3], store={"policy": ASYNC}, before=poison)),
    # Of compressed weights, with a step that a spike skips. At the larger rate the weights themselves are sent.
    "compressed, sync": (2, tied(SYNC, lr=1e-5, **COMPRESSED)),
    "compressed, async": (2, tied(ASYNC, lr=1e-2, **COMPRESSED)),
    "compressed, predict": (2, tied(ASYNC_PREDICT, lr=1e-5, **COMPRESSED)),
    "compressed, true weights": (2, tied(ASYNC_PREDICT, lr=1e-5, true_weights=True, **COMPRESSED)),
}


@pytest.mark.parametrize("name", CLEAN)
def test_there_is_no_race_on_any_machine(name):
    num_machines, case = CLEAN[name]
    assert races(case, num_machines) == []


# What orders nothing, for which threads, and the case that needs it.
READERS = (UPLOADED, "uploads finished")
RULES = {
    "1, before weights are received": (READERS, "torchround weights from", 3, case_of(ASYNC)),
    "2, before weights are sent": ((WEIGHTS,), "torchround weights to", 3, case_of(SYNC)),
    "2, before weights are encoded": ((WEIGHTS,), "torchround encoder", 2, tied(SYNC, lr=1e-2, **COMPRESSED)),
    "3, before a gradient is sent": ((GRADIENT_LANDED,), "torchround gradients to", 3, case_of(SYNC)),
    "4, after a gradient is sent": ((PART_CONSUMED,), "torchround gradients to", 3, case_of(SYNC)),
    "7": ((SENT,), "torchround optimizer", 3, case_of(SYNC)),
    "an encoder's space": ((SPACE_FREE,), "torchround optimizer", 2, tied(SYNC, lr=1e-2, **COMPRESSED)),
    "rewritten weights": ((REWRITTEN,), "node", 2, tied(ASYNC_PREDICT, lr=1e-5, true_weights=True, **COMPRESSED)),
    "evaluations before a rewrite": (READERS, "node", 2, tied(ASYNC_PREDICT, true_weights=True, **COMPRESSED)),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_wait_of_the_exchange_orders_something(rule):
    kinds, threads, num_machines, case = RULES[rule]
    assert races(case, num_machines, lambda: DeafLog(*kinds, threads=threads)) != []


def test_rule_8_parts_that_had_the_memory_before_are_consumed(monkeypatch):
    monkeypatch.setattr(Ordering, "limit_landings", lambda *arguments: None)
    assert races(case_of(SYNC), 3) + races(case_of(ASYNC), 3) != []
