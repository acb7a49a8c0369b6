"""An engine ends without hanging, results of finished steps can still be read, and its devices are free again."""

import gc
import itertools
import threading

import pytest

from tests.support.toy import PARTITIONS, planted_model, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine import engine as controller
from torchround.engine.device import CpuDevice
from torchround.engine.errors import DeviceMemoryError, PipelineError

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(3, micro_batches=4)


class Failing:
    def __init__(self):
        self.model = planted_model(self.plant)
        self.now = False

    def __deepcopy__(self, memo):
        return self

    def plant(self, hidden, micro_batch):
        if self.now:
            raise ValueError("planted")
        return hidden


def test_a_device_that_never_becomes_idle_does_not_keep_the_caller(brief_joins):
    over, device = threading.Event(), CpuDevice(0)
    device.finish = over.wait  # a kernel that never ends
    failing = Failing()
    engine = toy_engine(PARTITION, 1, model=failing.model, store=toy_store(toy_model()), wrap=lambda _: device)
    failing.now = True
    with pytest.raises(PipelineError, match=r"ValueError: planted \(still inside a computation.*cpu:0\)"):
        train(engine, BATCHES)
    over.set()


def test_results_of_finished_steps_are_there_after_a_fault_and_after_close():
    for faulty in (True, False):
        failing = Failing()
        engine = toy_engine(PARTITION, 2, model=failing.model, store=toy_store(toy_model()))
        result = engine.forward_backward(BATCHES[0])
        engine.step(1e-2)
        if faulty:
            engine.drain()
            failing.now = True
            with pytest.raises(PipelineError, match="planted"):
                train(engine, BATCHES[1:])
        else:
            engine.close()
            assert result.reports()
        assert result.update().grad_norm > 0 and result.loss() > 0


def run_steps(engine):
    for micro_batches in BATCHES:
        engine.forward_backward(micro_batches)
        engine.step(1e-2)
        save = engine.save(lambda source: None)
        save.may_publish()
    engine.drain()
    save.wait()


def run_evaluations(engine):
    for _ in range(4):
        engine.evaluate(BATCHES[0])
    engine.drain()


@pytest.mark.parametrize("run", [run_steps, run_evaluations], ids=["steps with saves", "evaluations alone"])
def test_a_long_run_remembers_nothing_of_old_passes(run):
    """Python's objects are counted: a pass makes hundreds of hand-overs."""
    model, counts = toy_model(), []
    with toy_engine(PARTITION, 2, model=model) as engine:
        run(engine)
        gc.collect()
        gc.freeze()  # objects of before are not counted
        try:
            for _ in range(4):
                run(engine)
                gc.collect()
                counts.append(len(gc.get_objects()))
        finally:
            gc.unfreeze()
    # What is remembered grows with each run. A thread that has not dropped its last pass yet counts once.
    assert min(later - earlier for earlier, later in itertools.pairwise(counts)) < 60, counts


def test_a_stopped_engine_does_not_touch_a_device_that_another_one_uses():
    model, failing = toy_model(), Failing()
    with toy_engine(PARTITION, 1, model=model) as engine:
        train(engine, BATCHES[:1])
        needed = engine.devices[0].peak_bytes()
    device = CpuDevice(0, needed)
    first = toy_engine(PARTITION, 1, model=failing.model, store=toy_store(model), wrap=lambda _: device)
    failing.now = True
    with pytest.raises(PipelineError, match="planted"):
        train(first, BATCHES)
    with toy_engine(PARTITION, 1, model=model, wrap=lambda _: device) as second:
        train(second, BATCHES[:1])
        with pytest.raises(PipelineError, match="planted"):
            first.drain()
        with pytest.raises(DeviceMemoryError):  # the second one still holds its memory
            device.allocate(needed)


def test_mkl_chooses_its_kernels_before_any_thread_runs(monkeypatch):
    """Two threads at a function's first call may otherwise round in different ways."""
    threads, choose, model = [], controller.choose_kernels, toy_model()

    def choosing():
        threads.append([thread for thread in threading.enumerate() if thread not in before])
        choose()

    before = threading.enumerate()
    monkeypatch.setattr(controller, "choose_kernels", choosing)
    with toy_engine(PARTITION, 2, model=model):
        assert threads == [[]], "other threads ran already"
        assert len(threading.enumerate()) > len(before)
