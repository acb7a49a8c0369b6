"""The constant buffers of a worker's layers, in memory of its device."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from torchround.engine.device import Device, Stream
from torchround.engine.worker.slots import Packing, fill


class DeviceConstants:
    """The buffers of a worker's own copy of the layers, which move to its device once and stay there.

    Buffers that layers share are one tensor on the device too.
    """

    def __init__(self, device: Device, layers: Sequence[nn.Module]) -> None:
        self._device = device
        self._modules = nn.ModuleList(layers)
        self._on_host = tuple(self._modules.buffers())  # each once
        self._packing = Packing.of(self._on_host)
        self._memory: Tensor | None = None

    def allocate(self) -> None:
        """Allocate their device memory."""
        if self._on_host:
            self._memory = self._device.allocate(self._packing.nbytes)

    def upload(self) -> None:
        """Copy the values to the device, and give the layers the copies. In the thread that drives the device."""
        if self._memory is None:
            return
        views = self._packing.views(self._memory)
        # Before any computation and on its stream, so that no layer has to wait for them.
        self._device.run(Stream.COMPUTE, partial(fill, views, self._on_host), writes=[self._memory])
        self._replace(views)
        self._on_host = ()  # this worker's copy, which nothing needs any more

    def clear(self) -> None:
        """Drop the memory, whatever refers to the layers."""
        self._replace([buffer.new_empty(0) for buffer in self._modules.buffers()])
        self._memory, self._on_host = None, ()

    def _replace(self, new: Sequence[Tensor]) -> None:
        by_id = {id(old): tensor for old, tensor in zip(self._modules.buffers(), new, strict=True)}
        for module in self._modules.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                module._buffers[name] = by_id[id(buffer)]
