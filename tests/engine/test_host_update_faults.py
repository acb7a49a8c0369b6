"""An optimizer of PyTorch through the engine: skipped steps, faults and refusals."""

import pytest
import torch

from tests.support.faults import Bomb, armed
from tests.support.torch_loop import MAKERS, host_engine, moment_free, train
from tests.support.toy import OPTIMIZER, assert_same_state, toy_batches, toy_model, toy_store
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.store.bundles import Ownership
from torchround.engine.store.host_store import HostStore
from torchround.optim import NO_STATE, HostOptimizer
from torchround.planning.update_modes import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC

# Faults and skipped steps.


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=lambda mode: mode.name)
def test_a_gradient_that_is_not_finite_leaves_weights_and_state_as_they_are(mode):
    model, batches = toy_model(), toy_batches(3, micro_batches=2)
    store, optimizer = moment_free(model, mode=mode), HostOptimizer(MAKERS["adamw"])
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


@pytest.mark.parametrize(
    ("mode", "machines", "words"),
    [(BOUNDED, 1, "bounded updates"), (ASYNC_PREDICT, 1, "predicted"), (SYNC, 2, "several machines")],
)
def test_who_cannot_use_it_says_so(mode, machines, words):
    model = toy_model()
    store = HostStore(model, mode=mode, ownership=Ownership(0, machines), optimizer=NO_STATE)
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
