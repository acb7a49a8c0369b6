"""The toy model on an accelerator: workers that share devices. Importable without an accelerator."""

import torch

from tests.support.toy import toy_engine
from torchround.engine.device import AcceleratorDevice


def workers_of(kind, num_devices=1, make=AcceleratorDevice):
    def worker(virtual):
        index = int(virtual.name.partition(":")[2])
        return make(torch.device(kind, index % num_devices), index)

    return worker


def device_engine(kind, model, store, partition, num_workers, num_devices=1, make=AcceleratorDevice, **options):
    wrap = workers_of(kind, num_devices, make)
    return toy_engine(partition, num_workers, model=model, store=store, wrap=wrap, **options)
