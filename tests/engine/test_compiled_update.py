"""The compiled update inside the engine: same bits, and a run that does not wait for the compiler."""

import threading
import time

import pytest
import torch

from tests.support import toy
from tests.support.toy import assert_same_state, planted_model, toy_batches, toy_engine, toy_model, toy_store, train
from torchround import trainer
from torchround.config import EngineTable
from torchround.engine.errors import PipelineError
from torchround.engine.update import update_threads
from torchround.optim.kernel import CompiledUpdate
from torchround.planning.update_modes import BOUNDED, SYNC

PARTITION = toy.PARTITIONS["forward coarser"]
BATCHES = toy_batches(4, micro_batches=4)


def trained_state(compiled, mode=SYNC, stale_layers=0):
    options = {"compile_update": compiled, "stale_layers": stale_layers}
    with toy_engine(PARTITION, 2, mode=mode, **options) as engine:
        train(engine, BATCHES)
    return engine.store.named_views()


@pytest.fixture
def calls(monkeypatch):
    original, seen = CompiledUpdate.__call__, []

    def counting(self, buffers, numbers):
        seen.append(buffers.numel)
        original(self, buffers, numbers)

    monkeypatch.setattr(CompiledUpdate, "__call__", counting)
    return seen


@pytest.mark.compiles
@pytest.mark.parametrize(("mode", "stale_layers"), [(SYNC, 0), (BOUNDED, 3)], ids=["sync", "bounded"])
def test_every_segment_of_every_step_is_updated_by_a_kernel(calls, mode, stale_layers):
    """That the bits are the same is in `test_rows.py`."""
    plain = trained_state(False, mode=mode, stale_layers=stale_layers)
    assert calls == []
    assert_same_state(trained_state(True, mode=mode, stale_layers=stale_layers), plain)
    one_step = sorted(part.stop - part.start for bundle in toy_store(toy_model()).trained for part in bundle.segments)
    checks = len(calls) - 4 * len(one_step)
    assert sorted(calls[checks:]) == sorted(one_step * 4)


@pytest.fixture
def get_kernels(monkeypatch):
    return lambda function: monkeypatch.setattr("torchround.engine.update.get_kernels", function)


def test_the_first_step_runs_on_the_devices_while_the_update_compiles(get_kernels):
    """The loss is there before the kernels are; and a compiler that takes long is no hang."""
    loss_is_known = threading.Event()

    def slow_kernels(wanted, meanwhile, threads):
        started = time.monotonic()
        while not loss_is_known.is_set() or time.monotonic() - started < 1.0:
            meanwhile()
            time.sleep(0.01)
        return {}

    get_kernels(slow_kernels)
    with toy_engine(PARTITION, 2, compile_update=True, hang_timeout_s=0.5) as engine:
        result = engine.forward_backward(BATCHES[0])
        engine.step(1e-2)
        result.loss()
        loss_is_known.set()
        train(engine, BATCHES[1:])
    assert_same_state(engine.store.named_views(), trained_state(False))


def test_a_fault_while_the_update_compiles_ends_every_thread(get_kernels):
    def endless_kernels(wanted, meanwhile, threads):
        while True:
            meanwhile()
            time.sleep(0.01)

    get_kernels(endless_kernels)
    with pytest.raises(PipelineError, match="ZeroDivisionError"):
        train(toy_engine(PARTITION, 2, model=planted_model(lambda *_: 1 / 0), compile_update=True), BATCHES)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("torchround")]


def test_auto_compiles_for_models_that_win_the_time_back(monkeypatch):
    store = toy_store(toy_model())
    trained = sum(bundle.numel for bundle in store.trained)
    assert not trainer.compiles_update(EngineTable(), store)
    assert trainer.compiles_update(EngineTable(compile=True), store)
    monkeypatch.setattr(trainer, "COMPILE_FROM_PARAMETERS", trained)
    assert trainer.compiles_update(EngineTable(), store)
    assert not trainer.compiles_update(EngineTable(compile=False), store)


@pytest.mark.parametrize(
    ("cores", "torch_threads", "devices", "threads"),
    [(16, 16, 1, 15), (16, 16, 8, 8), (16, 16, 12, 8), (16, 4, 1, 4), (2, 2, 8, 1), (1, 1, 1, 1)],
)
def test_the_update_leaves_each_device_a_core_but_keeps_half_of_them(
    monkeypatch, cores, torch_threads, devices, threads
):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    assert update_threads(devices) == threads
