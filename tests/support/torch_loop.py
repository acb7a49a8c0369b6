"""Engines with an optimizer of PyTorch on the toy model."""

import torch

from tests.support import toy
from tests.support.toy import PARTITIONS, toy_engine, toy_store
from torchround.optim import NO_STATE

MAKERS = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=0.003, momentum=0.5),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.02),
}


def host_engine(model, store, optimizer, num_devices=2, partition=PARTITIONS["backward coarser"], **options):
    return toy_engine(partition, num_devices, model=model, store=store, optimizer=optimizer, **options)


def train(engine, batches, after=lambda: None):
    return toy.train(engine, batches, None, after)


def moment_free(model, **options):
    return toy_store(model, optimizer=NO_STATE, **options)
