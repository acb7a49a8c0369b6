"""Any optimizer of PyTorch through the engine: bit for bit the plain loop's, with its own state and hyperparameters."""

import threading
import warnings

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from tests.support.faults import kind_of
from tests.support.reference import Reference
from tests.support.torch_loop import MAKERS, host_engine, moment_free, train
from tests.support.toy import assert_same_state, toy_batches, toy_model, toy_store
from torchround.engine.board import Observer
from torchround.optim import HostOptimizer
from torchround.planning.update_modes import ASYNC, SYNC

STEPS = 4


@pytest.mark.parametrize("kind", MAKERS)
def test_an_optimizer_of_torch_updates_as_in_a_plain_loop(kind):
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=2)
    model.layers[2].requires_grad_(False)
    store = moment_free(model)
    loop = Reference.of(model, store, MAKERS[kind])
    with host_engine(model, store, HostOptimizer(MAKERS[kind])) as engine:
        losses = train(engine, batches)
    assert losses == loop.train(batches)
    assert_same_state(store.named_views(), loop.state())
    assert store.applied_updates == store.step == STEPS


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=lambda mode: mode.name)
def test_a_scheduler_may_change_them_while_steps_are_under_way(mode):
    """Every step of the optimizer's thread is late by two steps of the scheduler, as far as two passes allow."""
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=2)
    store, optimizer = moment_free(model, mode=mode), HostOptimizer(MAKERS["sgd"])
    loop = Reference.of(model, store, MAKERS["sgd"])
    scheduled = threading.Semaphore(0)

    class Late(Observer):
        def posted(self, token):
            if kind_of(token) == "the decision":
                scheduled.acquire()

    plain = ExponentialLR(loop.torch, 0.5)
    losses = []
    for micro_batches in batches:
        losses.append(loop.step(micro_batches, 0.0))
        plain.step()
    with host_engine(model, store, optimizer, observer=Late()) as engine, warnings.catch_warnings():
        # One of them would say that the scheduler came before the optimizer.
        warnings.simplefilter("error")
        scheduler = ExponentialLR(optimizer.optimizer, 0.5)

        def after():
            scheduler.step()
            scheduled.release()

        assert train(engine, batches, after) == losses
    assert_same_state(store.named_views(), loop.state())
    assert optimizer.optimizer.param_groups[0]["lr"] == plain.get_last_lr()[0]


def test_a_learning_rate_of_the_call_holds_for_one_step():
    model, batches = toy_model(), toy_batches(2, micro_batches=2)
    store, seen = moment_free(model), []

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    def make(named):
        return Recording([{"params": named[:2], "lr": 0.1}, {"params": named[2:], "lr": 0.2}], lr=0.3)

    with host_engine(model, store, HostOptimizer(make)) as engine:
        for lr in (0.5, None):
            engine.forward_backward(batches[0])
            engine.step(lr)
    assert seen == [[0.5, 0.5], [0.1, 0.2]]


def test_its_parameters_come_in_the_order_of_the_model():
    """PyTorch numbers them in this order in a saved state. The store has matrices before vectors."""
    model, seen = toy_model(tied=True), []
    model.layers[2].requires_grad_(False)

    def make(named):
        seen.extend(name for name, _ in named)
        return MAKERS["sgd"](named)

    with host_engine(model, moment_free(model), HostOptimizer(make)):
        pass
    assert seen == [name for name in model.stored_shapes() if not name.startswith("block.1.")]


def test_a_store_without_moments_holds_two_fp32_buffers_less():
    model = toy_model()
    model.layers[2].requires_grad_(False)
    usual, free = toy_store(model), moment_free(model)
    trained = sum(bundle.numel for bundle in free.trained)
    assert usual.nbytes() - free.nbytes() == 2 * 4 * trained
    assert not any(segment.parts for bundle in free.bundles for segment in bundle.segments)
    assert {name.split("/")[0] for name in free.named_views()} == {"weights"}
