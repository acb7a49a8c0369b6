"""Evaluations of the newest weights of stale layers, and steps dropped before their update (`bounded`)."""

import threading
from contextlib import nullcontext

import pytest
import torch

from tests.support.faults import UPLOADED, before, kind_of
from tests.support.toy import (
    PARTITIONS,
    assert_same_state,
    planted_model,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine.board import Board
from torchround.engine.store import host_store
from torchround.planning.update_modes import ASYNC_PREDICT, BOUNDED, SYNC


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_evaluation_of_the_true_weights_leaves_the_older_ones_as_they_were(dtype):
    model, partition = toy_model(tied=True), PARTITIONS["backward coarser"]
    batches, held_out = toy_batches(3, micro_batches=2), toy_batches(1, micro_batches=2, seed=5)[0]
    store = toy_store(model, dtype, mode=BOUNDED)
    with toy_engine(partition, 2, model=model, store=store, stale_layers=3) as engine:
        train(engine, batches)
        device_weights = [bundle.device_weights[0].clone() for bundle in store.bundles]
        unread = engine.evaluate(held_out)  # its uploads must be over before the weights are replaced
        with engine.true_device_weights():
            newest = engine.evaluate(held_out).loss()
            engine.evaluate(held_out)  # and so must be those of this one
        between = unread.loss()
        assert engine.evaluate(held_out).loss() == between
        weights = {name: view.clone() for name, view in store.weights().items()}
    assert all(map(torch.equal, [bundle.device_weights[0] for bundle in store.bundles], device_weights))
    other = toy_store(model, dtype, mode=SYNC)
    other.write_weights(weights)
    with toy_engine(partition, 1, model=model, store=other) as engine:
        assert engine.evaluate(held_out).loss() == newest != between
        for bundle, values in zip(other.bundles, device_weights, strict=True):
            bundle.device_weights[0].copy_(values)
        assert engine.evaluate(held_out).loss() == between


def test_a_save_under_way_gets_the_older_weights_before_an_evaluation_of_the_true_ones(monkeypatch):
    store, begin, saved = toy_store(toy_model(), mode=BOUNDED), threading.Event(), {}

    def write(source):
        assert begin.wait(60)
        for name, tensor in source.tensors.items():
            saved[name] = tensor.clone()
            source.finished_reading(name)

    with toy_engine(PARTITIONS["backward coarser"], 2, store=store, stale_layers=3) as engine:
        train(engine, toy_batches(2, micro_batches=2))
        expected = {name: view.clone() for name, view in store.named_views().items()}
        pending = engine.save(write)
        # The save reads once the evaluation waits for it, or has replaced the weights without waiting.
        before(monkeypatch, Board, "wait_for", lambda _: begin.set(), lambda board, flag, *_: kind_of(flag) == UPLOADED)
        with engine.true_device_weights():
            begin.set()
            pending.result()
    assert_same_state(saved, expected)


@pytest.mark.parametrize("raises", [False, True], ids=["closed", "left by an exception"])
def test_a_step_that_is_dropped_before_its_update_leaves_the_newest_weights(raises):
    """Whatever layers the step has written: the next one reads what a store reads that begins with these weights."""
    batches, losses = toy_batches(3, micro_batches=2), []
    options = {"num_devices": 2, "stale_layers": 4}
    for drops in (True, False):
        store = toy_store(toy_model(), mode=BOUNDED)
        engine = toy_engine(PARTITIONS["one layer a stage"], store=store, **options)
        with pytest.raises(ValueError, match="dropped") if raises else nullcontext(), engine:
            train(engine, batches[:2])
            if drops:
                engine.forward_backward(batches[2])
            if raises:
                raise ValueError("dropped")
        assert store.is_consistent and store.step == 2
        if not drops:
            store.set_stale_layers(0)
        with toy_engine(PARTITIONS["backward coarser"], store=store, **options) as engine:
            losses.append(train(engine, batches))
    assert losses[0] == losses[1]


def test_an_exception_in_the_block_does_not_change_the_weights_of_an_evaluation_under_way(monkeypatch):
    begin, held_out = threading.Event(), toy_batches(1, micro_batches=2, seed=5)[0]
    begin.set()

    def waiting(hidden, micro_batch):
        assert begin.wait(60)
        return hidden

    model = planted_model(waiting)
    store = toy_store(model, mode=ASYNC_PREDICT)
    with toy_engine(PARTITIONS["one layer a stage"], 1, model=model, store=store) as engine:
        train(engine, toy_batches(2, micro_batches=2))
        with engine.true_device_weights():
            expected = engine.evaluate(held_out).loss()
        before(monkeypatch, Board, "wait_for", lambda _: begin.set(), lambda board, flag, *_: kind_of(flag) == UPLOADED)
        with pytest.raises(KeyError), engine.true_device_weights():
            begin.clear()
            result = engine.evaluate(held_out)
            raise KeyError
        begin.set()
        assert result.loss() == expected
        train(engine, toy_batches(1, micro_batches=2))


def test_a_fault_while_the_true_weights_are_written_leaves_the_predicted_ones_and_no_open_task(monkeypatch):
    model = toy_model()
    store = toy_store(model, mode=ASYNC_PREDICT)
    with toy_engine(PARTITIONS["one layer a stage"], 2, model=model, store=store) as engine:
        train(engine, toy_batches(2, micro_batches=2))
        predicted = [bundle.version(store.step).clone() for bundle in store.owned]
        calls, copy = [], host_store._copy

        def fails_once(*arguments):
            calls.append(arguments)
            if len(calls) == 4:
                raise MemoryError("planted")
            copy(*arguments)

        with monkeypatch.context() as during:
            during.setattr(host_store, "_copy", fails_once)
            with pytest.raises(MemoryError, match="planted"), engine.true_device_weights():
                raise AssertionError("the block does not begin")
        assert all(map(torch.equal, predicted, [bundle.version(store.step) for bundle in store.owned]))
        train(engine, toy_batches(1, micro_batches=2))
