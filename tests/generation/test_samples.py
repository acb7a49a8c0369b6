"""Text in the middle of training: the same for every cut of the model, and no change of what follows."""

import pytest
import torch

from tests.support.toy_texts import prompts
from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.store.bundles import ASYNC_PREDICT
from torchround.engine.store.host_store import HostStore
from torchround.generation import samples
from torchround.layer import MicroBatch
from torchround.models import FAMILIES
from torchround.pipeline.partition import Partition

UNCUT = Partition((), 6, ()), 1
TEXTS = [[token % 90 for token in text] for text in prompts(5)]


def batches(step):
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 90, (4, 17), generator=draws)
    positions = torch.arange(16).expand(2, 16).contiguous()
    return [
        MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous(), positions, torch.zeros_like(positions))
        for part in tokens.split(2)
    ]


def run(partition, num_devices, with_samples):
    llama3 = FAMILIES["llama3"]
    model = llama3.build(llama3.config_from_flavor("debug", num_layers=4, vocab_size=90))
    store = HostStore(model, torch.float32, policy=ASYNC_PREDICT)
    store.initialize(model, seed=3)
    devices = [CpuDevice(index) for index in range(num_devices)]
    texts, losses = [], []
    with Engine(model, store, devices, partition, optimizer=AdamWTable()) as engine:
        for step in range(3):
            result = engine.forward_backward(batches(step))
            engine.step(lr=3e-2)
            if with_samples:
                texts += samples(engine, TEXTS, max_tokens=5)
            losses.append(result.loss())
    return texts, losses


@pytest.fixture(scope="module")
def uncut():
    return run(*UNCUT, with_samples=True)


def test_samples_do_not_depend_on_the_partition_or_the_devices(uncut):
    assert run(Partition((1,) * 5, 1, (1,) * 5), 4, with_samples=True) == uncut
    assert uncut[0][:5] != uncut[0][5:10], "the weights of each step are read"


def test_samples_change_no_later_step(uncut):
    assert run(*UNCUT, with_samples=False)[1] == uncut[1]
