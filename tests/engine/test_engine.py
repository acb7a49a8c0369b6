"""The promises of the engine's calls to a library user, beyond the numbers."""

import gc
import os
import threading
import weakref

import pytest
import torch

from tests.support import toy
from tests.support.faults import this_thread
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.board import Observer
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.errors import EngineUsageError
from torchround.engine.update import update_threads
from torchround.layer import IGNORED_LABEL, MicroBatch
from torchround.planning.partition import Partition

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(3, micro_batches=4)


@pytest.fixture
def engine():
    with toy_engine(PARTITION, 2) as engine:
        yield engine


def test_an_update_cannot_be_asked_for_before_its_step(engine):
    """It would wait for what nothing makes, until the watchdog ends the engine."""
    result = engine.forward_backward(BATCHES[0])
    for asked in (result.update, result.collect):
        with pytest.raises(EngineUsageError, match=r"update\(\) needs the step\(\)"):
            asked()
    engine.step(1e-2)
    assert result.update().grad_norm > 0


def test_a_step_with_no_label_at_all_changes_no_moment(engine):
    blank = [
        MicroBatch(m.tokens, torch.full_like(m.labels, IGNORED_LABEL), m.positions, m.document_ids) for m in BATCHES[0]
    ]
    result = engine.forward_backward(blank)
    engine.step(1e-2)
    assert result.loss() == 0.0 and result.update().grad_norm == 0.0
    engine.drain()
    assert not engine.store.named_views()["exp_avg/block.0.up.weight"].any()


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (lambda e: e.step(1e-2), "step.. needs a forward_backward"),
        (lambda e: (e.forward_backward(BATCHES[0]), e.forward_backward(BATCHES[0])), "without step"),
        (lambda e: (e.forward_backward(BATCHES[0]), e.evaluate(BATCHES[0])), "between forward_backward"),
        (lambda e: e.forward_backward([]), "at least one micro-batch"),
        (lambda e: e.evaluate([]), "at least one micro-batch"),
    ],
)
def test_calls_in_a_wrong_order_are_refused(engine, calls, message):
    with pytest.raises(EngineUsageError, match=message):
        calls(engine)
    engine.drain()


def test_a_micro_batch_of_a_wrong_type_is_named(engine):
    [first, *_] = BATCHES[0]
    wrong = MicroBatch(first.tokens, first.labels.to(torch.int32), first.positions, first.document_ids)
    with pytest.raises(EngineUsageError, match=r"micro-batch 1: labels is torch.int32 \(3, 8\)"):
        engine.forward_backward([first, wrong])


def test_a_partition_of_another_model_is_refused():
    model = toy_model()
    with pytest.raises(EngineUsageError, match="covers 3 layers, the model has 7"):
        Engine(model, toy_store(model), [CpuDevice(0)], Partition((), 3, ()), optimizer=toy.OPTIMIZER)


def test_close_finishes_what_was_dispatched_and_ends_every_thread():
    engine = toy_engine(PARTITION, 2)
    engine.forward_backward(BATCHES[0])
    engine.step(1e-2)
    engine.close()
    assert engine.store.step == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchround")]
    with pytest.raises(EngineUsageError, match="closed"):
        engine.forward_backward(BATCHES[0])
    engine.close()


def test_two_engines_in_one_process_do_not_disturb_each_other():
    stores = []
    for together in (False, True):
        store, other = toy_store(toy_model()), toy_store(toy_model(), seed=1)
        with toy_engine(PARTITION, 2, store=store) as engine, toy_engine(PARTITION, 3, store=other) as second:
            for micro_batches in BATCHES:
                engine.forward_backward(micro_batches)
                if together:
                    second.forward_backward(micro_batches)
                    second.step(1e-2)
                engine.step(1e-2)
        stores.append(store.named_views())
    assert_same_state(*stores)


def test_updates_run_with_their_own_number_of_threads_and_the_caller_keeps_its_own():
    """With as many threads as cores, an update leaves one to the device."""
    seen, before, cores = set(), torch.get_num_threads(), len(os.sched_getaffinity(0))

    class Looks(Observer):
        def touched(self, reads, writes):
            if this_thread() == "torchround optimizer":
                seen.add(torch.get_num_threads())

    torch.set_num_threads(cores + 1)
    try:
        model, expected = toy_model(), update_threads(1)
        with toy_engine(PARTITION, 1, observer=Looks(), model=model) as engine:
            train(engine, BATCHES[:1])
        assert seen == {expected} and expected < torch.get_num_threads() == cores + 1
    finally:
        torch.set_num_threads(before)


def test_a_closed_engine_can_be_collected():
    engine = toy_engine(PARTITION, 2)
    train(engine, BATCHES)
    engine.close()
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
