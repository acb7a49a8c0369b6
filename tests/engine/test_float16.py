"""float16 with a dynamic loss scale, bit by bit a plain loop's; planted overflows, resumes, timing."""

import json
import random
import time
from itertools import pairwise

import pytest
import torch

from tests.support.reference import Reference
from tests.support.rounding import FP16
from tests.support.toy import (
    PARTITIONS,
    ToyBlock,
    ToyHead,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
)
from torchround.engine.store.bundles import ASYNC, SYNC
from torchround.optim import stability as loss_scale

PARTITION = PARTITIONS["forward coarser"]
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


@pytest.fixture
def planted(monkeypatch):
    """Every block doubles the gradients of micro-batches whose first token is even: too much for 2^15 and above."""
    forward = ToyBlock.forward

    def planting(self, hidden, micro_batch):
        factor = 2.0 if int(micro_batch.tokens[0, 0]) % 2 == 0 else 1.0
        return forward(self, Overflow.apply(hidden, factor), micro_batch)

    monkeypatch.setattr(ToyBlock, "forward", planting)


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


@pytest.mark.parametrize(("policy", "num_devices"), [(SYNC, 1), (ASYNC, 3)], ids=["sync", "async"])
def test_float16_training_is_bitwise_a_plain_loop_with_the_same_scales(planted, policy, num_devices):
    store = float16_store(policy)
    loop = Reference.of(toy_model(), store, growth=3)
    with toy_engine(toy_model(), store, PARTITION, num_devices) as engine:
        losses, updates = run(engine, BATCHES)
    assert losses == loop.train(BATCHES)
    assert [(update.loss_scale, update.skipped) for update in updates] == list(
        zip(loop.scales, loop.skipped, strict=True)
    )
    assert 2 <= sum(loop.skipped) <= STEPS - 4
    assert any(later > earlier for earlier, later in pairwise(loop.scales))
    assert_same_state(store.named_views(), loop.state())
    assert store.applied_updates == loop.updates


def test_the_reported_norm_is_that_of_the_unscaled_gradient():
    norms = {}
    for dtype in (torch.float32, torch.float16):
        store = toy_store(toy_model(), dtype)
        with toy_engine(toy_model(), store, PARTITION, 2) as engine:
            norms[dtype] = run(engine, BATCHES[:1])[1][0].grad_norm
    assert norms[torch.float16] == pytest.approx(
        norms[torch.float32], rel=10 * FP16
    )  # ten roundings to float16 from the weights to a gradient


@pytest.mark.parametrize(("policy", "stop"), [(SYNC, 1), (ASYNC, 2), (ASYNC, 5), (SYNC, 8)])
def test_a_resumed_run_is_bitwise_one_that_never_stopped(planted, policy, stop):
    whole = float16_store(policy)
    with toy_engine(toy_model(), whole, PARTITION, 2) as engine:
        _, expected = run(engine, BATCHES)
    stopped = float16_store(policy)
    with toy_engine(toy_model(), stopped, PARTITION, 2) as engine:
        run(engine, BATCHES[:stop])
    saved = {name: view.clone() for name, view in stopped.named_views().items()}
    position = (stopped.step, stopped.applied_updates, json.loads(json.dumps(stopped.loss_scale_state())))
    resumed = toy_store(toy_model(), torch.float16, seed=1, policy=policy)
    for name, view in resumed.named_views().items():
        view.copy_(saved[name])
    resumed.resume(*position)
    with toy_engine(toy_model(), resumed, PARTITION, 3) as engine:
        _, updates = run(engine, BATCHES[stop:])
    scales = [(update.loss_scale, update.skipped) for update in updates]
    assert scales == [(update.loss_scale, update.skipped) for update in expected[stop:]]
    assert_same_state(resumed.named_views(), whole.named_views())


def test_scales_do_not_depend_on_timing_or_on_evaluations_between(planted, monkeypatch):
    runs, forward = [], ToyBlock.forward
    for seed in (None, 1):
        delays = random.Random(seed)

        def slow(self, hidden, micro_batch, seed=seed, delays=delays):
            if seed is not None:
                time.sleep(delays.random() * 2e-3)
            return forward(self, hidden, micro_batch)

        monkeypatch.setattr(ToyBlock, "forward", slow)
        store = float16_store()
        results = []
        with toy_engine(toy_model(), store, PARTITION, 3) as engine:
            for index, micro_batches in enumerate(BATCHES):
                if seed is not None and index % 3 == seed:
                    engine.evaluate(BATCHES[0])
                results.append(engine.forward_backward(micro_batches))
                engine.step(LR)
            updates = [result.update() for result in results]
        runs.append([(update.loss_scale, update.skipped) for update in updates])
    assert runs[0] == runs[1]


def test_only_a_last_layer_that_is_differentiated_learns_the_factor_of_its_loss(monkeypatch):
    seen = []
    for kind in (ToyBlock, ToyHead):
        forward = kind.forward

        def noting(self, hidden, micro_batch, forward=forward):
            seen.append((type(self), torch.is_grad_enabled(), micro_batch.loss_factor))
            return forward(self, hidden, micro_batch)

        monkeypatch.setattr(kind, "forward", noting)
    store = float16_store()
    with toy_engine(toy_model(), store, PARTITION, 2) as engine:
        engine.evaluate(BATCHES[0]).loss()
        _, [update] = run(engine, BATCHES[:1])
    labels = sum(micro_batch.num_labels() for micro_batch in BATCHES[0])
    heads = {(enabled, factor) for kind, enabled, factor in seen if kind is ToyHead}
    assert heads == {(False, None), (True, update.loss_scale / labels)}


def test_a_validation_loss_is_not_scaled():
    store = float16_store()
    with toy_engine(toy_model(), store, PARTITION, 2) as engine:
        evaluated = engine.evaluate(BATCHES[0]).loss()
        assert evaluated == engine.forward_backward(BATCHES[0]).loss()
        engine.step(LR)


def test_other_formats_are_not_scaled():
    for dtype in (torch.float32, torch.bfloat16):
        store = toy_store(toy_model(), dtype)
        with toy_engine(toy_model(), store, PARTITION, 2) as engine:
            assert [update.loss_scale for update in run(engine, BATCHES[:3])[1]] == [1.0] * 3
        assert store.loss_scale_state() == {}
