"""An optimizer of PyTorch through the engine: skipped steps, faults, refusals, and what each ordering rule holds back."""

import warnings

import pytest
import torch

from tests.support.faults import Bomb, DeafLog, armed
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
from torchround.engine.ordering import GRADIENT_CONSUMED, GRADIENT_LANDED, READ_BY_SAVE, UPLOADED, WEIGHTS
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
    with pytest.raises(PipelineError, match="ArithmeticError: planted.*do not save") as told:
        train(engine, batches)
    assert not told.value.store_is_consistent and not store.is_consistent
    with pytest.raises(EngineUsageError, match="mixes two weight versions"):
        host_engine(model, store, HostOptimizer(MAKERS["sgd"]))


@pytest.mark.parametrize(("place", "hit"), [("one buffer", 3), ("an update", 8)])
def test_a_fault_that_is_overcome_or_comes_before_the_step_leaves_a_whole_update(place, hit):
    """Device weights that fail to be written are written by a second try."""
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    bomb, store, optimizer = Bomb(place, hit=hit), moment_free(model), HostOptimizer(MAKERS["sgd"])
    with pytest.raises(PipelineError, match="planted"):
        train(host_engine(model, store, optimizer, **armed(bomb)), batches)
    assert store.is_consistent and store.step == 1
    assert all(torch.equal(bundle.version(1), bundle.weight) for bundle in store.trained)
    with host_engine(model, store, optimizer) as engine:
        train(engine, batches[1:])
    whole = moment_free(model)
    with host_engine(model, whole, HostOptimizer(MAKERS["sgd"])) as engine:
        train(engine, batches)
    assert_same_state(store.named_views(), whole.named_views())


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


def races(policy, partition="forward coarser", accumulates=False, evaluates=True, steps=3, saves=False, log=AccessLog):
    log, model = log(), toy_model()
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


@pytest.mark.parametrize(
    "run",
    [
        {"policy": SYNC, "accumulates": True, "saves": True, "partition": "backward coarser"},
        {"policy": ASYNC, "saves": True},
        {"policy": ASYNC, "accumulates": True, "partition": "one stage"},
        {"policy": SYNC, "partition": "one stage", "steps": 2},
    ],
    ids=str,
)
def test_there_is_no_race(run):
    assert races(**run) == []


UPDATES, DEVICES = "torchround optimizer", "torchround cpu"
RULES = {
    "1": ((UPLOADED, "uploads finished"), UPDATES, {"policy": SYNC, "partition": "one stage", "steps": 2}),
    "2": ((WEIGHTS,), DEVICES, {"policy": SYNC}),
    "3": ((GRADIENT_LANDED,), UPDATES, {"policy": SYNC}),
    "4": ((GRADIENT_CONSUMED,), DEVICES, {"policy": ASYNC, "evaluates": False, "steps": 4}),
    "6": ((READ_BY_SAVE,), UPDATES, {"policy": SYNC, "evaluates": False, "saves": True}),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_are_needed(rule):
    kinds, threads, run = RULES[rule]
    assert races(**run, log=lambda: DeafLog(*kinds, threads=threads)) != []
