"""An optimizer of PyTorch through the engine: skipped steps, faults, refusals, and what each ordering rule holds back."""

import warnings

import pytest
import torch

from tests.support.torch_loop import MAKERS, host_engine, moment_free, train
from tests.support.toy import (
    OPTIMIZER,
    PARTITIONS,
    assert_same_state,
    linked,
    toy_batches,
    toy_model,
    toy_store,
    watched,
)
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.host_updates import HostOptimizerWorker
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC
from torchround.engine.store.host_store import HostStore
from torchround.engine.store.ownership import Ownership
from torchround.engine.watch.race_checker import AccessLog, find_races
from torchround.optim import NO_STATE, HostOptimizer, SlowerOptimizerWarning


@pytest.fixture(autouse=True)
def known_to_be_slower():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowerOptimizerWarning)
        yield


# Faults and skipped steps.


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_a_gradient_that_is_not_finite_leaves_weights_and_state_as_they_are(policy):
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store, optimizer = moment_free(model, policy=policy), HostOptimizer(MAKERS["adamw"])
    with host_engine(model, store, optimizer) as engine:
        train(engine, batches[:1])
        before = {name: view.clone() for name, view in store.weights().items()}
        for bundle in store.trained[1:2]:
            for device_weights in bundle.device_weights:
                device_weights.fill_(torch.inf)
        result = engine.forward_backward(batches[1])
        engine.step()
        assert result.update().skipped
        engine.drain()
        assert all(torch.equal(view, before[name]) for name, view in store.weights().items())
        assert {int(state["step"]) for state in optimizer.optimizer.state.values()} == {1}


class Failing(torch.optim.SGD):
    """An optimizer whose second step fails, before or in the middle of its writes."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            self.param_groups[0]["params"][0].data.add_(1.0)
            raise ArithmeticError("planted")
        return super().step(closure)


def test_a_fault_inside_the_step_marks_the_store():
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store = moment_free(model)
    engine = host_engine(model, store, HostOptimizer(lambda named: Failing(named, lr=0.1)))
    with pytest.raises(PipelineError, match=r"Failing.step\(\) raised ArithmeticError: planted.*do not save") as told:
        train(engine, batches)
    assert not told.value.store_is_consistent and not store.is_consistent
    with pytest.raises(EngineUsageError, match="mixes two weight versions"):
        host_engine(model, store, HostOptimizer(MAKERS["sgd"]))


def test_a_fault_before_the_step_leaves_the_last_whole_update(monkeypatch):
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store, optimizer, gradients = (moment_free(model), HostOptimizer(MAKERS["sgd"]), HostOptimizerWorker._gradients)

    def failing(worker, step, *arguments):
        if step == 1:
            raise ArithmeticError("planted")
        return gradients(worker, step, *arguments)

    monkeypatch.setattr(HostOptimizerWorker, "_gradients", failing)
    engine = host_engine(model, store, optimizer)
    with pytest.raises(PipelineError, match="planted"):
        train(engine, batches)
    assert store.is_consistent and store.step == 1
    monkeypatch.undo()
    with host_engine(model, store, optimizer) as engine:
        train(engine, batches[1:])
    whole = moment_free(model)
    with host_engine(model, whole, HostOptimizer(MAKERS["sgd"])) as engine:
        train(engine, batches)
    assert_same_state(store.named_views(), whole.named_views())


def test_a_fault_while_device_weights_are_written_is_overcome_by_a_second_try(monkeypatch):
    model, batches = toy_model(), toy_batches(2, micro_batches=2)
    store, write, times = moment_free(model), HostOptimizerWorker._update_bundle, []

    def failing(worker, bundle, *arguments):
        times.append(bundle.index)
        if times.count(1) == 1 and bundle.index == 1:
            raise ArithmeticError("planted")
        write(worker, bundle, *arguments)

    monkeypatch.setattr(HostOptimizerWorker, "_update_bundle", failing)
    engine = host_engine(model, store, HostOptimizer(MAKERS["sgd"]))
    with pytest.raises(PipelineError, match="planted"):
        train(engine, batches)
    assert store.is_consistent and store.step == 1
    assert all(torch.equal(bundle.version(1), bundle.weight) for bundle in store.trained)


# Refusals.


@pytest.mark.parametrize(
    ("policy", "machines", "words"), [(BOUNDED, 1, "bounded"), (ASYNC_PREDICT, 1, "predict"), (SYNC, 2, "one machine")]
)
def test_who_cannot_use_it_says_so(policy, machines, words):
    model = toy_model()
    store = HostStore(model, policy=policy, ownership=Ownership(0, machines), optimizer=NO_STATE)
    with pytest.raises(EngineUsageError, match=words):
        host_engine(model, store, HostOptimizer(MAKERS["sgd"]), max_norm=0.0)


def test_adamw_refuses_a_store_without_moments_and_a_step_without_a_rate():
    model, [batch] = toy_model(), toy_batches(1, micro_batches=2)
    with pytest.raises(EngineUsageError, match="keeps no state"):
        host_engine(model, moment_free(model), OPTIMIZER)
    with host_engine(model, toy_store(model), OPTIMIZER) as engine:
        engine.forward_backward(batch)
        with pytest.raises(EngineUsageError, match="learning rate"):
            engine.step()
        engine.step(0.1)


def test_an_optimizer_that_needs_a_closure_is_refused_before_any_device_is_used():
    model = toy_model()
    with pytest.raises(EngineUsageError, match="LBFGS.*closure"):
        host_engine(model, moment_free(model), HostOptimizer(lambda named: torch.optim.LBFGS(p for _, p in named)))


# Races.


def races(policy, partition="backward coarser", accumulates=False, evaluates=True, tied=True, steps=3, saves=False):
    log, model = AccessLog(), toy_model(tied)
    store = moment_free(model, policy=policy)
    settings = {"observer": log, "wrap": lambda device: watched(linked(device), log)}
    settings |= {"accumulates": accumulates, "partition": PARTITIONS[partition]}
    with host_engine(model, store, HostOptimizer(MAKERS["sgd"]), 3, **settings) as engine:
        for step, micro_batches in enumerate(toy_batches(steps, micro_batches=4)):
            if evaluates and step == 1:
                engine.evaluate(micro_batches)  # not awaited, so that it runs beside the next step
            for part in (micro_batches[:2], micro_batches[2:]) if accumulates else (micro_batches,):
                result = engine.forward_backward(part)
            engine.step()
            if saves:
                engine.save(read_all)
            if evaluates and step == 1:
                result.update()  # first: asking for the evaluation's loss would order the two
        engine.drain()
    return find_races(log.entries)


def read_all(source):
    for name, tensor in source.tensors.items():
        source.reading(tensor)
        source.finished_reading(name)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_there_is_no_race(policy, accumulates):
    assert races(policy, accumulates=accumulates, saves=True) == []


RULES = {
    "before_device_weight_write": {"policy": SYNC, "partition": "one stage", "tied": False, "steps": 2},
    "before_upload": {"policy": SYNC, "partition": "forward coarser"},
    "before_gradient_read": {"policy": SYNC, "partition": "forward coarser", "tied": False},
    "before_gradient_write": {
        "policy": ASYNC,
        "partition": "forward coarser",
        "tied": False,
        "evaluates": False,
        "steps": 4,
    },
    "before_overwriting_saved": {"policy": SYNC, "evaluates": False, "saves": True},
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_are_needed(monkeypatch, rule):
    assert races(**RULES[rule]) == []
    if rule == "before_gradient_read":
        monkeypatch.setattr(Ordering, "retire", lambda *_: None)  # the optimizer runs past hand-overs
    monkeypatch.setattr(Ordering, rule, lambda *_: None)
    assert races(**RULES[rule])
