"""A fault on an accelerator is a `PipelineError` in the caller, leaves no thread, and gives the memory back."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.support.device_toy import device_engine
from tests.support.toy import KEPT, PARTITIONS, ToyBlock, assert_same_state, toy_batches, toy_model, toy_store, train
from torchround.engine.device import AcceleratorDevice
from torchround.engine.errors import DeviceMemoryError, EngineUsageError, PipelineError
from torchround.engine.store.bundles import BOUNDED, SYNC
from torchround.pipeline.memory import GIB

ROOT = Path(__file__).parents[2]
PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(4, micro_batches=4)
MIB = 2**20


class PlantedError(RuntimeError):
    pass


class FailsBackward(torch.autograd.Function):
    """Raises on autograd's own thread for the device."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise PlantedError("in the backward")


def fail_in_forward(hidden):
    raise PlantedError("in the forward")


def run_out_of_memory(hidden):
    return hidden + torch.empty(8 * GIB, dtype=torch.uint8, device=hidden.device)[0]


@pytest.fixture
def little_memory(kind, request):
    """Leave this process next to nothing more of the device than it has."""
    gc.collect()
    if kind == "simulated":
        simulator = request.getfixturevalue("simulator")
        for device in range(torch.accelerator.device_count()):
            simulator.set_memory_limit(device, 64 * MIB)
        yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + GIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def plant(monkeypatch, fault, call=9):
    """The blocks' `call`-th forward, wherever it is, has the fault."""
    forward, lock, calls = ToyBlock.forward, threading.Lock(), [0]

    def failing(self, hidden, micro_batch):
        with lock:
            calls[0] += 1
            now = calls[0] == call
        return forward(self, fault(hidden) if now else hidden, micro_batch)

    monkeypatch.setattr(ToyBlock, "forward", failing)


def engine_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchround")]


def assert_fails(kind, cause, workers):
    store = toy_store(toy_model(), pinned=True)
    with pytest.raises(PipelineError, match=rf"device {kind}:0/\d, \w+ stage") as raised:
        train(device_engine(kind, toy_model(), store, PARTITION, workers), BATCHES)
    assert isinstance(raised.value.__cause__, cause)
    assert engine_threads() == []
    return store


# The 5 blocks of 4 micro-batches run 20 forwards before the first recomputation.
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("fault", "call"), [(fail_in_forward, 9), (fail_in_forward, 24), (FailsBackward.apply, 24)])
def test_an_exception_in_a_layer_is_raised_and_training_can_continue(kind, monkeypatch, workers, fault, call):
    expected = toy_store(toy_model(), pinned=True)
    with device_engine(kind, toy_model(), expected, PARTITION, 1) as engine:
        train(engine, BATCHES)
    plant(monkeypatch, fault, call)
    store = assert_fails(kind, PlantedError, workers)
    assert store.is_consistent
    monkeypatch.undo()
    with device_engine(kind, toy_model(), store, PARTITION, workers) as engine:
        train(engine, BATCHES[store.step :])
    assert_same_state(store.named_views(), expected.named_views())


@pytest.mark.parametrize("workers", [1, 2])
def test_out_of_memory_in_a_layer_is_raised_and_the_memory_comes_back(kind, monkeypatch, little_memory, workers):
    before = torch.accelerator.memory_allocated()
    plant(monkeypatch, run_out_of_memory, 24)
    store = assert_fails(kind, torch.OutOfMemoryError, workers)
    monkeypatch.undo()
    gc.collect()
    # cuBLAS keeps a workspace for each thread and stream that ever multiplied. The simulated device keeps nothing.
    kept = 256 * MIB if kind == "cuda" else 1
    assert torch.accelerator.memory_allocated() - before < kept
    with device_engine(kind, toy_model(), store, PARTITION, workers) as engine:
        train(engine, BATCHES[store.step :])


def test_a_fixed_buffer_that_does_not_fit_is_named_with_what_is_free(kind, little_memory):
    with pytest.raises(DeviceMemoryError, match=rf"{kind}:0 cannot allocate 8\.000 GiB: .* GiB are free"):
        AcceleratorDevice(f"{kind}:0").allocate(8 * GIB)


@pytest.mark.parametrize("after", [0, 1, 40, 400, 1200])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_device_that_fails_in_the_middle_of_a_step_is_a_pipeline_error_and_training_can_continue(
    simulator, kind, workers, after
):
    """The device stops at its `after`-th task and refuses everything from then on, as a GPU does."""
    expected = toy_store(toy_model(), pinned=True)
    with device_engine(kind, toy_model(), expected, PARTITION, 1) as engine:
        train(engine, BATCHES)
    store = toy_store(toy_model(), pinned=True)
    engine = device_engine(kind, toy_model(), store, PARTITION, workers)
    simulator.inject_fault(0, after)
    with pytest.raises(PipelineError, match="planted fault") as raised:
        train(engine, BATCHES)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert engine_threads() == [] and store.is_consistent
    simulator.reset()
    with device_engine(kind, toy_model(), store, PARTITION, workers) as engine:
        train(engine, BATCHES[store.step :])
    assert_same_state(store.named_views(), expected.named_views())


@pytest.mark.parametrize("stale_layers", [None, 0, 3], ids=["sync", "bounded, K = 0", "bounded, K = 3"])
@pytest.mark.parametrize("after", [100, 500, 1100])
def test_a_device_that_fails_while_activations_are_kept_leaves_whole_updates_or_a_store_that_is_marked(
    simulator, kind, after, stale_layers
):
    policy, first_kept = (SYNC, 0) if stale_layers is None else (BOUNDED, stale_layers)
    kept = ((),) * first_kept + KEPT["all"][first_kept:]
    settings = {"kept": kept, "stale_layers": first_kept}
    states, expected = {}, toy_store(toy_model(), pinned=True, policy=policy)
    with device_engine(kind, toy_model(), expected, PARTITION, 1, **settings) as engine:
        for step in range(len(BATCHES) + 1):
            states[step] = {name: view.clone() for name, view in expected.named_views().items()}
            train(engine, BATCHES[step : step + 1])
    store = toy_store(toy_model(), pinned=True, policy=policy)
    engine = device_engine(kind, toy_model(), store, PARTITION, 2, **settings)
    simulator.inject_fault(0, after)
    with pytest.raises(PipelineError, match="planted fault"):
        train(engine, BATCHES)
    assert engine_threads() == [] and (store.is_consistent or policy is BOUNDED)
    simulator.reset()
    if not store.is_consistent:
        with pytest.raises(EngineUsageError, match="mixes two weight versions"):
            device_engine(kind, toy_model(), store, PARTITION, 2, **settings)
        return
    assert_same_state(store.named_views(), states[store.step])
    with device_engine(kind, toy_model(), store, PARTITION, 2, **settings) as engine:
        train(engine, BATCHES[store.step :])
    assert_same_state(store.named_views(), expected.named_views())


POISON = """
import os, sys, threading
import torch
from tests.support.device_toy import device_engine
from tests.support.toy import PARTITIONS, toy_batches, toy_model, toy_store, train
from torchround.engine.errors import PipelineError

if sys.argv[1] == "simulated":
    from tests.simulated_accelerator.simulator import load
    load()
store = toy_store(toy_model(), pinned=True)
[[micro_batch]] = toy_batches(1, 1)
micro_batch.labels[0, 0] = 10**6  # the cross entropy refuses it on the device
try:
    train(device_engine(sys.argv[1], toy_model(), store, PARTITIONS["forward coarser"], 2), [[micro_batch]])
except PipelineError as error:
    assert isinstance(error.__cause__, RuntimeError), repr(error.__cause__)
    assert not [t for t in threading.enumerate() if t.name.startswith("torchround")]
    assert store.is_consistent and store.step == 0
    print("raised", flush=True)
    os._exit(0)  # the process can use the device no more
os._exit(3)
"""


def test_an_error_inside_a_kernel_is_a_pipeline_error(kind):
    """Run in a process of its own, because a device fails for the rest of a process after such an error."""
    done = subprocess.run([sys.executable, "-c", POISON, kind], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "raised" in done.stdout, done.stderr[-3000:]
