"""The race checker finds nothing on any of several machines, and a race for each wait of the exchange that orders nothing.

Each machine's run is judged by itself, by what was synchronised and not by what happened to run first.
"""

import pytest
import torch

from tests.support.faults import deaf
from tests.support.machines import run_machines
from tests.support.optimizers import OPTIMIZERS
from tests.support.shared_steps import Case
from tests.support.toy import PARTITIONS, toy_batches, toy_model
from torchround.engine.exchange.weight_encoding import SPACE_FREE
from torchround.engine.exchange.weights import REWRITTEN
from torchround.engine.ordering import GRADIENT_LANDED, PART_CONSUMED, SENT, UPLOADED, WEIGHTS, Ordering
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC
from torchround.engine.watch.race_checker import AccessLog, find_races

UNEVEN = [batch[:count] for batch, count in zip(toy_batches(4, 8), (6, 1, 4, 5), strict=True)]


def case(policy, build=toy_model, **options):
    options = {"num_devices": 2, "evaluates": True} | options
    return Case(UNEVEN, build, store={"policy": policy}, **options)


def tied(policy, **options):
    options = {"partition": PARTITIONS["backward coarser"], "dtype": torch.bfloat16} | options
    return case(policy, lambda: toy_model(tied=True), **options)


def poison(store):
    for device_weights in store.bundles[1].device_weights:
        device_weights.fill_(torch.inf)


# By rule: what orders nothing, and for which threads.
READERS = (UPLOADED, "uploads finished")
RULES = {
    "1, before weights are received": (READERS, "torchround weights from"),
    "2, before weights are sent": ((WEIGHTS,), "torchround weights to"),
    "2, before weights are encoded": ((WEIGHTS,), "torchround encoder"),
    "3, before a gradient is sent": ((GRADIENT_LANDED,), "torchround gradients to"),
    "4, after a gradient is sent": ((PART_CONSUMED,), "torchround gradients to"),
    "7": ((SENT,), "torchround optimizer"),
    "an encoder's space": ((SPACE_FREE,), "torchround optimizer"),
    "rewritten weights": ((REWRITTEN,), "node"),
    "evaluations before a rewrite": (READERS, "node"),
}
SENDS = ("2, before weights are sent", "3, before a gradient is sent", "4, after a gradient is sent", "7")
ENCODES = ("2, before weights are encoded", "an encoder's space")
REWRITES = ("rewritten weights", "evaluations before a rewrite")
# Of compressed weights, with a step that a spike skips. At the larger rate the weights themselves are sent.
COMPRESSED = {"settings": {"compress_weights": True}, "spikes": (0.01, 1)}
# Machines, what they do, and the rules without which a machine has a race.
RUNS = {
    "sync": (3, case(SYNC), SENDS),
    "async": (3, case(ASYNC), ("1, before weights are received",)),
    "sync, tied": (3, tied(SYNC, rounds=2, num_devices=3), SENDS),
    "async, muon": (2, tied(ASYNC, optimizer=OPTIMIZERS["muon compact"]), ()),
    "predict, tied": (3, tied(ASYNC_PREDICT, rounds=2, num_devices=3), SENDS),
    "skipped steps": (2, case(ASYNC, before=poison, evaluates=False), ()),
    "compressed, sync": (2, tied(SYNC, lr=1e-2, **COMPRESSED), ENCODES),
    "compressed, async": (2, tied(ASYNC, lr=1e-5, **COMPRESSED), ()),
    "compressed, true weights": (2, tied(ASYNC_PREDICT, lr=1e-5, true_weights=True, **COMPRESSED), REWRITES),
}


def logs_of(num_machines, case):
    """Return the log of each machine of a run."""

    def run(group):
        own = AccessLog()
        case.run(group, own)
        assert sum(entry.action == "access" for entry in own.entries) > 100
        return own.entries

    return run_machines(num_machines, run)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n == "compressed, async")) for n in RUNS]
)
def test_there_is_no_race_on_any_machine_but_without_any_of_the_rules_that_a_run_needs(name):
    num_machines, case, rules = RUNS[name]
    logs = logs_of(num_machines, case)
    assert [race for log in logs for race in find_races(log)] == []
    assert [rule for rule in rules if not any(find_races(deaf(log, *RULES[rule])) for log in logs)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_there_is_no_race_with_any_optimizer(name):
    assert [find_races(log) for log in logs_of(3, tied(ASYNC, optimizer=OPTIMIZERS[name]))] == [[]] * 3


def test_rule_8_parts_that_had_the_memory_before_are_consumed(monkeypatch):
    monkeypatch.setattr(Ordering, "limit_landings", lambda *arguments: None)
    assert any(find_races(log) for log in logs_of(3, case(SYNC)))
