"""The race checker on Muon's jobs: clean as they are, and a race for each of their two ordering rules without its wait."""

import time

import pytest
import torch

from tests.engine.test_muon import LR, muon_engine, muon_store
from tests.support.toy import linked, toy_batches, toy_model, watched
from torchround.engine.ordering import DIRECTION_LANDED, Ordering
from torchround.engine.store.bundles import ASYNC, SYNC
from torchround.engine.watch.race_checker import AccessLog, find_races


def races(policy, num_devices=3, **options):
    log, model = AccessLog(), toy_model()
    store = muon_store(model, policy=policy, dtype=torch.bfloat16)

    def wrap(device):
        return watched(linked(device), log)

    with muon_engine(model, store, num_devices, observer=log, wrap=wrap, **options) as engine:
        for micro_batches in toy_batches(4, micro_batches=4):
            engine.forward_backward(micro_batches)
            engine.step(LR)
        engine.drain()
    return find_races(log.entries)


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize("num_devices", [1, 3])
def test_no_race_with_directions(num_devices, policy):
    assert races(policy, num_devices) == []
    assert races(policy, num_devices, rounds=2) == []


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_a_look_ahead_that_is_uploaded_before_it_is_written_is_a_race(monkeypatch, policy):
    monkeypatch.setattr(Ordering, "before_look_ahead_upload", lambda self, bundle, step: None)
    assert races(policy)


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_a_direction_that_is_read_before_it_has_landed_is_a_race(monkeypatch, policy):
    def unseen(self, bundle, step):
        key = DIRECTION_LANDED(step, bundle)
        while not self._board.ready(key):
            self._board.raise_if_stopped()
            time.sleep(1e-4)
        return self._board._values[key.kind][key]

    monkeypatch.setattr(Ordering, "before_direction_read", unseen)
    assert races(policy)
