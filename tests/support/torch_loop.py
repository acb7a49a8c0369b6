"""Engines with an optimizer of PyTorch on the toy model, and the plain loop that they must equal bit for bit."""

import torch

from tests.support.toy import MAX_NORM, PARTITIONS, PlainLoop, toy_store
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.optim import NO_STATE, clip_scale

PARTITION = PARTITIONS["backward coarser"]
MAKERS = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=0.003, momentum=0.5),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.02),
}


class TorchLoop(PlainLoop):
    """The plain loop with an optimizer of PyTorch. `delay` is 1 if gradients are those of the weights before."""

    def __init__(self, model, store, tied, make, max_norm=MAX_NORM, delay=0):
        super().__init__(model, {name: view.clone() for name, view in store.weights().items()}, tied)
        self.optimizer = make(list(self.owned.items()))
        self.max_norm, self.older = max_norm, [self.copies()] * delay

    def copies(self):
        return {name: parameter.detach().clone() for name, parameter in self._name.items()}

    def write(self, values):
        for name, parameter in self._name.items():
            parameter.data.copy_(values[name])

    def gradients(self, micro_batches):
        if not self.older:
            return super().gradients(micro_batches)
        newest = self.copies()
        self.write(self.older.pop(0))
        self.older.append(newest)
        found = super().gradients(micro_batches)
        self.write(newest)
        return found

    def update(self, gradients, lr):
        squares = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
        factor = clip_scale(squares**0.5, self.max_norm)
        for name, parameter in self.owned.items():
            parameter.grad = gradients[name].clone()
            if factor != 1.0:
                parameter.grad *= factor
        self.optimizer.step()
        if self.tied:
            self._name["head.weight"].data.copy_(self._name["embedding.weight"].data)

    def state(self):
        return {f"weights/{name}": parameter.data for name, parameter in self.owned.items()}


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
