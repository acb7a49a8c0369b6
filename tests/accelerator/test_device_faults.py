"""A fault on an accelerator is a `PipelineError` in the caller, leaves no thread, and gives the memory back."""

import gc
import threading

import pytest
import torch

from tests.support import toy
from tests.support.device_toy import device_engine
from tests.support.faults import PlantedError, copied, engine_threads
from tests.support.processes import run_program
from tests.support.toy import KEPT, PARTITIONS, ToyBlock, assert_same_state, toy_batches, toy_model, toy_store, train
from torchround.engine.device import AcceleratorDevice
from torchround.engine.errors import DeviceMemoryError, EngineUsageError, PipelineError
from torchround.layer import LayeredModel
from torchround.planning.memory import GIB
from torchround.planning.update_modes import BOUNDED, SYNC

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(4, micro_batches=4)
MIB = 2**20


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


def faulty_model(fault, call):
    lock, calls = threading.Lock(), []

    class Faulty(ToyBlock):
        def forward(self, hidden, micro_batch):
            with lock:
                calls.append(1)
                now = len(calls) == call
            return super().forward(fault(hidden) if now else hidden, micro_batch)

    embedding, *_, head = toy_model().layers
    return LayeredModel(toy_model().names, (embedding, *(Faulty() for _ in range(toy.BLOCKS)), head))


def assert_fails(kind, cause, workers, model):
    store = toy_store(toy_model(), pinned=True)
    with pytest.raises(PipelineError, match=rf"device {kind}:0/\d, \w+ stage") as raised:
        train(device_engine(kind, model, store, PARTITION, workers), BATCHES)
    assert isinstance(raised.value.__cause__, cause)
    assert engine_threads() == []
    return store


# The 5 blocks of 4 micro-batches run 20 forwards before the first recomputation.
@pytest.mark.parametrize(
    ("fault", "call", "workers"), [(fail_in_forward, 9, 3), (fail_in_forward, 24, 1), (FailsBackward.apply, 24, 3)]
)
def test_an_exception_in_a_layer_is_raised_and_training_can_continue(kind, workers, fault, call):
    expected = toy_store(toy_model(), pinned=True)
    with device_engine(kind, toy_model(), expected, PARTITION, 1) as engine:
        train(engine, BATCHES)
    store = assert_fails(kind, PlantedError, workers, faulty_model(fault, call))
    assert store.is_consistent
    with device_engine(kind, toy_model(), store, PARTITION, workers) as engine:
        train(engine, BATCHES[store.step :])
    assert_same_state(store.named_views(), expected.named_views())


def test_out_of_memory_in_a_layer_is_raised_and_the_memory_comes_back(kind, little_memory):
    workers, before = 2, torch.accelerator.memory_allocated()
    store = assert_fails(kind, torch.OutOfMemoryError, workers, faulty_model(run_out_of_memory, 24))
    gc.collect()
    # cuBLAS keeps a workspace for each thread and stream that ever multiplied. The simulated device keeps nothing.
    kept = 256 * MIB if kind == "cuda" else 1
    assert torch.accelerator.memory_allocated() - before < kept
    with device_engine(kind, toy_model(), store, PARTITION, workers) as engine:
        train(engine, BATCHES[store.step :])


def test_a_fixed_buffer_that_does_not_fit_is_named_with_what_is_free(kind, little_memory):
    with pytest.raises(DeviceMemoryError, match=rf"{kind}:0 cannot allocate 8\.000 GiB: .* GiB are free"):
        AcceleratorDevice(f"{kind}:0").allocate(8 * GIB)


# A device stops at its `after`-th task and refuses everything from then on, as a GPU does.
STOPS = [
    *[(after, workers, SYNC, 0, False) for after, workers in ((0, 1), (1, 2), (400, 2), (1200, 1))],
    *[(500, 2, SYNC, 0, True), (100, 2, BOUNDED, 0, True), (1100, 2, BOUNDED, 3, True)],
    *[
        pytest.param(after, 2, mode, stale_layers, True, marks=pytest.mark.nightly)
        for after in range(100, 1300, 200)
        for mode, stale_layers in ((SYNC, 0), (BOUNDED, 0), (BOUNDED, 3))
    ],
]


@pytest.mark.parametrize(("after", "workers", "mode", "stale_layers", "keeps"), STOPS, ids=str)
def test_a_device_that_fails_in_the_middle_leaves_whole_updates_or_a_store_that_is_marked(
    simulator, kind, after, workers, mode, stale_layers, keeps
):
    kept = ((),) * stale_layers + KEPT["all"][stale_layers:] if keeps else ()
    settings = {"kept": kept, "stale_layers": stale_layers}
    states, expected = {}, toy_store(toy_model(), pinned=True, mode=mode)
    with device_engine(kind, toy_model(), expected, PARTITION, 1, **settings) as engine:
        for step in range(len(BATCHES) + 1):
            states[step] = copied(expected)
            train(engine, BATCHES[step : step + 1])
    store = toy_store(toy_model(), pinned=True, mode=mode)
    engine = device_engine(kind, toy_model(), store, PARTITION, workers, **settings)
    simulator.inject_fault(0, after)
    with pytest.raises(PipelineError, match="planted fault") as raised:
        train(engine, BATCHES)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert engine_threads() == [] and (store.is_consistent or mode is BOUNDED)
    simulator.reset()
    if not store.is_consistent:
        with pytest.raises(EngineUsageError, match="mixes two weight versions"):
            device_engine(kind, toy_model(), store, PARTITION, workers, **settings)
        return
    assert_same_state(store.named_views(), states[store.step])
    with device_engine(kind, toy_model(), store, PARTITION, workers, **settings) as engine:
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
    assert "raised" in run_program("-c", POISON, kind).stdout
