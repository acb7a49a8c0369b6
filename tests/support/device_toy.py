"""The toy model on an accelerator: workers that share devices. Importable without an accelerator."""

from collections.abc import Callable

import torch

from tests.support.toy import toy_engine
from torchround.engine.device import AcceleratorDevice, Device


def workers_of(
    kind: str, num_devices: int = 1, make: Callable[[torch.device, int], Device] = AcceleratorDevice
) -> Callable[[Device], Device]:
    """Return the `wrap` of a toy engine whose workers share the first `num_devices` devices of a kind."""

    def worker(virtual: Device) -> Device:
        index = int(virtual.name.partition(":")[2])
        return make(torch.device(kind, index % num_devices), index)

    return worker


def device_engine(kind, model, store, partition, num_workers, num_devices=1, make=AcceleratorDevice, **options):
    """Make a toy engine whose workers share the first `num_devices` devices of a kind."""
    wrap = workers_of(kind, num_devices, make)
    return toy_engine(model, store, partition, num_workers, wrap=wrap, **options)
