"""The end of an engine gives device memory and pool memory back at once: no reference cycle waits for the collector.

The caller keeps all that a caller can have: the engine, its results, and the fault that ended it. A device frees its
buffers itself. Each of the pool's is the memory of a numpy array. A tensor's storage holds the array, so the array lives
exactly as long as the last view of the buffer. Python's weak references to tensors say nothing about their memory.
"""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.faults import LANDED, Bomb, armed
from tests.support.toy import KEPT, PARTITIONS, ToyBlock, toy_batches, toy_engine, toy_model, train
from torchround.engine.compiled import LayerCompiler
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.errors import DeviceMemoryError, PipelineError
from torchround.engine.store.host_memory import HostPool
from torchround.planning.update_modes import ASYNC

BATCHES = toy_batches(3, micro_batches=2)
POOL = "the pool of host buffers"


class RecordedBuffers:
    """The buffers of virtual devices and of the pool that were allocated, with a word for who asked for each.

    `fresh_starts` counts the allocations that were made while no other buffer was in memory.
    """

    def __init__(self):
        self._buffers = []
        self.fresh_starts = 0

    def add(self, owner, nbytes, is_alive):
        self.fresh_starts += nbytes > 0 and not self.alive()
        self._buffers.append((owner, nbytes, is_alive))

    def allocate(self, owner, nbytes):
        array = np.zeros(nbytes, dtype=np.uint8)
        found = weakref.ref(array)
        self.add(owner, nbytes, lambda: found() is not None)
        return torch.from_numpy(array)

    def alive(self):
        return [f"{nbytes} bytes of {owner}" for owner, nbytes, is_alive in self._buffers if is_alive()]

    def owners(self):
        return {owner for owner, _, _ in self._buffers}


@pytest.fixture
def buffers(monkeypatch):
    buffers, on_device, on_host = RecordedBuffers(), CpuDevice.allocate, HostPool.allocate

    def allocate(device, nbytes):
        buffer = on_device(device, nbytes)
        buffers.add(device.name, nbytes, lambda: buffer.untyped_storage().nbytes() > 0)
        return buffer

    def allocate_on_host(pool, nbytes, *arguments, **options):
        on_host(pool, nbytes, *arguments, **options)  # the pool's own count
        return buffers.allocate(POOL, nbytes)

    monkeypatch.setattr(CpuDevice, "allocate", allocate)
    monkeypatch.setattr(HostPool, "allocate", allocate_on_host)
    gc.collect()
    gc.disable()
    yield buffers
    gc.enable()


@pytest.mark.parametrize(
    ("partition", "settings"),
    [
        ("one stage", {"accumulate_dtype": torch.bfloat16}),
        ("one layer a stage", {"rounds": 2}),
        ("forward coarser", {"layerwise_recompute": True, "kept": KEPT["mixed"]}),
        ("backward coarser", {"rounds": 2, "accumulate_dtype": torch.bfloat16, "kept": KEPT["mixed"]}),
    ],
)
def test_close_gives_every_buffer_back(buffers, partition, settings):
    engine = toy_engine(PARTITIONS[partition], 2, model=toy_model(tied=True), mode=ASYNC, **settings)
    kept = [engine.evaluate(BATCHES[0])]
    for micro_batches in BATCHES:
        kept.append(engine.forward_backward(micro_batches))
        engine.step(1e-2)
    assert buffers.alive()
    engine.close()
    assert buffers.owners() == {"cpu:0", "cpu:1", POOL} and not buffers.alive()
    assert all(result.loss() > 0 and result.reports() for result in kept)
    assert all(result.update().grad_norm > 0 for result in kept[1:])


@pytest.mark.compiles
def test_compiled_layers_keep_no_buffer(buffers):
    model = toy_model()
    compiler = LayerCompiler(model, backend="aot_eager")
    with toy_engine(PARTITIONS["forward coarser"], 2, model=model, compiler=compiler) as engine:
        train(engine, BATCHES)
    assert any(kind.shapes for kind in compiler.kinds) and not buffers.alive()


BY_NIGHT = [pytest.param(place, marks=pytest.mark.nightly) for place in ("layer", "copy")]


PLACES = ["after parts are recorded", "after a replay", "backward", "update", "download", *BY_NIGHT]


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_gives_every_buffer_back(buffers, place):
    planted, bomb = [], Bomb(None, ValueError)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            ctx.activation = buffers.allocate("an activation", 64)
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError(f"planted with {ctx.activation.numel()}")

    class Block(ToyBlock):
        def forward(self, hidden, micro_batch):
            if planted == ["layer"]:
                activation = buffers.allocate("an activation", 64)
                raise ValueError(f"planted with {activation.numel()}")
            output = super().forward(hidden, micro_batch)
            if planted == ["backward"] and torch.is_grad_enabled():
                return Failing.apply(output)
            if planted == ["after a replay" if torch.is_grad_enabled() else "after parts are recorded"]:
                raise ValueError(f"planted with {output.shape}")
            return output

    model = toy_model()
    model = replace(model, layers=(model.layers[0], *(Block() for _ in model.layers[1:-1]), model.layers[-1]))
    settings = {"rounds": 2, "kept": KEPT["all"], **armed(bomb)}
    engine = toy_engine(PARTITIONS["backward coarser"], 2, model=model, **settings)
    train(engine, BATCHES[:1])
    planted.append(place)
    places = {"copy": Stream.WEIGHT_UPLOAD, "download": Stream.GRADIENT_DOWNLOAD, "update": ("has", LANDED)}
    bomb.place = places.get(place)
    kept = []
    with pytest.raises(PipelineError, match="planted") as fault:
        for micro_batches in BATCHES:
            kept.append(engine.forward_backward(micro_batches))
            engine.step(1e-2)
        engine.drain()
    assert kept and fault.value.__cause__ is not None
    assert not buffers.alive()


def test_an_engine_that_does_not_fit_gives_every_buffer_back(buffers):
    model, partition = toy_model(), PARTITIONS["forward coarser"]
    with toy_engine(partition, 1, model=model) as engine:
        needed = engine.devices[0].peak_bytes()  # before the first pass: the slots for weights and gradients
    devices = [CpuDevice(0), CpuDevice(1, needed - 1)]
    with pytest.raises(DeviceMemoryError) as error:
        toy_engine(partition, 2, model=model, wrap=lambda device: devices[int(device.name[4:])])
    assert error.value is not None and buffers.owners() >= {"cpu:0", "cpu:1"} and not buffers.alive()


def test_the_engine_after_the_one_that_measures_begins_with_empty_devices(buffers, small_runs):
    keys = ["--engine.plan=none", "--engine.measure_steps=3", "--trace.steps=[2]", "--validation.interval_steps=2"]
    keys += ["--checkpoint.interval_steps=2", "--validation.sources=[{ path = 'text.jsonl' }]"]
    assert small_runs("run", *keys) == 0
    assert buffers.fresh_starts == 2 and not buffers.alive()
