"""The race checker on steps of several calls: it finds nothing, and it finds the race if a rule is taken out."""

import pytest
import torch

from tests.support.planted_races import gradient_before_it_landed
from tests.support.toy import PARTITIONS, linked, toy_batches, toy_engine, toy_model, toy_store, watched
from torchround.engine.landed_gradients import LandedGradients
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC
from torchround.engine.watch.race_checker import AccessLog, find_races


def races(policy=SYNC, partition="backward coarser", num_devices=3, tied=False, rounds=1, evaluates=False, **options):
    """Return the races of three steps of two calls each."""
    log, model = AccessLog(), toy_model(tied)
    store = toy_store(model, policy=policy, **options)
    settings = {"observer": log, "wrap": lambda device: watched(linked(device), log), "rounds": rounds}
    with toy_engine(model, store, PARTITIONS[partition], num_devices, accumulates=True, **settings) as engine:
        for step, micro_batches in enumerate(toy_batches(3, micro_batches=8)):
            if evaluates and step == 1:
                engine.evaluate(micro_batches[:4])  # not awaited, so that it runs beside the calls
            for part in (micro_batches[:4], micro_batches[4:]):
                result = engine.forward_backward(part)
            engine.step(1e-2)
            if evaluates and step == 1:
                result.update()  # first: asking for the evaluation's loss would order the two
        engine.drain()
    assert sum(entry.action == "access" for entry in log.entries) > 100
    return find_races(log.entries)


@pytest.mark.parametrize("policy", [SYNC, ASYNC, ASYNC_PREDICT], ids=["sync", "async", "predict"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_devices": 1, "evaluates": True},
        {"tied": True, "rounds": 2, "evaluates": True},
        {"dtype": torch.bfloat16, "partition": "one layer a stage", "num_devices": 2},
    ],
    ids=str,
)
def test_no_race_with_several_calls(policy, options):
    assert races(policy, **options) == []


def test_rule_2_an_upload_waits_for_the_complete_version(monkeypatch):
    """The first call of a step may be dispatched before the update that it waits for has begun."""
    monkeypatch.setattr(Ordering, "before_upload", lambda *_: None)
    assert races(partition="forward coarser")


def part_given_back_before_it_is_added(monkeypatch):
    """Let a device take the buffer of a part that the optimizer has not added yet."""
    add_up = LandedGradients._add_up

    def adding(landed, bundle, step, parts, landings):
        give, given = landed._landings.give, list(landings)
        for buffer in given:
            give(buffer, busy=[])
        monkeypatch.setattr(landed._landings, "give", lambda buffer, busy: None)
        add_up(landed, bundle, step, parts, landings)
        monkeypatch.setattr(landed._landings, "give", give)

    monkeypatch.setattr(LandedGradients, "_add_up", adding)


def test_rule_3_a_part_is_added_only_after_it_landed(monkeypatch):
    planted = gradient_before_it_landed(monkeypatch)
    assert races(partition="forward coarser")
    assert planted.times > 0


def test_the_buffer_of_a_part_is_given_back_only_after_it_is_added(monkeypatch):
    part_given_back_before_it_is_added(monkeypatch)
    assert races(partition="forward coarser")
