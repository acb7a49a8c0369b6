"""Faults in updates: in devices while layers are updated, in every step of the optimizer, and at every torch operation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.kept_faults import Bomb, PlantedError, Site
from tests.support.toy import ToyBlock
from torchround.engine import landed_gradients, optimizer_worker
from torchround.engine.bounded_updates import BoundedOptimizerWorker
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.landed_gradients import LandedGradients
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.ordering import Ordering


class FailAtOperation(TorchDispatchMode):
    """Raises in place of the n-th torch operation that is run under it, and counts them all."""

    def __init__(self, fatal: int) -> None:
        super().__init__()
        self.fatal = fatal
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen += 1
        if self.seen == self.fatal:
            raise PlantedError(f"operation {self.fatal}: {func}")
        return func(*args, **(kwargs or {}))


def before(owner: Any, name: str, when: Callable[..., bool] = lambda *_: True) -> Site:
    """Every call of `owner.name` with arguments for which `when` is true."""

    def plant(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
        function = getattr(owner, name)

        def fused(*arguments: Any, **options: Any) -> Any:
            if when(*arguments):
                bomb()
            return function(*arguments, **options)

        patch.setattr(owner, name, fused)

    return plant


def after(owner: Any, name: str) -> Site:
    """The end of every call of `owner.name`."""

    def plant(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
        function = getattr(owner, name)

        def fused(*arguments: Any, **options: Any) -> Any:
            found = function(*arguments, **options)
            bomb()
            return found

        patch.setattr(owner, name, fused)

    return plant


def inside(method: str, owner: type, name: str) -> Site:
    """Every call of `owner.name` while the optimizer is in its `method`."""

    def plant(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
        outer, inner, depth = getattr(BoundedOptimizerWorker, method), getattr(owner, name), [0]

        def around(self: Any, *arguments: Any) -> Any:
            depth[0] += 1
            try:
                return outer(self, *arguments)
            finally:
                depth[0] -= 1

        def fused(*arguments: Any, **options: Any) -> Any:
            if depth[0]:
                bomb()
            return inner(*arguments, **options)

        patch.setattr(BoundedOptimizerWorker, method, around)
        patch.setattr(owner, name, fused)

    return plant


def in_blocks(with_gradients: bool) -> Site:
    return before(ToyBlock, "forward", lambda *_: torch.is_grad_enabled() is with_gradients)


def in_backwards(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
    """The backward of a block."""
    forward = ToyBlock.forward

    def fused(self, hidden, micro_batch):
        output = forward(self, hidden, micro_batch)
        if output.requires_grad:
            output.register_hook(lambda gradient: bomb())
        return output

    patch.setattr(ToyBlock, "forward", fused)


def copies(stream: Stream) -> Site:
    return before(CpuDevice, "_copy", lambda device, of, *_: of is stream)


def twice(site: Site) -> Site:
    """A fault that the second try meets too."""

    def plant(patch: pytest.MonkeyPatch, bomb: Bomb) -> None:
        site(patch, bomb)
        raise_once = bomb.__class__.__call__

        def raise_again(self: Bomb) -> None:
            if self.raised is not None:
                raise self.raised
            raise_once(self)

        patch.setattr(Bomb, "__call__", raise_again)

    return plant


# The words say what is left: a "whole" number of updates, layers that are "mixed" of two versions, or "either".
BOUNDED_SITES: dict[str, tuple[Site, str]] = {
    "a forward": (in_blocks(with_gradients=False), "either"),
    "a recomputation": (in_blocks(with_gradients=True), "either"),
    "a backward": (in_backwards, "either"),
    "weights up": (copies(Stream.WEIGHT_UPLOAD), "either"),
    "gradients down": (copies(Stream.GRADIENT_DOWNLOAD), "either"),
    "activations down": (copies(Stream.ACTIVATION_DOWNLOAD), "either"),
    "activations up": (copies(Stream.ACTIVATION_UPLOAD), "either"),
    "waiting for a gradient": (before(LandedGradients, "wait"), "either"),
    "adding up a gradient": (before(LandedGradients, "add"), "either"),
    "the norm": (before(landed_gradients, "sum_of_squares"), "either"),
    "reading the losses": (before(OptimizerWorker, "_read_losses"), "either"),
    "deciding": (before(BoundedOptimizerWorker, "_decide"), "either"),
    "waiting for readers": (inside("_apply_to", Ordering, "before_device_weight_write"), "whole"),
    "an update": (before(optimizer_worker, "update_"), "whole"),
    "an update after its end": (after(optimizer_worker, "update_"), "whole"),
    "an update, twice": (twice(before(optimizer_worker, "update_")), "mixed"),
    "between an update and its announcement": (before(BoundedOptimizerWorker, "_end_bundle"), "mixed"),
}
# These need layers whose device weights lag.
LAGGING_SITES: dict[str, tuple[Site, str]] = {
    "waiting for the forward's uploads": (inside("_write_lagging", Ordering, "before_device_weight_write"), "either"),
    "after a delayed copy": (inside("_write_lagging", Ordering, "updated"), "mixed"),
    "after all delayed copies": (after(BoundedOptimizerWorker, "_write_lagging"), "mixed"),
}
