"""A step of several calls: any number of them, what is left of a broken one, and what waits for what."""

import threading

import pytest
import torch

from tests.support import toy
from tests.support.faults import kind_of, this_thread
from tests.support.reference import Reference
from tests.support.toy import assert_same_state, planted_model, toy_batches, toy_engine, toy_model, toy_store
from torchround.engine.board import Observer
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.optim import LossScaling
from torchround.planning.update_modes import ASYNC, SYNC

LR = 1e-2
PARTITION = toy.PARTITIONS["backward coarser"]
STEPS, CALLS, MICRO_BATCHES = 3, 2, 4


def called(batches, calls=CALLS):
    size = len(batches[0]) // calls
    return [[step[first : first + size] for first in range(0, len(step), size)] for step in batches]


def train(engine, steps, **options):
    results = []
    for calls in steps:
        results += [engine.forward_backward(micro_batches, **options) for micro_batches in calls]
        engine.step(LR)
    engine.drain()
    return results


def train_plainly(loop, steps):
    losses = []
    for calls in steps:
        for micro_batches in calls:
            loss, gradients = loop.gradients(micro_batches)
            losses.append(loss)
        loop.update(gradients, LR)
    return losses


def test_steps_may_have_any_number_of_calls_and_losses_can_be_read_between_them():
    model, [micro_batches] = toy_model(), toy_batches(1, 12)
    store = toy_store(model)
    steps = [[micro_batches[:1]], [[batch] for batch in micro_batches], called([micro_batches], 3)[0]]
    loop = Reference.of(model, store)
    losses, allocations = [], []
    with toy_engine(PARTITION, 2, model=model, store=store, accumulates=True) as engine:
        for calls in steps:
            for part in calls:
                losses.append(engine.forward_backward(part).loss())
                allocations.append(engine.pool.num_allocations)
            engine.step(LR)
    assert losses == train_plainly(loop, steps)
    assert_same_state(store.named_views(), loop.state())
    # Calls of one shape share their buffers: the first of a shape takes all, also for the next one beside it.
    assert len(set(allocations[1:13])) == 1


def test_the_report_of_the_update_has_the_losses_of_all_calls():
    model, [micro_batches] = toy_model(), toy_batches(1, 4)
    with toy_engine(PARTITION, 2, model=model, accumulates=True) as engine:
        results = train(engine, [[micro_batches[:3], micro_batches[3:]]])
        report = results[0].update()
        assert report is results[1].update()
        assert report.loss == results[0].loss() + results[1].loss()


def test_a_divisor_of_1_gives_the_plain_sum():
    model, batches = toy_model(), toy_batches(1, 3)
    gradients = []
    for dtype in (torch.float32, torch.float16):
        store = toy_store(model, dtype)
        # The gradient of a sum is large: float16 would overflow at the usual first scale.
        store.loss_scaling = LossScaling(dtype == torch.float16, initial_scale=2.0**3)
        with toy_engine(PARTITION, 2, model=model, store=store, accumulates=True) as engine:
            result = engine.forward_backward(batches[0], num_labels=1)
            assert result.loss() == sum(result.loss_sums())
            engine.step(LR)
            report = result.update()
        gradients.append((report.grad_norm, report.loss_scale))
    [(exact, scale), (rounded, dynamic_scale)] = gradients
    assert (scale, dynamic_scale) == (1.0, 2.0**3)
    loop = Reference.of(model, toy_store(model))
    labels = sum(batch.num_labels() for batch in batches[0])
    loop.step(batches[0], LR)
    # The norm of the mean's gradient, times its labels; in float16 the loss scale is undone.
    assert exact == pytest.approx(loop.norms[0] * labels, rel=1e-5)
    assert rounded == pytest.approx(exact, rel=1e-2)


def views_after(calls):
    model, batches = toy_model(), called(toy_batches(2, MICRO_BATCHES))
    with toy_engine(PARTITION, 2, model=model, accumulates=True) as engine:
        train(engine, batches[:1])
        for micro_batches in batches[1][:calls]:
            engine.forward_backward(micro_batches)
    return engine.store


def test_a_step_without_its_end_is_dropped():
    store = views_after(2)
    assert store.step == 1 and store.is_consistent
    assert_same_state(store.named_views(), views_after(0).named_views())


def test_a_fault_in_a_later_call_leaves_the_last_whole_update():
    model, batches = toy_model(), called(toy_batches(2, MICRO_BATCHES))
    store, fails = toy_store(model), threading.Event()

    def failing(hidden, micro_batch):
        if fails.is_set():
            raise RuntimeError("planted")
        return hidden

    engine = toy_engine(PARTITION, 2, model=planted_model(failing), store=store, accumulates=True)
    train(engine, batches[:1])
    engine.forward_backward(batches[1][0]).wait()
    fails.set()
    with pytest.raises(PipelineError, match="planted"):
        engine.forward_backward(batches[1][1]).wait()
    with pytest.raises(PipelineError, match="planted"):
        engine.step(LR)
    assert store.step == 1 and store.is_consistent
    assert_same_state(store.named_views(), views_after(0).named_views())
    # It trains on from there.
    with toy_engine(PARTITION, 3, model=model, store=store, accumulates=True) as engine:
        train(engine, batches[1:])
    assert store.step == 2


@pytest.mark.parametrize(("mode", "bad_call"), [(SYNC, 1), (ASYNC, 0)], ids=str)
def test_a_call_with_a_loss_that_is_not_finite_skips_the_whole_step(mode, bad_call):
    batches = called(toy_batches(2, MICRO_BATCHES))
    bad_tokens = batches[0][bad_call][1].tokens

    def poisoned(hidden, micro_batch):
        is_bad = micro_batch.tokens.shape == bad_tokens.shape and torch.equal(micro_batch.tokens, bad_tokens)
        return hidden * torch.nan if is_bad else hidden

    model = planted_model(poisoned)
    store = toy_store(model, mode=mode)
    before = {name: view.clone() for name, view in store.named_views().items()}
    with toy_engine(PARTITION, 2, model=model, store=store, accumulates=True) as engine:
        report = train(engine, batches[:1])[0].update()
        assert report.skipped and report.fault == "the loss is not finite"
        # The micro-batches of all calls are numbered on.
        assert report.not_finite == (bad_call * MICRO_BATCHES // CALLS + 1,)
        assert_same_state(store.named_views(), before)
        assert not train(engine, batches[1:])[0].update().skipped


def test_a_pass_is_forgotten_only_once_its_gradients_are_added():
    """Before the third call the caller waits until the optimizer's thread has added the gradients of the first."""
    model, [calls] = toy_model(), called(toy_batches(1, 6), 3)
    added = []

    class Notes(Observer):
        def waited(self, token):
            if kind_of(token) == "the losses" and this_thread() == "MainThread":
                added.append(token.step)

    with toy_engine(PARTITION, 2, observer=Notes(), model=model, accumulates=True) as engine:
        for micro_batches in calls:
            engine.forward_backward(micro_batches)
        assert added == [0]
        engine.step(LR)


def test_the_next_step_does_not_wait_for_the_update_before_its_second_call():
    """Otherwise no step of several calls could begin beside the update before it. A save holds that update up here."""
    model, batches = toy_model(), called(toy_batches(2, MICRO_BATCHES))
    may_read, store = threading.Event(), toy_store(model, mode=ASYNC)

    def write(source):
        may_read.wait()
        for name in source.tensors:
            source.finished_reading(name)

    with toy_engine(PARTITION, 2, model=model, store=store, accumulates=True) as engine:
        pending = engine.save(write)
        for micro_batches in batches[0]:
            engine.forward_backward(micro_batches)
        engine.step(LR)
        engine.forward_backward(batches[1][0])
        assert store.applied_updates <= 1 and store.step == 0
        may_read.set()
        engine.forward_backward(batches[1][1])
        engine.step(LR)
        pending.result()
    assert store.step == 2


def test_between_two_calls_the_store_is_not_saved():
    model, [calls] = toy_model(), called(toy_batches(1, 4))
    with toy_engine(PARTITION, 1, model=model, accumulates=True) as engine:
        with pytest.raises(EngineUsageError, match="needs a forward_backward"):
            engine.step(LR)
        for micro_batches in calls:
            engine.forward_backward(micro_batches)
            engine.drain()  # waits for the calls alone
            with pytest.raises(EngineUsageError, match="between forward_backward"):
                engine.save(lambda source: None)
        engine.step(LR)
        engine.evaluate(calls[0]).loss()


def test_evaluations_between_calls_change_nothing():
    """They read the weights after the last step, whatever calls are under way. All are dispatched without a wait."""
    model, batches = toy_model(), called(toy_batches(3, 3), 3)
    states, evaluated = [], []
    for evaluates in (False, True):
        store, results = toy_store(model, mode=ASYNC), []
        with toy_engine(PARTITION, 2, model=model, store=store, accumulates=True) as engine:
            for calls in batches:
                for micro_batches in calls:
                    results.append(engine.forward_backward(micro_batches))
                    if evaluates:
                        evaluated.append(engine.evaluate(calls[0]))
                engine.step(LR)
            engine.drain()
            updates = [result.update() for result in results]
            evaluated = [result.loss() for result in evaluated]
        assert updates[0] is updates[2] and len({id(report) for report in updates}) == len(batches)
        states.append(({name: view.clone() for name, view in store.named_views().items()}, results))
    assert_same_state(states[0][0], states[1][0])
    # Within a step all evaluations see the same weights, and each step's are others.
    assert [len(set(evaluated[first : first + 3])) for first in range(0, 9, 3)] == [1] * 3
    assert len(set(evaluated)) == 3
