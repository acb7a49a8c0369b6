"""Planted faults in bounded and predicted updates: what is left is whole, or is marked as mixed and never trained on.

After a fault either the store holds a whole number of updates and training continues from it, or it says that it does
not. Then a new engine refuses it, and training continues from what was saved before. Both end at the bits of a run
without a fault.
"""

import itertools
import threading
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from tests.support.kept_faults import Bomb, PlantedError
from tests.support.planted_hangs import over, planted
from tests.support.toy import KEPT, PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_model, toy_store, train
from tests.support.update_faults import BOUNDED_SITES, LAGGING_SITES, after, before, twice
from torchround.engine import optimizer_worker
from torchround.engine.board import Board
from torchround.engine.errors import EngineUsageError, HangError, PipelineError
from torchround.engine.ordering import GRADIENT_LANDED, UPLOADED, WEIGHTS
from torchround.engine.store import prediction
from torchround.engine.store.bundles import ASYNC_PREDICT, BOUNDED

__all__ = ["over", "planted"]

STEPS = 3
BATCHES = toy_batches(STEPS, micro_batches=3)
PARTITION = PARTITIONS["one layer a stage"]
ERRORS = (PlantedError, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit, MemoryError, StopIteration)


@dataclass(frozen=True)
class UpdateFault:
    """One planted fault in a bounded run; `stale_layers` is K."""

    site: str
    exception: type[BaseException]
    hit: int
    stale_layers: int
    num_devices: int
    kept: bool

    def __str__(self) -> str:
        what = f"{self.site}-{self.exception.__name__}-{self.hit}-K{self.stale_layers}-{self.num_devices}"
        return what.replace(" ", "_")


# These happen once in a step; the others happen at least nine times in a run.
ONCE_A_STEP = ("reading the losses", "deciding", "after all delayed copies")


def bounded_cases() -> list[UpdateFault]:
    """An early and a late fault at every site, over K, devices and whether the layers above K keep activations."""
    errors, devices = itertools.cycle(ERRORS), itertools.cycle((1, 2, 3, 8))
    some_lag, any_k = itertools.cycle((3, 6)), itertools.cycle((0, 3, 6))
    kept = itertools.cycle((False, False, True))
    return [
        UpdateFault(
            site, next(errors), hit, next(some_lag if site in LAGGING_SITES else any_k), next(devices), next(kept)
        )
        for site in (*BOUNDED_SITES, *LAGGING_SITES)
        for hit in (2, STEPS if site in ONCE_A_STEP else 9)
    ]


CASES = bounded_cases()


def copied(store):
    return {name: view.clone() for name, view in store.named_views().items()}


@cache
def undisturbed(stale_layers: int):
    """Return the state after 1, 2, .. steps, what a checkpoint holds beside it, and each step's loss."""
    model = toy_model(tied=True)
    store = toy_store(model, policy=BOUNDED)
    states, others, losses = {}, {}, []
    with toy_engine(model, store, PARTITION, 1, stale_layers=stale_layers) as engine:
        states[0], others[0] = copied(store), dict(store.resume_state())
        for step, batch in enumerate(BATCHES, start=1):
            losses += train(engine, [batch])
            states[step], others[step] = copied(store), dict(store.resume_state())
    return states, others, losses


def engine_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchround")]


def bounded_engine(store, num_devices, stale_layers, kept=False, **options):
    names = tuple(() if layer < stale_layers else of_layer for layer, of_layer in enumerate(KEPT["all"]))
    model = toy_model(tied=True)
    return toy_engine(
        model, store, PARTITION, num_devices, stale_layers=stale_layers, kept=names if kept else (), **options
    )


def check_continues(store, stale_layers, num_devices):
    """Train on from the store if it is whole, otherwise from a checkpoint of the step before; return whether it was."""
    states, others, losses = undisturbed(stale_layers)
    assert engine_threads() == []
    is_whole = store.is_consistent
    if not is_whole:
        with pytest.raises(EngineUsageError, match="mixes two weight versions"):
            bounded_engine(store, 1, stale_layers)
        saved = max(store.step - 1, 0)
        store = toy_store(toy_model(tied=True), policy=BOUNDED, seed=1)
        views = store.loadable_views()
        for name, value in states[saved].items():
            views[name].copy_(value)
        store.resume(saved, **others[saved])
    left = store.step
    store_views = store.named_views()
    assert_same_state(store_views, {name: states[left][name] for name in store_views})
    with bounded_engine(store, num_devices % 3 + 1, stale_layers) as engine:
        assert train(engine, BATCHES[left:]) == losses[left:]
    assert_same_state(store.named_views(), states[STEPS])
    return is_whole


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_in_a_bounded_step_leaves_whole_updates_or_a_store_that_is_marked(case: UpdateFault, monkeypatch):
    site, left = {**BOUNDED_SITES, **LAGGING_SITES}[case.site]
    bomb, store = Bomb(case.exception, case.hit), toy_store(toy_model(tied=True), policy=BOUNDED)
    with monkeypatch.context() as patch:
        site(patch, bomb)
        with (
            pytest.raises(PipelineError) as raised,
            bounded_engine(store, case.num_devices, case.stale_layers, case.kept) as engine,
        ):
            train(engine, BATCHES)
    assert raised.value.__cause__ is bomb.raised is not None, repr(raised.value)
    assert case.exception.__name__ in str(raised.value)
    assert raised.value.location.actor.startswith(("device cpu:", "optimizer worker"))
    assert engine.pool._buffers == []
    is_whole = check_continues(store, case.stale_layers, case.num_devices)
    assert left == "either" or is_whole is (left == "whole")


def test_the_cases_cover_every_site_k_device_count_and_exception():
    assert len(CASES) == 40, "docs/faults.md and docs/engine.md say how many there are"
    assert {case.site for case in CASES} == BOUNDED_SITES.keys() | LAGGING_SITES.keys()
    assert {case.stale_layers for case in CASES} == {0, 3, 6}
    assert {case.num_devices for case in CASES} == {1, 2, 3, 8}
    assert {case.exception for case in CASES} == set(ERRORS)
    assert {case.kept for case in CASES} == {False, True}


LOST = {"a gradient": (GRADIENT_LANDED, 3), "device weights": (WEIGHTS, 20), "an upload": (UPLOADED, 8)}


@pytest.mark.parametrize("stale_layers", [0, 4])
@pytest.mark.parametrize("lost", LOST)
def test_a_hand_over_of_a_bounded_step_that_never_comes_is_a_hang_that_names_its_rule(
    monkeypatch, planted, over, lost, stale_layers
):
    kind, hit = LOST[lost]
    post, seen, store = Board.post, [0], toy_store(toy_model(tied=True), policy=BOUNDED)

    def losing(self, key, value):
        seen[0] += key.kind is kind
        if key.kind is kind and seen[0] == hit:
            planted.set()
        else:
            post(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(Board, "post", losing)
        engine = bounded_engine(store, 2, stale_layers, hang_timeout_s=0.4)
        with pytest.raises(HangError, match="ordering rule"):
            train(engine, BATCHES)
    check_continues(store, stale_layers, 2)


@pytest.mark.parametrize("stale_layers", [0, 4])
@pytest.mark.parametrize("read", [0, 5])
def test_a_save_that_fails_while_layers_lag_changes_nothing(stale_layers, read):
    """Delayed copies and updates wait for the save, and continue as soon as it has failed."""

    def failing(source):
        for name in list(source.tensors)[:read]:
            source.finished_reading(name)
        raise PlantedError("the disk")

    store = toy_store(toy_model(tied=True), policy=BOUNDED)
    with bounded_engine(store, 3, stale_layers) as engine:
        losses = train(engine, BATCHES[:1])
        pending = engine.save(failing)
        losses += train(engine, BATCHES[1:])
        with pytest.raises(PlantedError, match="the disk"):
            pending.result()
    states, _, expected = undisturbed(stale_layers)
    assert losses == expected
    assert_same_state(store.named_views(), states[STEPS])


@pytest.mark.parametrize("stale_layers", [0, 4])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_caller_that_fails_while_bounded_steps_are_under_way_loses_no_more_than_one(stale_layers, steps):
    store = toy_store(toy_model(tied=True), policy=BOUNDED)
    with pytest.raises(PlantedError), bounded_engine(store, 2, stale_layers) as engine:
        for batch in BATCHES[:steps]:
            engine.forward_backward(batch)
            engine.step(1e-2)
        raise PlantedError
    check_continues(store, stale_layers, 2)


# Predicted device weights.


@cache
def predicted():
    """Return the state and the newest device weights after 0, 1, .. steps of a run that predicts, and its losses."""
    model = toy_model()
    store = toy_store(model, policy=ASYNC_PREDICT)
    states, losses = [with_newest(store)], []
    with toy_engine(model, store, PARTITION, 1) as engine:
        for batch in BATCHES:
            losses += train(engine, [batch])
            states.append(with_newest(store))
    return states, losses


def with_newest(store):
    newest = {f"newest/{bundle.index}": bundle.version(store.step).clone() for bundle in store.trained}
    return {**copied(store), **newest}


def check_predictions_continue(store):
    states, losses = predicted()
    assert engine_threads() == [] and store.is_consistent
    assert_same_state(with_newest(store), states[store.step])
    left = store.step
    with toy_engine(toy_model(), store, PARTITIONS["forward coarser"], 3) as engine:
        assert train(engine, BATCHES[left:]) == losses[left:]
    assert_same_state(with_newest(store), states[STEPS])


@pytest.mark.parametrize("hit", [1, 12, 13])
@pytest.mark.parametrize("when", [before, after])
def test_a_predicted_update_that_fails_is_completed_with_its_predictions(monkeypatch, when, hit):
    bomb, store = Bomb(PlantedError, hit), toy_store(toy_model(), policy=ASYNC_PREDICT)
    with monkeypatch.context() as patch:
        when(optimizer_worker, "update_")(patch, bomb)
        with pytest.raises(PipelineError, match="planted") as raised:
            train(toy_engine(toy_model(), store, PARTITION, 2), BATCHES)
    assert raised.value.__cause__ is bomb.raised
    assert store.step == 1
    check_predictions_continue(store)


def test_a_predicted_update_that_fails_twice_leaves_a_store_that_is_marked(monkeypatch):
    store = toy_store(toy_model(), policy=ASYNC_PREDICT)
    with monkeypatch.context() as patch:
        twice(before(optimizer_worker, "update_"))(patch, Bomb(PlantedError, 3))
        with pytest.raises(PipelineError, match="do not save it"):
            train(toy_engine(toy_model(), store, PARTITION, 2), BATCHES)
    assert not store.is_consistent and engine_threads() == []


@pytest.mark.parametrize("steps", [1, 2])
def test_a_validation_that_fails_under_the_true_weights_leaves_the_predictions(monkeypatch, steps):
    bomb, store = Bomb(PlantedError, 3), toy_store(toy_model(), policy=ASYNC_PREDICT)
    engine = toy_engine(toy_model(), store, PARTITION, 2)
    train(engine, BATCHES[:steps])
    with monkeypatch.context() as patch:
        before(torch.nn.functional, "silu")(patch, bomb)
        with pytest.raises(PipelineError) as raised, store.true_device_weights():
            engine.evaluate(BATCHES[2]).loss()
    assert raised.value.__cause__ is bomb.raised
    assert store.step == steps
    check_predictions_continue(store)


def test_predictions_that_cannot_be_written_again_are_derived_at_a_resume(monkeypatch):
    """The fp32 state is whole, so a checkpoint of it is."""
    bomb, store = Bomb(MemoryError, 2), toy_store(toy_model(), policy=ASYNC_PREDICT)
    with toy_engine(toy_model(), store, PARTITION, 2) as engine:
        train(engine, BATCHES[:2])
        with monkeypatch.context() as patch:
            before(prediction, "predict_")(patch, bomb)
            with pytest.raises(MemoryError), store.true_device_weights():
                engine.evaluate(BATCHES[2]).loss()
    resumed = toy_store(toy_model(), policy=ASYNC_PREDICT, seed=1)
    for name, view in resumed.named_views().items():
        view.copy_(store.named_views()[name])
    resumed.resume(2, **store.resume_state())
    check_predictions_continue(resumed)
