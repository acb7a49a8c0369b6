"""float16 with a dynamic loss scale, bit by bit a plain loop's, with planted overflows and a resume."""

import json
from itertools import pairwise

import pytest
import torch

from tests.support import toy
from tests.support.reference import Reference
from tests.support.toy import assert_same_state, planted_model, toy_batches, toy_engine, toy_model, toy_store
from torchround.engine.store.bundles import ASYNC, SYNC
from torchround.optim import stability as loss_scale

PARTITION = toy.PARTITIONS["forward coarser"]
LR = 1e-2
STEPS = 14
BATCHES = toy_batches(STEPS, micro_batches=3)


@pytest.fixture(autouse=True)
def scale_moves_within_a_few_steps(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL_STEPS", 3)


class Overflow(torch.autograd.Function):
    """The identity, whose gradient is multiplied by `factor`."""

    @staticmethod
    def forward(ctx, hidden, factor):
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def doubled(hidden, micro_batch):
    """Double the gradients of micro-batches whose first token is even: too much for 2^15 and above."""
    return Overflow.apply(hidden, 2.0 if int(micro_batch.tokens[0, 0]) % 2 == 0 else 1.0)


def run(engine, batches):
    """Losses and updates of the steps."""
    results = []
    for micro_batches in batches:
        results.append(engine.forward_backward(micro_batches))
        engine.step(LR)
    engine.drain()
    return [result.loss() for result in results], [result.update() for result in results]


def float16_store(policy=SYNC):
    return toy_store(toy_model(), torch.float16, policy=policy)


@pytest.mark.parametrize(("policy", "num_devices", "stop"), [(SYNC, 1, 8), (ASYNC, 3, 5)], ids=["sync", "async"])
def test_training_that_is_resumed_is_bitwise_a_plain_loop_with_the_same_scales(policy, num_devices, stop):
    model, store = planted_model(doubled), float16_store(policy)
    loop = Reference.of(model, store, growth=3)
    with toy_engine(model, store, PARTITION, num_devices) as engine:
        losses, updates = run(engine, BATCHES[:stop])
    resumed = toy_store(toy_model(), torch.float16, seed=1, policy=policy)
    for name, view in resumed.named_views().items():
        view.copy_(store.named_views()[name])
    resumed.resume(store.step, store.applied_updates, json.loads(json.dumps(store.loss_scale_state())))
    with toy_engine(model, resumed, PARTITION, 2) as engine:
        later_losses, later = run(engine, BATCHES[stop:])
    assert losses + later_losses == loop.train(BATCHES)
    found = [(update.loss_scale, update.skipped) for update in updates + later]
    assert found == list(zip(loop.scales, loop.skipped, strict=True))
    assert 2 <= sum(loop.skipped) <= STEPS - 4
    assert any(later > earlier for earlier, later in pairwise(loop.scales))
    assert_same_state(resumed.named_views(), loop.state())
    assert resumed.applied_updates == loop.updates
