"""Engines with an optimizer of PyTorch on the toy model."""

import torch

from tests.support.toy import MAX_NORM, PARTITIONS, toy_store
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.optim import NO_STATE

PARTITION = PARTITIONS["backward coarser"]
MAKERS = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=0.003, momentum=0.5),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.02),
}


def host_engine(
    model, store, optimizer, num_devices=2, observer=None, wrap=lambda device: device, partition=PARTITION, **settings
):
    settings = EngineSettings(**{"max_norm": MAX_NORM, "hang_timeout_s": 60.0, **settings})
    devices = [wrap(CpuDevice(index)) for index in range(num_devices)]
    return Engine(model, store, devices, partition, optimizer=optimizer, settings=settings, observer=observer)


def train(engine, batches, after=lambda: None):
    results = []
    for micro_batches in batches:
        results.append(engine.forward_backward(micro_batches))
        engine.step()
        after()
    engine.drain()
    return [result.loss() for result in results]


def moment_free(model, **options):
    return toy_store(model, optimizer=NO_STATE, **options)
