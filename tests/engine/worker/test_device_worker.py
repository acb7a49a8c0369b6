"""The order in which a device worker enqueues its work, and the memory that its computation holds.

No test here measures time: each checks what the worker enqueued, in which order, and which operation waits
for which.
"""

import threading
from collections import Counter, defaultdict

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.toy import (
    PARTITIONS,
    ToyBlock,
    linked,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
    watched,
)
from torchround.config import AdamWTable, EngineTable, TrainingTable
from torchround.engine.board import Board
from torchround.engine.device import CpuDevice, DeviceWatcher, Stream
from torchround.engine.store.bundles import ASYNC, SYNC
from torchround.engine.worker.activation_transfers import BOUNDARY_GRADIENT
from torchround.engine.worker.compute import ForwardWithGraph
from torchround.engine.worker.device_worker import DeviceWorker
from torchround.engine.worker.stage_run import StageRun
from torchround.pipeline.partition import Partition
from torchround.pipeline.plan import Plan
from torchround.pipeline.timeline import TaskKind
from torchround.run.engine_parts import build_engine, build_store
from torchround.run.hardware import find_hardware
from torchround.run.numbers import RunNumbers

MICRO_BATCHES = 4
PARTITION = PARTITIONS["one layer a stage"]


class ClockedEvent:
    """An event that knows how many operations of each stream come before it."""

    def __init__(self, inner, clock):
        self.inner, self.clock = inner, clock
        self.synchronize, self.query = inner.synchronize, inner.query


class Copy:
    """A copy, the window and stage job it belongs to, and what was enqueued before it and is ordered before it."""

    def __init__(self, stream, nbytes, window, enqueued, ordered):
        self.stream, self.nbytes, self.window = stream, nbytes, window
        self.enqueued, self.ordered = Counter(enqueued), Counter(ordered)


class TransferOrder(DeviceWatcher):
    """All copies of one device. Nothing runs before every stage job is `dispatched`, so each window finds the next."""

    def __init__(self):
        self.dispatched = threading.Event()
        self.window = None
        self.copies = []
        self._enqueued = Counter()
        self._ordered = defaultdict(Counter)

    def begins(self, device, stream, reads, writes, copied_bytes):
        assert self.dispatched.wait(60)
        if copied_bytes:
            self.copies.append(Copy(stream, copied_bytes, self.window, self._enqueued, self._ordered[stream]))
        self._enqueued[stream] += 1
        self._ordered[stream][stream] += 1

    def recorded(self, device, stream, event):
        return ClockedEvent(event, self._ordered[stream].copy())

    def waits(self, device, stream, event):
        if not isinstance(event, ClockedEvent):
            return event
        self._ordered[stream] |= event.clock
        return event.inner


@pytest.fixture
def copies_in_windows(monkeypatch):
    """Copies that one device makes in the transfer windows of one step. A window is (stage job, windows left)."""
    order, advance, jobs = TransferOrder(), DeviceWorker._advance_transfers, Counter()

    def in_window(worker, remaining, window):
        if remaining == MICRO_BATCHES:
            jobs["begun"] += 1
        order.window = (jobs["begun"] - 1, remaining)
        advance(worker, remaining, window)
        order.window = None

    monkeypatch.setattr(DeviceWorker, "_advance_transfers", in_window)
    model = toy_model()
    with toy_engine(model, toy_store(model), PARTITION, 1, wrap=lambda device: watched(device, order)) as engine:
        engine.forward_backward(toy_batches(1, MICRO_BATCHES)[0])
        order.dispatched.set()
        engine.step(1e-2)
        engine.drain()
    return [copy for copy in order.copies if copy.window is not None]


@pytest.mark.parametrize(
    ("chunks", "activations"),
    [(Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_UPLOAD), (Stream.GRADIENT_DOWNLOAD, Stream.ACTIVATION_DOWNLOAD)],
    ids=["weights", "gradients"],
)
def test_each_chunk_queues_behind_the_activations_already_on_their_way(copies_in_windows, chunks, activations):
    found = [copy for copy in copies_in_windows if copy.stream is chunks]
    assert len({copy.enqueued[activations] for copy in found}) > 2 * MICRO_BATCHES
    for copy in found:
        assert copy.ordered[activations] == copy.enqueued[activations], copy.window


@pytest.mark.parametrize("stream", [Stream.WEIGHT_UPLOAD, Stream.GRADIENT_DOWNLOAD])
def test_a_stage_is_moved_in_equal_chunks_one_in_each_window(copies_in_windows, stream):
    """The weights of the next stage, in every stage but the last; gradients of the last one, after the fused stage."""
    moved = defaultdict(Counter)
    for copy in copies_in_windows:
        if copy.stream is stream:
            job, remaining = copy.window
            moved[job][remaining] += copy.nbytes // 4
    stages = len(PARTITION.stages())
    first = 0 if stream is Stream.WEIGHT_UPLOAD else len(PARTITION.forward) + 1
    assert sorted(moved) == list(range(first, stages - (stream is Stream.WEIGHT_UPLOAD)))
    for chunks in moved.values():
        assert set(chunks) == set(range(1, MICRO_BATCHES + 1)), "a window without a chunk"
        assert max(chunks.values()) - min(chunks.values()) <= 1


def test_a_recomputation_is_enqueued_before_its_incoming_gradient_is_waited_for(monkeypatch):
    done, wait, compute = defaultdict(list), Board.wait, StageRun._compute

    def waiting(board, key, *arguments):
        if key.kind is BOUNDARY_GRADIENT:
            done[threading.current_thread().name].append(("gradient", key.key[-1]))
        return wait(board, key, *arguments)

    def computing(run, kind, micro_batch, *arguments, **options):
        if kind is TaskKind.RECOMPUTE:
            done[threading.current_thread().name].append(("recomputation", micro_batch))
        return compute(run, kind, micro_batch, *arguments, **options)

    monkeypatch.setattr(Board, "wait", waiting)
    monkeypatch.setattr(StageRun, "_compute", computing)
    model = toy_model()
    with toy_engine(model, toy_store(model), PARTITION, 3) as engine:
        train(engine, toy_batches(1, MICRO_BATCHES))
    pairs = [pair for steps in done.values() for pair in zip(steps[::2], steps[1::2], strict=True)]
    assert len(pairs) == len(PARTITION.backward) * MICRO_BATCHES
    for (first, m), (second, waited_for) in pairs:
        assert (first, second) == ("recomputation", "gradient") and m == waited_for


class StreamOrder(DeviceWatcher):
    """The streams of a device's operations, in the order in which they were enqueued."""

    def __init__(self):
        self.streams = []

    def begins(self, device, stream, reads, writes, copied_bytes):
        self.streams.append(stream)


def test_a_forward_stage_sends_each_boundary_before_it_computes_the_next_layer(monkeypatch):
    """The stage has the embedding and five blocks, and the input of each block is kept for a backward stage."""
    order, calls = StreamOrder(), []
    forward = ToyBlock.forward

    def noted(block, hidden, micro_batch):
        if not torch.is_grad_enabled():
            calls.append(order.streams.count(Stream.ACTIVATION_DOWNLOAD))
        return forward(block, hidden, micro_batch)

    monkeypatch.setattr(ToyBlock, "forward", noted)
    model = toy_model()
    with toy_engine(
        model, toy_store(model), Partition((6,), 1, (1,) * 6), 1, wrap=lambda device: watched(device, order)
    ) as engine:
        train(engine, toy_batches(1, micro_batches=1))
    assert calls == [1, 2, 3, 4, 5]


class GradientCopies(DeviceWatcher):
    """For each copy of gradients, the computations of its device that were enqueued before, and that it waits for."""

    def __init__(self):
        self.enqueued, self.waited_for = [], []
        self._computations = self._passed = 0

    def begins(self, device, stream, reads, writes, copied_bytes):
        self._computations += stream is Stream.COMPUTE
        if stream is Stream.GRADIENT_DOWNLOAD and copied_bytes:
            self.enqueued.append(self._computations)
            self.waited_for.append(self._passed)

    def recorded(self, device, stream, event):
        return ClockedEvent(event, self._computations) if stream is Stream.COMPUTE else event

    def waits(self, device, stream, event):
        if not isinstance(event, ClockedEvent):
            return event
        if stream is Stream.GRADIENT_DOWNLOAD:
            self._passed = max(self._passed, event.clock)
        return event.inner


def copies_of_a_step(policy, partition, num_devices=1, micro_batches=2, link=linked, **settings):
    """Return the copies of gradients that each device makes in one step. `link` prepares each device."""
    model, found = toy_model(), [GradientCopies() for _ in range(num_devices)]
    store, copies = toy_store(model, policy=policy), iter(found)
    with toy_engine(
        model, store, partition, num_devices, wrap=lambda device: watched(link(device), next(copies)), **settings
    ) as engine:
        train(engine, toy_batches(1, micro_batches))
    return found


@pytest.mark.parametrize("layerwise_recompute", [False, True])
def test_in_the_last_stage_of_a_sync_step_gradients_leave_while_lower_layers_compute(layerwise_recompute):
    """Each of the seven layers' gradients, one copy each, waits for the backward of its layer and no further one."""
    [copies] = copies_of_a_step(SYNC, PARTITIONS["one stage"], layerwise_recompute=layerwise_recompute)
    assert copies.waited_for == copies.enqueued
    assert len(set(copies.enqueued)) == len(copies.enqueued) == 7


def test_only_a_devices_last_stage_of_a_sync_step_sends_each_layers_gradients_early():
    """The last stages of both devices have two layers. The fused stage has windows of a later stage."""
    first, second = copies_of_a_step(SYNC, Partition((4,), 3, (2, 2)), num_devices=2)
    assert len(set(first.waited_for)) == len(first.waited_for) == 2
    *fused, upper, lower = second.waited_for
    assert len(set(fused)) == 1 and fused[-1] < upper < lower


def test_a_virtual_device_sends_gradients_after_its_stage_because_copies_take_its_own_time():
    [copies] = copies_of_a_step(SYNC, PARTITIONS["one stage"], link=lambda device: device)
    assert len(set(copies.waited_for)) == 1, "all of them wait for the whole stage"


def test_in_async_mode_gradients_leave_in_the_windows_of_the_next_stage():
    [copies] = copies_of_a_step(ASYNC, PARTITIONS["one stage"])
    assert len(set(copies.waited_for)) == 1, "all of them wait for the whole stage"


class LiveBytes(TorchDispatchMode):
    """The most bytes of results that were alive at once, beside the engine's own buffers."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        before = {tensor.untyped_storage()._cdata for tensor in arguments if isinstance(tensor, torch.Tensor)}
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {k: (ref, size) for k, (ref, size) in self._storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


class CountingDevice(CpuDevice):
    """Counts what its computation holds at once."""

    def __init__(self):
        super().__init__(0)
        self.live = LiveBytes()

    def _run(self, stream, work):
        with self.live:
            return super()._run(stream, work)


@pytest.mark.parametrize("partition", ["one stage", "backward coarser"])
def test_recompute_layer_holds_the_activations_of_one_layer_instead_of_a_stage(partition):
    """`engine.recompute` decides, in a run built from tables."""
    plan, peaks = Plan(PARTITIONS[partition], 1, 1, MICRO_BATCHES, "sync", 1.0, 0.0, 1.0), {}
    for recompute in ("stage", "layer"):
        device, model = CountingDevice(), toy_model()
        table = EngineTable(devices="cpu", num_devices=1, recompute=recompute)
        numbers = RunNumbers(TrainingTable(dtype="float32"), table)
        store = build_store(model, numbers, find_hardware(table))
        store.initialize(model, seed=0)
        with build_engine(model, store, [device], plan, numbers, AdamWTable()) as engine:
            train(engine, toy_batches(1, MICRO_BATCHES))
        peaks[recompute] = device.live.peak
    # Stages have 7 and 4 layers. Beside one layer's activations, inputs of the others and gradients are held.
    assert peaks["layer"] < 0.6 * peaks["stage"], peaks


def test_a_layer_that_runs_again_finds_the_input_and_output_of_the_layer_above_gone():
    """Both are of the size of a boundary activation, which a plan counts once for each layer below."""
    inputs, outputs, alive = [], [], []

    def layer(hidden, micro_batch):
        if len(inputs) < 4:  # the first run of each layer; the last one's is its only one
            inputs.append(StorageWeakRef(hidden.untyped_storage()))
        if torch.is_grad_enabled():
            alive.append([sum(not ref.expired() for ref in refs) for refs in (inputs, outputs)])
        output = hidden.sin()
        if torch.is_grad_enabled():
            outputs.append(StorageWeakRef(output.untyped_storage()))
        return output

    [micro_batch] = toy_batches(1, micro_batches=1)[0]
    graph = ForwardWithGraph([layer] * 4, torch.ones(8), micro_batch, layerwise=True)
    graph.run_to(4).backward([torch.ones(8)])
    assert alive == [[4, 0], [3, 0], [2, 0], [1, 0]], alive
