"""The end of an engine gives device memory and pool memory back at once: no reference cycle waits for the collector.

The caller keeps all that a caller can have: the engine, its results, and the fault that ended it.
"""

import gc

import pytest
import torch

from tests.support.recorded_memory import RecordedBuffers, record_buffers
from tests.support.small_run import SmallRuns, small_runs
from tests.support.toy import KEPT, PARTITIONS, ToyBlock, ToyHead, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.compiled import LayerCompiler
from torchround.engine.device import CpuDevice
from torchround.engine.errors import DeviceMemoryError, PipelineError
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC
from torchround.engine.worker.device_worker import DeviceWorker
from torchround.engine.worker.kept_transfers import KeptTransfers

__all__ = ["small_runs"]

BATCHES = toy_batches(3, micro_batches=4)
DEVICES = {"cpu:0", "cpu:1"}


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch):
    recorded = record_buffers(monkeypatch)
    gc.collect()
    gc.disable()
    yield recorded
    gc.enable()


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"rounds": 2}, {"layerwise_recompute": True}, {"accumulate_dtype": torch.bfloat16}, {"kept": KEPT["mixed"]}],
    ids=str,
)
def test_close_gives_every_buffer_back(buffers: RecordedBuffers, partition: str, settings: dict) -> None:
    model = toy_model(tied=True)
    engine = toy_engine(model, toy_store(model, policy=ASYNC), PARTITIONS[partition], 2, **settings)
    kept = [engine.evaluate(BATCHES[0])]
    for micro_batches in BATCHES:
        kept.append(engine.forward_backward(micro_batches))
        engine.step(1e-2)
    assert buffers.alive()
    engine.close()
    assert buffers.owners() == DEVICES | {"a pool"} and not buffers.alive()
    assert all(result.loss() > 0 and result.reports() for result in kept)
    assert all(result.update().grad_norm > 0 for result in kept[1:])


def test_compiled_layers_keep_no_buffer(buffers: RecordedBuffers) -> None:
    model = toy_model()
    compiler = LayerCompiler(model, backend="aot_eager")
    with toy_engine(model, toy_store(model), PARTITIONS["forward coarser"], 2, compiler=compiler) as engine:
        train(engine, BATCHES)
    assert any(kind.shapes for kind in compiler.kinds) and not buffers.alive()


def fail_in_forward(monkeypatch: pytest.MonkeyPatch, buffers: RecordedBuffers) -> None:
    def forward(self, hidden, micro_batch):
        activation = buffers.allocate("an activation", 64)
        raise ValueError(f"planted with {activation.numel()}")

    monkeypatch.setattr(ToyBlock, "forward", forward)


def fail_in_backward(monkeypatch: pytest.MonkeyPatch, buffers: RecordedBuffers) -> None:
    plain = ToyHead.forward

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            ctx.activation = buffers.allocate("an activation", 64)
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError(f"planted with {ctx.activation.numel()}")

    monkeypatch.setattr(ToyHead, "forward", lambda *arguments: Failing.apply(plain(*arguments)))


def fail_in_a_copy(monkeypatch: pytest.MonkeyPatch, buffers: RecordedBuffers) -> None:
    def copy(self, stream, destination, source):
        raise ValueError("planted")

    monkeypatch.setattr(CpuDevice, "_copy", copy)


def fail_in_the_optimizer(monkeypatch: pytest.MonkeyPatch, buffers: RecordedBuffers) -> None:
    def landed(self, *arguments):
        raise ValueError("planted")

    monkeypatch.setattr(Ordering, "before_gradient_read", landed)


def fail_after_a_record(monkeypatch: pytest.MonkeyPatch, buffers: RecordedBuffers) -> None:
    """A layer's parts are recorded, and then it fails before they are sent."""
    recorded = KeptTransfers.recorded

    def recording(self, layer, call):
        def failing(hidden, micro_batch):
            output = call(hidden, micro_batch)
            raise ValueError(f"planted with {output.shape}")

        return recorded(self, layer, failing)

    monkeypatch.setattr(KeptTransfers, "recorded", recording)


def fail_in_a_replay(monkeypatch: pytest.MonkeyPatch, buffers: RecordedBuffers) -> None:
    """A kept tensor is missing, so that the recomputation cannot take it."""
    upload = KeptTransfers._upload

    def losing(self, found):
        staged = upload(self, found)
        for tensors in staged.tensors.values():
            tensors.pop()
        return staged

    monkeypatch.setattr(KeptTransfers, "_upload", losing)


def fail_between_record_and_send(monkeypatch: pytest.MonkeyPatch, buffers: RecordedBuffers) -> None:
    def send(self, *arguments):
        raise ValueError("planted")

    monkeypatch.setattr(KeptTransfers, "send", send)


@pytest.mark.parametrize(
    "plant",
    [
        fail_in_forward,
        fail_in_backward,
        fail_in_a_copy,
        fail_in_the_optimizer,
        fail_after_a_record,
        fail_between_record_and_send,
        fail_in_a_replay,
    ],
    ids=lambda f: f.__name__,
)
def test_a_fault_gives_every_buffer_back(buffers: RecordedBuffers, monkeypatch: pytest.MonkeyPatch, plant) -> None:
    model = toy_model()
    engine = toy_engine(model, toy_store(model), PARTITIONS["backward coarser"], 2, rounds=2, kept=KEPT["all"])
    train(engine, BATCHES[:1])
    plant(monkeypatch, buffers)
    kept = []
    with pytest.raises(PipelineError, match="planted|and only 1 were kept") as fault:
        for micro_batches in BATCHES:
            kept.append(engine.forward_backward(micro_batches))
            engine.step(1e-2)
        engine.drain()
    assert kept and fault.value.__cause__ is not None
    assert not buffers.alive()


def test_an_engine_that_does_not_fit_gives_every_buffer_back(buffers: RecordedBuffers) -> None:
    model = toy_model()
    with toy_engine(model, toy_store(model), PARTITIONS["forward coarser"], 1) as engine:
        needed = engine.devices[0].peak_bytes()  # before the first pass: the slots for weights and gradients
    devices = [CpuDevice(0), CpuDevice(1, needed - 1)]
    with pytest.raises(DeviceMemoryError) as error:
        toy_engine(
            model, toy_store(model), PARTITIONS["forward coarser"], 2, wrap=lambda device: devices[int(device.name[4:])]
        )
    assert error.value is not None and buffers.owners() >= DEVICES and not buffers.alive()


def test_the_engine_after_the_one_that_measures_begins_with_empty_devices(
    buffers: RecordedBuffers, small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, alive = DeviceWorker.allocate, []

    def seen(self: DeviceWorker) -> None:
        if self._device.name == "cpu:0":  # the first device of each engine
            alive.append(buffers.alive())
        allocate(self)

    monkeypatch.setattr(DeviceWorker, "allocate", seen)
    keys = ["--engine.plan=none", "--engine.measure_steps=3", "--trace.steps=[2]", "--validation.interval_steps=2"]
    keys += ["--checkpoint.interval_steps=2", "--validation.sources=[{ path = 'text.jsonl' }]"]
    assert small_runs("run", *keys) == 0
    assert alive == [[], []] and not buffers.alive()
