"""An engine ends without hanging, results of finished steps can still be read, and its devices are free again."""

import threading

import pytest

from tests.support.toy import (
    PARTITIONS,
    ToyBlock,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine import lifecycle
from torchround.engine.device import CpuDevice
from torchround.engine.errors import DeviceMemoryError, PipelineError
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(4, micro_batches=4)


class StuckDevice(CpuDevice):
    """A device whose kernel never ends: waiting for it takes as long as the test does."""

    def __init__(self, index: int, over: threading.Event) -> None:
        super().__init__(index)
        self._over = over

    def finish(self) -> None:
        self._over.wait()


def test_a_device_that_never_becomes_idle_does_not_keep_the_caller(monkeypatch):
    monkeypatch.setattr(lifecycle, "JOIN_S", 0.2)
    over = threading.Event()
    engine = toy_engine(toy_model(), toy_store(toy_model()), PARTITION, 1, wrap=lambda _: StuckDevice(0, over))
    monkeypatch.setattr(ToyBlock, "forward", fail)
    with pytest.raises(PipelineError, match=r"ValueError: planted \(still inside a computation.*cpu:0\)"):
        train(engine, BATCHES)
    over.set()


def fail(self, hidden, micro_batch):
    raise ValueError("planted")


def test_results_of_finished_steps_are_there_after_a_fault_and_after_close():
    model = toy_model()
    engine = toy_engine(model, toy_store(model), PARTITION, 2)
    result = engine.forward_backward(BATCHES[0])
    engine.step(1e-2)
    engine.drain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyBlock, "forward", fail)
        with pytest.raises(PipelineError):
            train(engine, BATCHES[1:])
    assert result.loss() > 0 and result.update().grad_norm > 0

    engine = toy_engine(model, toy_store(model), PARTITION, 2)
    result = engine.forward_backward(BATCHES[0])
    engine.step(1e-2)
    engine.close()
    assert result.update().grad_norm > 0 and result.loss() > 0 and result.reports()


def test_a_skipped_async_update_that_meets_a_fault_is_completed(monkeypatch):
    """Carrying weights over waits for the readers of the overwritten version; the second such wait fails."""
    model = toy_model()
    store = toy_store(model, policy=ASYNC)
    before = {name: view.clone() for name, view in store.named_views().items()}
    for device_weight in store.bundles[1].device_weights:
        device_weight.fill_(float("inf"))
    original, calls = Ordering.before_device_weight_write, []

    def failing(self, bundle, version):
        calls.append(bundle)
        if len(calls) == 2:
            raise RuntimeError("the device is gone")
        original(self, bundle, version)

    monkeypatch.setattr(Ordering, "before_device_weight_write", failing)
    with pytest.raises(PipelineError, match="the device is gone"):
        train(toy_engine(model, store, PARTITION, 2), BATCHES)
    assert store.is_consistent and store.applied_updates == 0
    views = store.named_views()
    names = [name for name in before if not name.startswith("master")]
    assert_same_state({name: views[name] for name in names}, {name: before[name] for name in names})
    for bundle in store.trained:
        assert bundle.device_weights[0].equal(bundle.device_weights[1])


def test_many_evaluations_without_a_step_remember_nothing():
    model = toy_model()
    counts = []
    with toy_engine(model, toy_store(model), PARTITION, 2) as engine:
        for _ in range(3):
            for _ in range(10):
                engine.evaluate(BATCHES[0])
            engine.drain()
            counts.append(len(engine._board))
    assert counts[1] == counts[2]


def test_an_engine_that_does_not_fit_leaves_no_device_charged():
    model = toy_model()
    with toy_engine(model, toy_store(model), PARTITION, 2) as engine:
        train(engine, BATCHES[:1])
        needed = engine.devices[0].peak_bytes()
    devices = [CpuDevice(0, needed), CpuDevice(1, 1000)]
    with pytest.raises(DeviceMemoryError):
        toy_engine(model, toy_store(model), PARTITION, 2, wrap=lambda device: devices[int(device.name[4:])])
    with toy_engine(model, toy_store(model), PARTITION, 1, wrap=lambda _: devices[0]) as engine:
        train(engine, BATCHES[:1])


def test_a_stopped_engine_does_not_touch_a_device_that_another_one_uses(monkeypatch):
    model, device = toy_model(), CpuDevice(0)
    first = toy_engine(model, toy_store(model), PARTITION, 1, wrap=lambda _: device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyBlock, "forward", fail)
        with pytest.raises(PipelineError):
            train(first, BATCHES)
    with toy_engine(model, toy_store(model), PARTITION, 1, wrap=lambda _: device) as second:
        train(second, BATCHES[:1])
        taken = device._allocated_bytes
        with pytest.raises(PipelineError):
            first.drain()
        assert device._allocated_bytes == taken > 0


def test_mkl_chooses_its_kernels_before_any_thread_runs(monkeypatch):
    """Two threads at a function's first call may otherwise round in different ways."""
    threads, choose, model = [], lifecycle.choose_kernels, toy_model()

    def choosing():
        threads.append([thread for thread in threading.enumerate() if thread not in before])
        choose()

    before = threading.enumerate()
    monkeypatch.setattr(lifecycle, "choose_kernels", choosing)
    with toy_engine(model, toy_store(model), PARTITION, 2):
        assert threads == [[]], "other threads ran already"
        assert len(threading.enumerate()) > len(before)
