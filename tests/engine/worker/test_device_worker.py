"""What a device's work waits for, and the memory that its computation holds.

No test here measures time: each checks in which order operations were enqueued, and which waits for which.
"""

import threading
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import toy
from tests.support.toy import PARTITIONS, linked, toy_batches, toy_engine, toy_model, train, watched
from torchround.accelerators import AcceleratorKind, as_if_on
from torchround.config import Config, EngineTable, TrainingTable
from torchround.engine.board import Observer
from torchround.engine.device import AcceleratorDevice, CpuDevice, Stream
from torchround.engine.worker.compute import StageComputation
from torchround.planning.partition import Partition
from torchround.planning.plan import Plan
from torchround.planning.update_modes import ASYNC, SYNC
from torchround.run.hardware import find_hardware
from torchround.trainer import build_engine, build_store

MICRO_BATCHES = 4
PARTITION = PARTITIONS["one layer a stage"]


def model_of(make_block):
    model = toy_model()
    blocks = [make_block(layer) for layer in range(1, len(model.layers) - 1)]
    return replace(model, layers=(model.layers[0], *blocks, model.layers[-1]))


class ClockedEvent:
    def __init__(self, inner, clock):
        self.inner, self.clock = inner, clock
        self.synchronize, self.query = inner.synchronize, inner.query


class Copy:
    def __init__(self, stream, nbytes, enqueued, ordered):
        self.stream, self.nbytes = stream, nbytes
        self.enqueued, self.ordered = Counter(enqueued), Counter(ordered)


class TransferOrder(Observer):
    """All copies of one device. Nothing runs before every stage job is `dispatched`, so each window finds the next."""

    def __init__(self):
        self.dispatched = threading.Event()
        self.copies = []
        self.enqueued = Counter()
        self._ordered = defaultdict(Counter)

    def begins(self, device, stream, reads, writes, copied_bytes):
        assert self.dispatched.wait(60)
        if copied_bytes:
            self.copies.append(Copy(stream, copied_bytes, self.enqueued, self._ordered[stream]))
        self.enqueued[stream] += 1
        self._ordered[stream][stream] += 1

    def recorded(self, device, stream, event, what):
        return ClockedEvent(event, self._ordered[stream].copy())

    def waits(self, device, stream, event, what):
        if not isinstance(event, ClockedEvent):
            return event
        self._ordered[stream] |= event.clock
        return event.inner


@pytest.fixture(scope="module")
def copies():
    order, model = TransferOrder(), toy_model()
    with toy_engine(PARTITION, 1, model=model, wrap=lambda device: watched(device, order)) as engine:
        engine.forward_backward(toy_batches(1, MICRO_BATCHES)[0])
        order.dispatched.set()
        engine.step(1e-2)
        engine.drain()
    return order.copies


@pytest.mark.parametrize(
    ("stream", "activations"),
    [(Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_UPLOAD), (Stream.GRADIENT_DOWNLOAD, Stream.ACTIVATION_DOWNLOAD)],
    ids=["weights", "gradients"],
)
def test_a_stage_moves_in_equal_chunks_one_a_micro_batch_behind_the_activations_on_their_way(
    copies, stream, activations
):
    """All at once move the weights of the first stage, which nothing hides, and the gradients of the last one."""
    own = [copy for copy in copies if copy.stream is stream]
    own = own[1:] if stream is Stream.WEIGHT_UPLOAD else own[:-1]
    assert len({copy.enqueued[activations] for copy in own}) > 2 * MICRO_BATCHES
    assert all(copy.ordered[activations] == copy.enqueued[activations] for copy in own)
    # Copies of one transfer window have the same computations before them.
    windows = [list(group) for _, group in groupby(own, lambda copy: copy.enqueued[Stream.COMPUTE])]
    stages = PARTITION.forward if stream is Stream.GRADIENT_DOWNLOAD else PARTITION.stages()[1:]
    assert len(windows) == MICRO_BATCHES * len(stages)
    elements = [sum(copy.nbytes for copy in window) // 4 for window in windows]
    for at in range(0, len(elements), MICRO_BATCHES):
        assert max(elements[at : at + MICRO_BATCHES]) - min(elements[at : at + MICRO_BATCHES]) <= 1


class Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, call):
        ctx.call = call
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


def test_a_recomputation_does_not_wait_for_its_incoming_gradient():
    """The backward of each layer ends only once the layer below it has computed that micro-batch again."""
    recomputed, micro_batches = defaultdict(threading.Event), toy_batches(1, 2)[0]
    number = {str(one.tokens.tolist()): index for index, one in enumerate(micro_batches)}

    class Block(toy.ToyBlock):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, hidden, micro_batch):
            index, below = number[str(micro_batch.tokens.tolist())], self.layer - 1
            if not torch.is_grad_enabled():
                return super().forward(hidden, micro_batch)
            recomputed[self.layer, index].set()

            def wait():
                assert below == 0 or recomputed[below, index].wait(20.0), "the recomputation waits for the gradient"

            return super().forward(Gradient.apply(hidden, wait), micro_batch)

    with toy_engine(PARTITION, 3, model=model_of(Block)) as engine:
        train(engine, [micro_batches])
    assert len(recomputed) == 5 * 2


def test_a_forward_stage_sends_each_boundary_before_it_computes_the_next_layer():
    """The stage has the embedding and five blocks, and the input of each block is kept for a backward stage."""
    order, calls = TransferOrder(), []
    order.dispatched.set()

    class Block(toy.ToyBlock):
        def forward(self, hidden, micro_batch):
            if not torch.is_grad_enabled():
                calls.append(order.enqueued[Stream.ACTIVATION_DOWNLOAD])
            return super().forward(hidden, micro_batch)

    model, partition = model_of(lambda layer: Block()), Partition((6,), 1, (1,) * 6)
    with toy_engine(partition, 1, model=model, wrap=lambda device: watched(device, order)) as engine:
        train(engine, toy_batches(1, micro_batches=1))
    assert calls == [1, 2, 3, 4, 5]


def test_each_stream_of_an_accelerator_waits_until_a_fresh_buffer_may_be_used(monkeypatch):
    """`tests/accelerator/test_device.py` shows what comes of a stream that does not."""
    waits = []

    class Kind(AcceleratorKind):
        def prepare_allocator(self):
            pass

        def stream(self, device, priority):
            return SimpleNamespace(wait_event=waits.append)

        def event(self, device, timed=False):
            return SimpleNamespace(record=lambda stream: None)

    allocating = SimpleNamespace(record_event=lambda: "allocated")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: allocating)
    with as_if_on(Kind("meta")):
        AcceleratorDevice("meta:0").allocate(8)
    assert waits == ["allocated"] * len(Stream)


def gradient_copies(mode, partition, num_devices=1, link=linked, **settings):
    orders = [TransferOrder() for _ in range(num_devices)]
    left = iter(orders)
    settings |= {"wrap": lambda device: watched(link(device), next(left))}
    for order in orders:
        order.dispatched.set()
    with toy_engine(partition, num_devices, mode=mode, **settings) as engine:
        train(engine, toy_batches(1, micro_batches=2))
    return [[copy for copy in order.copies if copy.stream is Stream.GRADIENT_DOWNLOAD] for order in orders]


def waited_for(copies):
    return [copy.ordered[Stream.COMPUTE] for copy in copies]


@pytest.mark.parametrize("layerwise_recompute", [False, True])
def test_in_the_last_stage_of_a_sync_step_gradients_leave_while_lower_layers_compute(layerwise_recompute):
    """Each of the seven layers' gradients, one copy each, waits for the backward of its layer and no further one."""
    [copies] = gradient_copies(SYNC, PARTITIONS["one stage"], layerwise_recompute=layerwise_recompute)
    assert waited_for(copies) == [copy.enqueued[Stream.COMPUTE] for copy in copies]
    assert len(set(waited_for(copies))) == len(copies) == 7


def test_only_a_devices_last_stage_of_a_sync_step_sends_each_layers_gradients_early():
    """The last stages of both devices have two layers. The fused stage has windows of a later stage."""
    first, second = map(waited_for, gradient_copies(SYNC, Partition((4,), 3, (2, 2)), num_devices=2))
    assert len(set(first)) == len(first) == 2
    *fused, upper, lower = second
    assert len(set(fused)) == 1 and fused[-1] < upper < lower


@pytest.mark.parametrize(("mode", "link"), [(SYNC, lambda device: device), (ASYNC, linked)], ids=["virtual", "async"])
def test_gradients_leave_after_their_stage_if_copies_take_the_devices_own_time_or_have_a_next_stage(mode, link):
    [copies] = gradient_copies(mode, PARTITIONS["one stage"], link=link)
    assert len(set(waited_for(copies))) == 1, "all of them wait for the whole stage"


class LiveBytes(TorchDispatchMode):
    """The most bytes of results that were alive at once, beside the engine's own buffers."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._storages = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        before = {tensor.untyped_storage().data_ptr() for tensor in arguments if isinstance(tensor, torch.Tensor)}
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in before:
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {k: (ref, size) for k, (ref, size) in self._storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


class CountingDevice(CpuDevice):
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
        config = Config.model_construct(training=TrainingTable(dtype="float32"), engine=table)
        store = build_store(model, config, find_hardware(table))
        store.initialize(model, seed=0)
        with build_engine(model, store, [device], plan, config) as engine:
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
    computation = StageComputation(dict.fromkeys(range(4), layer), {0: torch.ones(8)}, micro_batch, graphs_from=3)
    computation.run_to(4)
    computation.backward([torch.ones(8)], 0)
    assert alive == [[4, 0], [3, 0], [2, 0], [1, 0]], alive
