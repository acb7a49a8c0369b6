"""float16 with a dynamic loss scale, bit by bit a plain loop's; planted overflows, resumes, timing."""

import json
import math
import random
import time

import pytest
import torch
from torch import nn

from tests.support.plain_adamw import adamw_update_
from tests.support.rounding import FP16
from tests.support.toy import (
    MAX_NORM,
    OPTIMIZER,
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
from torchround.layer import decayed_names
from torchround.optim import clip_scale, sum_of_squares
from torchround.optim import stability as loss_scale

PARTITION = PARTITIONS["forward coarser"]
LR = 1e-2
STEPS = 14
BATCHES = toy_batches(STEPS, micro_batches=3)


@pytest.fixture(autouse=True)
def scale_moves_within_a_few_steps(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL_STEPS", 3)


class Float16Loop:
    """Mixed-precision training as written by hand: fp16 module, fp32 weights, gradients added in fp32.

    `delay` is 1 where gradients are computed at the weights before the last update.
    """

    def __init__(self, model, weights, delay):
        self.decayed = decayed_names(model)
        self.module = nn.Sequential(*model.layers).to_empty(device="cpu").half()
        names = [
            f"{name}.{path}"
            for name, layer in zip(model.names, self.module, strict=True)
            for path, _ in layer.named_parameters()
        ]
        self.parameters = dict(zip(names, self.module.parameters(), strict=True))
        self.weights = weights
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
        self.delay = delay
        self.halves = [self.rounded()] * 2  # by age: the weights after the last update, and one before
        self.updates = 0
        self.history = []  # (scale, overflowed) by step

    def rounded(self):
        return {name: weight.half() for name, weight in self.weights.items()}

    def scale(self, step):
        scale, good = 2.0**16, 0
        for used, overflowed in self.history[: max(step - 1, 0)]:
            good = 0 if overflowed else good + 1
            if overflowed:
                scale = min(scale, used / 2)
            elif good == 3:
                scale, good = scale * 2, 0
        return scale

    def train(self, batches):
        return [self.step(micro_batches) for micro_batches in batches]

    def step(self, micro_batches):
        for name, half in self.halves[self.delay].items():
            self.parameters[name].data.copy_(half)
        scale = self.scale(len(self.history))
        loss, gradients = self.gradients(micro_batches, scale)
        squares = math.fsum(float(sum_of_squares(gradient.view(-1))) for gradient in gradients.values())
        norm = math.sqrt(squares) / scale
        if math.isfinite(norm):
            self.update(gradients, clip_scale(norm, MAX_NORM) / scale)
        self.history.append((scale, not math.isfinite(norm)))
        self.halves = [self.rounded(), self.halves[0]]
        return loss

    def gradients(self, micro_batches, scale):
        labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        sums = {name: torch.zeros(p.shape) for name, p in self.parameters.items()}
        total = 0.0
        for micro_batch in micro_batches:
            hidden = None
            for layer in self.module:
                hidden = layer(hidden, micro_batch)
            total += hidden.item()
            grads = torch.autograd.grad(hidden, list(self.parameters.values()), torch.full_like(hidden, scale / labels))
            for name, gradient in zip(sums, grads, strict=True):
                sums[name] += gradient.float()
        return total / labels, {name: gradient.half() for name, gradient in sums.items()}

    def update(self, gradients, gradient_scale):
        self.updates += 1
        for name, weight in self.weights.items():
            first, second = self.moments[name]
            adamw_update_(
                *(tensor.view(-1) for tensor in (weight, first, second, gradients[name])),
                torch.empty(weight.numel()),
                lr=LR,
                betas=OPTIMIZER.betas,
                eps=OPTIMIZER.eps,
                weight_decay=OPTIMIZER.weight_decay if name in self.decayed else 0.0,
                bias_correction_step=self.updates,
                gradient_scale=gradient_scale,
            )

    def state(self):
        views = {f"weights/{name}": weight for name, weight in self.weights.items()}
        for name, (first, second) in self.moments.items():
            views[f"exp_avg/{name}"], views[f"exp_avg_sq/{name}"] = first, second
        return views


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


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_float16_training_is_bitwise_a_plain_loop_with_the_same_scales(planted, policy, num_devices):
    store = float16_store(policy)
    loop = Float16Loop(
        toy_model(), {name: view.clone() for name, view in store.weights().items()}, delay=policy.versions - 1
    )
    with toy_engine(toy_model(), store, PARTITION, num_devices) as engine:
        losses, updates = run(engine, BATCHES)
    assert losses == loop.train(BATCHES)
    assert [(update.loss_scale, update.skipped) for update in updates] == loop.history
    assert 2 <= sum(update.skipped for update in updates) <= STEPS - 4
    assert any(later > earlier for (earlier, _), (later, _) in zip(loop.history, loop.history[1:], strict=False))
    views = store.named_views()
    assert_same_state({name: views[name] for name in loop.state()}, loop.state())
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


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize("stop", [1, 2, 5, 8])
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
    for seed in (None, 1, 2):
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
    assert runs[0] == runs[1] == runs[2]


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
