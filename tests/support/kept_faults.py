"""Faults in what kept activations go through: recording, the way down, the way up, and the replay.

A `Bomb` goes off at its `hit`-th chance, once. Each site below gives it a chance at one place of the engine's way.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support import toy
from torchround import keeping
from torchround.engine.board import Board
from torchround.engine.device import CpuDevice
from torchround.engine.store.host_memory import HostPool
from torchround.engine.worker.kept_transfers import KEPT, KeptTransfers


class PlantedError(RuntimeError):
    """A fault of a device, or an error in a layer."""


class Bomb:
    """An exception that is raised at the `hit`-th chance; without one, a delay at every chance."""

    def __init__(self, exception: type[BaseException] | None, hit: int = 1) -> None:
        self.exception, self.hit = exception, hit
        self.chances = 0
        self.raised: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.chances += 1
            is_due = self.chances == self.hit
        if self.exception is None:
            time.sleep(0.005)
        elif is_due:
            self.raised = self.exception("planted")
            raise self.raised


Site = Callable[[pytest.MonkeyPatch, Bomb], None]


def _is_active(state: str) -> bool:
    active = keeping._thread.active
    return active is not None and (active.replay is not None) is (state == "replayed")


def before_layers(state: str) -> Site:
    """A block, before it runs while it is `recorded` or `replayed`."""

    def plant(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
        forward = toy.ToyBlock.forward

        def fused(self, hidden, micro_batch):
            if _is_active(state):
                bomb()
            return forward(self, hidden, micro_batch)

        patch.setattr(toy.ToyBlock, "forward", fused)

    return plant


def inside_parts(state: str) -> Site:
    """A named part of a block, after its product, while operations are intercepted."""

    def plant(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
        keep = toy.keep

        def fused_keep(name, function, *args):
            def part(*values):
                found = function(*values)
                bomb()
                return found

            return keep(name, part if _is_active(state) else function, *args)

        patch.setattr(toy, "keep", fused_keep)

    return plant


def in_backward(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
    """The backward of a block that was replayed."""
    forward = toy.ToyBlock.forward

    def fused(self, hidden, micro_batch):
        output = forward(self, hidden, micro_batch)
        if _is_active("replayed") and output.requires_grad:
            output.register_hook(lambda gradient: bomb())
        return output

    patch.setattr(toy.ToyBlock, "forward", fused)


_inside = threading.local()


def within(method: str, owner: type, operation: str) -> Site:
    """Every `owner.operation` while a device is in `KeptTransfers.method`."""

    def plant(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
        outer, inner = getattr(KeptTransfers, method), getattr(owner, operation)

        def around(self, *arguments):
            with _flag():
                return outer(self, *arguments)

        def fused(self, *arguments, **options):
            if getattr(_inside, "flag", False):
                bomb()
            return inner(self, *arguments, **options)

        patch.setattr(KeptTransfers, method, around)
        patch.setattr(owner, operation, fused)

    return plant


@contextmanager
def _flag() -> Iterator[None]:
    _inside.flag = True
    try:
        yield
    finally:
        _inside.flag = False


def device_lost(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
    """Every operation of one device, from the first one after it has sent what a layer keeps."""
    lost: list[str] = []
    send = KeptTransfers.send

    def sending(self, *arguments):
        send(self, *arguments)
        if not lost:
            lost.append(self._device.name)

    def dying(operation):
        def fused(self, *arguments):
            if self.name in lost:
                if bomb.raised is not None:
                    raise bomb.raised
                bomb()
            return operation(self, *arguments)

        return fused

    patch.setattr(KeptTransfers, "send", sending)
    for name in ("_copy", "_run", "_record"):
        patch.setattr(CpuDevice, name, dying(getattr(CpuDevice, name)))


SITES: dict[str, Site] = {
    "a layer that is recorded": before_layers("recorded"),
    "a part that is recorded": inside_parts("recorded"),
    "a layer that is replayed": before_layers("replayed"),
    "a part that is replayed": inside_parts("replayed"),
    "the backward after a replay": in_backward,
    "packing": within("send", CpuDevice, "_run"),
    "the copy down": within("send", CpuDevice, "_copy"),
    "the event after the copy down": within("send", CpuDevice, "_record"),
    "a buffer of the pool": within("send", HostPool, "take"),
    "the copy up": within("_upload", CpuDevice, "_copy"),
    "the copy up, ahead": within("bring_ahead", CpuDevice, "_copy"),
    "the event after the copy up": within("_upload", CpuDevice, "_record"),
    "giving the buffer back": within("_upload", HostPool, "give"),
    "room on the device": within("prepare", CpuDevice, "_allocate"),
    "the posting": within("send", Board, "post"),
    "the end of a micro-batch": within("end_micro_batch", CpuDevice, "_record"),
    "a device that is lost": device_lost,
}


def changed_before_sending(change: Callable[[list[torch.Tensor]], list[torch.Tensor]], hit: int) -> Site:
    """Records that no longer fit their layer, from the `hit`-th on."""

    def plant(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
        send = KeptTransfers.send

        def sending(self, pass_index, layer, *rest):
            bomb.chances += 1
            if bomb.chances >= hit:
                self._recorded[layer] = change(self._recorded[layer])
            send(self, pass_index, layer, *rest)

        patch.setattr(KeptTransfers, "send", sending)

    return plant


def never_posted(patch: pytest.MonkeyPatch, planted: threading.Event, hit: int) -> None:
    """Drop the `hit`-th hand-over of kept activations."""
    post, seen = Board.post, [0]

    def losing(self, key, value):
        if key.kind is KEPT:
            seen[0] += 1
            if seen[0] == hit:
                planted.set()
                return
        post(self, key, value)

    patch.setattr(Board, "post", losing)
