"""Faults in the engine's ordering: each removes, or does too early, one thing that keeps results exact."""

from typing import Any

import pytest
import torch

from tests.simulated_accelerator.simulator import load
from tests.support.planting import Plant, Planted, linger
from tests.support.toy import ToyBlock, ToyEmbedding, ToyHead
from torchround.engine import pass_data
from torchround.engine.device import AcceleratorDevice, Event, PastEvent, Stream
from torchround.engine.directions import Directions
from torchround.engine.engine import Engine
from torchround.engine.landed_gradients import LandedGradients
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.ordering import DIRECTION_LANDED, GRADIENT_LANDED, Ordering
from torchround.engine.store.host_memory import HostPool
from torchround.engine.worker.activation_transfers import ActivationTransfers, HostTensors
from torchround.engine.worker.bundle_transfers import GradientDownload, WeightUpload
from torchround.engine.worker.device_worker import DeviceWorker
from torchround.engine.worker.slots import DeviceSlot, Packing, SlotRing
from torchround.engine.worker.structure import as_tuple

# Ordering rules.


def gradient_before_it_landed(patch: pytest.MonkeyPatch) -> Planted:
    """Rule 3: the optimizer reads a gradient once its download is enqueued."""
    planted = Planted()

    def at_once(ordering: Ordering, bundle: int, step: int, part: int) -> Any:
        planted.happens()
        _, landing = ordering._board.wait(GRADIENT_LANDED(step, bundle, part))
        return landing

    patch.setattr(Ordering, "before_gradient_read", at_once)
    return planted


def direction_before_it_landed(patch: pytest.MonkeyPatch) -> Planted:
    """Rule 10: the optimizer reads a direction once its download is enqueued."""
    planted = Planted()

    def at_once(ordering: Ordering, bundle: int, step: int) -> Any:
        planted.happens()
        return ordering._board.wait(DIRECTION_LANDED(step, bundle))

    patch.setattr(Ordering, "before_direction_read", at_once)
    return planted


def early_signal(name: str) -> Plant:
    """Post a bundle's hand-over before its update, which is late then."""

    def plant(patch: pytest.MonkeyPatch) -> Planted:
        planted, update, post = Planted(), OptimizerWorker._update_bundle, getattr(Ordering, name)

        def updating(worker: OptimizerWorker, bundle: Any, step: int, *arguments: Any) -> None:
            planted.happens()
            post(worker._ordering, bundle.index, step)
            linger()
            update(worker, bundle, step, *arguments)

        patch.setattr(OptimizerWorker, "_update_bundle", updating)
        patch.setattr(Ordering, name, lambda *_: None)
        return planted

    return plant


def part_given_back_before_it_is_added(patch: pytest.MonkeyPatch) -> Planted:
    """The optimizer gives a part's buffer back, and says that it is consumed, before it adds the part."""
    planted, add_up, consumed = Planted(), LandedGradients._add_up, Ordering.part_consumed

    def adding(worker: LandedGradients, bundle: Any, step: int, parts: range, landings: list[Any]) -> None:
        planted.happens()
        for part, buffer in zip(parts, landings, strict=True):
            worker._landings.give(buffer, busy=[])
            consumed(worker._ordering, bundle.index, step, part)
        linger()
        with pytest.MonkeyPatch.context() as within:
            within.setattr(worker, "_landings", _Nowhere())
            within.setattr(Ordering, "part_consumed", lambda *_: None)
            add_up(worker, bundle, step, parts, landings)

    patch.setattr(LandedGradients, "_add_up", adding)
    return planted


def late_updates(patch: pytest.MonkeyPatch) -> None:
    """Let the optimizer be late with each update. No fault by itself."""
    update = OptimizerWorker._update

    def updating(worker: OptimizerWorker, *arguments: Any) -> None:
        linger()
        update(worker, *arguments)

    patch.setattr(OptimizerWorker, "_update", updating)


def late_look_aheads(patch: pytest.MonkeyPatch) -> None:
    """Let the optimizer be late with each look-ahead. No fault by itself."""
    write = Directions.look_ahead

    def writing(directions: Directions, *arguments: Any) -> None:
        linger()
        write(directions, *arguments)

    patch.setattr(Directions, "look_ahead", writing)


def newest_buffers_first(patch: pytest.MonkeyPatch) -> None:
    """Let the pool give out the buffer that came back last, which a stream may still use. No fault by itself."""
    take = HostPool._take_free

    def taking(pool: HostPool, size: int) -> Any:
        pool._free[size].rotate(1)
        return take(pool, size)

    patch.setattr(HostPool, "_take_free", taking)


class _Nowhere:
    """A pool that takes buffers and keeps none."""

    def give(self, buffer: Any, busy: Any) -> None:
        """Drop the buffer."""


# Host memory.


def given_back_by_the_first_reader(original: Any, planted: Planted) -> Any:
    def ends(tensors: HostTensors, event: Event, pool: HostPool) -> None:
        if not tensors._reads:
            tensors._reads.append(event)
            planted.times += tensors._readers > 1
            pool.give(tensors._buffer, tensors._reads)

    return ends


def given_back_at_once(original: Any, planted: Planted) -> Any:
    """Give a boundary's buffer back when it is sent, before any reader has it."""

    def send(transfers: ActivationTransfers, key: Any, hidden: Any, readers: int, *rest: Any) -> None:
        original(transfers, key, hidden, readers, *rest)
        planted.happens()
        tensors = transfers._board.wait(key)
        transfers._pool.give(tensors._buffer, [tensors.landed])

    return send


def forgets_who_is_busy(original: Any, planted: Planted) -> Any:
    def give(pool: HostPool, buffer: Any, busy: list[Event]) -> None:
        planted.times += bool(busy)
        original(pool, buffer, [])

    return give


def integers_written_at_once(patch: pytest.MonkeyPatch) -> Planted:
    """The caller overwrites a buffer of integers that a device still reads.

    The engine's other threads wait meanwhile. Otherwise it would be chance which buffers they have given back.
    """
    planted, copy, simulator = Planted(), pass_data.host_micro_batch, load()

    def at_once(micro_batch: Any, pool: HostPool, observer: Any, readers: int, synchronize: Any) -> Any:
        def count(event: Event) -> None:
            planted.happens()

        simulator.wait_for_other_threads()
        return copy(micro_batch, pool, observer, readers, count)

    patch.setattr(pass_data, "host_micro_batch", at_once)
    return planted


# Device memory.


def temporary_without_a_ring(original: Any, planted: Planted) -> Any:
    """Copy a stage's output to the host straight from where the computation left it."""

    def send(transfers: ActivationTransfers, key: Any, hidden: Any, readers: int, *rest: Any) -> None:
        planted.happens()
        device, packing = transfers._device, Packing.of(hidden)
        buffer = transfers._pool.take(packing.nbytes)
        for event in buffer.busy:
            device._wait(Stream.ACTIVATION_DOWNLOAD, event)
        device._wait(Stream.ACTIVATION_DOWNLOAD, device._record(Stream.COMPUTE))
        for view, tensor in zip(packing.views(buffer.memory), as_tuple(hidden), strict=True):
            device._copy(Stream.ACTIVATION_DOWNLOAD, view, tensor.detach())
        landed = device._record(Stream.ACTIVATION_DOWNLOAD)
        transfers._board.post(key, HostTensors(buffer, packing, landed, readers))

    return send


def never_released(original: Any, planted: Planted) -> Any:
    """Take slots as if no stream still used what they held."""

    def next_slot(ring: SlotRing, *arguments: Any) -> DeviceSlot:
        slot = original(ring, *arguments)
        planted.times += slot.released is not None
        slot.released = None
        return slot

    return next_slot


def released_before_the_sends(patch: pytest.MonkeyPatch) -> Planted:
    """A ring's entry is released before the copy of a result that may be a part of it."""
    planted, send = Planted(), ActivationTransfers.send

    def sending(transfers: ActivationTransfers, *arguments: Any) -> None:
        planted.happens()
        transfers.end_micro_batch()
        send(transfers, *arguments)

    patch.setattr(ActivationTransfers, "send", sending)
    return planted


def hand_part_of_the_input_on(patch: pytest.MonkeyPatch) -> None:
    """Change the toy model: each block hands on a second tensor as it came. No fault by itself."""
    embed, block, head = ToyEmbedding.forward, ToyBlock.forward, ToyHead.forward

    def embedding(self: Any, hidden: Any, micro_batch: Any) -> Any:
        made = embed(self, hidden, micro_batch)
        return made, made.detach() * 0.5

    patch.setattr(ToyEmbedding, "forward", embedding)
    patch.setattr(ToyBlock, "forward", lambda self, hidden, batch: (block(self, hidden[0], batch), hidden[1]))
    patch.setattr(ToyHead, "forward", lambda self, hidden, batch: head(self, hidden[0] + hidden[1], batch))


def weights_released_at_the_start(patch: pytest.MonkeyPatch) -> Planted:
    """A stage's weights may be overwritten as soon as the stage begins."""
    planted, finish, ring = Planted(), WeightUpload.finish, DeviceWorker._finish

    def finishing(upload: WeightUpload) -> Event:
        event = finish(upload)
        upload.slot.__dict__["too_early"] = upload._device._record(Stream.COMPUTE)
        return event

    def ending(worker: DeviceWorker, job: Any, upload: WeightUpload, *arguments: Any) -> None:
        ring(worker, job, upload, *arguments)
        planted.happens()
        upload.slot.released = upload.slot.__dict__["too_early"]

    patch.setattr(WeightUpload, "finish", finishing)
    patch.setattr(DeviceWorker, "_finish", ending)
    return planted


def outgrown_slots_are_dropped(original: Any, planted: Planted) -> Any:
    def slot(ring: SlotRing, position: int, numel: int) -> DeviceSlot:
        found = original(ring, position, numel)
        planted.times += len(ring._outgrown)
        ring._outgrown.clear()
        return found

    return slot


def buffer_of_no_order(patch: pytest.MonkeyPatch) -> None:
    """Allocate without ordering the streams after the one that allocates."""

    def allocate(device: AcceleratorDevice, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)

    patch.setattr(AcceleratorDevice, "_allocate", allocate)


# Streams.


def on_stream(method: str, asked: Stream, taken: Stream | None) -> Plant:
    """Enqueue copies, computations or events of one stream on another; None is the stream that allocates."""

    def plant(patch: pytest.MonkeyPatch) -> Planted:
        planted, original = Planted(), getattr(AcceleratorDevice, method)

        def elsewhere(device: AcceleratorDevice, stream: Stream, *arguments: Any, **options: Any) -> Any:
            if stream is not asked:
                return original(device, stream, *arguments, **options)
            planted.happens()
            if taken is not None:
                return original(device, taken, *arguments, **options)
            own = device._streams
            device._streams = {**own, stream: torch.accelerator.current_stream(device.torch_device)}
            try:
                return original(device, stream, *arguments, **options)
            finally:
                device._streams = own

        patch.setattr(AcceleratorDevice, method, elsewhere)
        return planted

    return plant


def rounding_on_the_compute_stream(original: Any, planted: Planted) -> Any:
    """Round a gradient for its download without telling the stream that downloads."""

    def copy(download: GradientDownload, target: torch.Tensor, source: torch.Tensor) -> None:
        assert download._rounding is not None, "the run rounds"
        planted.happens()
        rounded = download._rounding[: source.numel()]
        download._device._run(Stream.COMPUTE, lambda: rounded.copy_(source))
        download._device._copy(Stream.GRADIENT_DOWNLOAD, target, rounded)

    return copy


def loss_read_before_it_landed(patch: pytest.MonkeyPatch) -> Planted:
    """Host threads read losses once their copies are enqueued."""
    planted = Planted()

    def at_once(boundary: HostTensors, pool: HostPool) -> float:
        planted.happens()
        [loss] = boundary.packing.views(boundary.memory)
        value = float(loss)
        boundary.reader_ends(PastEvent(), pool)
        return value

    patch.setattr("torchround.engine.pass_data.read_loss", at_once)
    patch.setattr("torchround.engine.results.read_loss", at_once)
    patch.setattr(Engine, "_synchronize", lambda engine, event: None)
    return planted
