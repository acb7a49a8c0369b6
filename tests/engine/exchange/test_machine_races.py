"""The race checker finds nothing on any of several machines.

Each machine's run is judged by itself, by what was synchronised and not by what happened to run first.
"""

import pytest
import torch

from tests.support.engine_rows import Row, validate_true_weights
from tests.support.machines import run_machines
from tests.support.toy import linked, toy_batches, watched
from torchround.engine.landings import Landings
from torchround.engine.watch.race_checker import AccessLog, find_races

UNEVEN = [batch[:count] for batch, count in zip(toy_batches(4, 8), (6, 1, 4, 5), strict=True)]


def plain(machines, update, **options):
    return Row(2, machines, "forward", update, **{"batches": UNEVEN, "evaluates": True} | options)


def tied(machines, update, **options):
    usual = {"devices": 2, "cut": "backward", "dtype": "bf16", "batches": UNEVEN, "evaluates": True}
    return Row(machines=machines, update=update, tied=True, **usual | options)


def poison(store):
    for device_weights in store.bundles[1].device_weights:
        device_weights.fill_(torch.inf)


RUNS = {
    "sync": plain(3, "sync"),
    "async": plain(3, "async"),
    "sync, tied": tied(3, "sync", rounds=2, devices=3),
    "async, muon": tied(2, "async", optimizer="muon8"),
    "predict, tied": tied(3, "predict", rounds=2, devices=3),
    "skipped steps": plain(2, "async", before=poison, evaluates=False),
    "true weights": tied(2, "predict", after_step=validate_true_weights),
    "stale, true weights": tied(2, "stale", clip="layer", rounds=2, after_step=validate_true_weights),
    "stale, several calls": tied(3, "stale", clip="layer", calls=2),
}


def logs_of(row):
    """Return the log of each machine of a run."""

    def run(group):
        own = AccessLog()
        row.run(group, observer=own, wrap=lambda device: watched(linked(device), own))
        assert sum(entry.action == "access" for entry in own.entries) > 100
        return own.entries

    return run_machines(row.machines, run)


@pytest.mark.parametrize("name", RUNS)
def test_there_is_no_race_on_any_machine(name):
    assert [race for log in logs_of(RUNS[name]) for race in find_races(log)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["adamw", "adamw8", "muon", "muon8"])
def test_there_is_no_race_with_any_optimizer(name):
    assert [find_races(log) for log in logs_of(tied(3, "async", optimizer=name))] == [[]] * 3


def test_rule_8_parts_that_had_the_memory_before_are_consumed(monkeypatch):
    buffers = Landings.buffers
    # Each bundle's parts as if they had memory of their own.
    monkeypatch.setattr(Landings, "buffers", lambda *arguments: buffers(*arguments)[:1])
    assert any(find_races(log) for log in logs_of(plain(3, "sync")))
