"""What bounded updates skip, save and report. That they train as the reference loop does is in `test_rows.py`."""

import math
import threading

import pytest
import torch

from tests.support import toy
from tests.support.faults import WRITTEN, kind_of, this_thread
from tests.support.reference import Reference
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.board import Observer
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.layer import LayeredModel
from torchround.optim import SpikeBounds
from torchround.planning.update_modes import BOUNDED, SYNC

STEPS = 4


def test_a_loss_that_is_not_finite_skips_the_whole_step():
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=3)
    with toy_engine(PARTITIONS["backward coarser"], 2, model=model, mode=BOUNDED, stale_layers=3) as engine:
        train(engine, batches[:2])
        weight = engine.store.bundles[-1].device_weights[0]
        kept = weight.clone()
        before = {name: view.clone() for name, view in engine.store.named_views().items()}
        weight.fill_(math.nan)
        result = engine.forward_backward(batches[2])
        engine.step(1e-2)
        engine.drain()
        update = result.update()
        assert update.skipped and update.fault == "the loss is not finite" and update.left_out == ()
        weight.copy_(kept)
    after = engine.store.named_views()
    same = [name for name in before if not name.startswith("master_")]
    assert_same_state({name: after[name] for name in same}, {name: before[name] for name in same})
    # The device weights that lagged are the newest ones now: the next step's forward reads the version of this one.
    assert all(torch.equal(bundle.device_weights[0], bundle.weight) for bundle in engine.store.trained)
    assert (engine.store.step, engine.store.applied_updates) == (3, 2)


def test_a_layer_whose_gradient_is_not_finite_is_left_out_alone():
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=2)
    store = toy_store(model, mode=BOUNDED)
    loop = Reference.of(model, store, stale=4)
    [bundle] = [bundle for bundle in store.bundles if bundle.layers == (3,)]

    class Overflowing(Observer):
        norms = 0

        def touched(self, reads, writes):
            if not writes and any(tensor is bundle.gradient for tensor in reads):
                self.norms += 1
                if self.norms == 2:
                    bundle.gradient[0] = math.inf

    results = []
    with toy_engine(PARTITIONS["backward coarser"], 3, store=store, observer=Overflowing(), stale_layers=4) as engine:
        for batch in batches:
            results.append(engine.forward_backward(batch))
            engine.step(1e-2)
        engine.drain()
        updates = [result.update() for result in results]
    losses = []
    for step, batch in enumerate(batches):
        loss, gradients = loop.gradients(batch)
        if step == 1:
            next(gradients[name] for name in gradients if name.startswith("block.2."))[...] = math.inf
        losses.append(loss)
        loop.update(gradients, 1e-2)
    assert [result.loss() for result in results] == losses
    assert_same_state(store.named_views(), loop.state())
    assert [update.skipped for update in updates] == [False] * STEPS
    assert [update.left_out for update in updates] == [(), ("block.2",), (), ()]
    assert updates[1].fault and not math.isfinite(updates[1].grad_norm)


def test_a_spike_of_the_loss_skips_the_whole_step():
    store = toy_store(toy_model(), mode=BOUNDED)
    store.spikes = SpikeBounds(10.0, window=10)
    for step in range(10):
        store.spikes.record(0.1 + 0.001 * step, 1.0)
    before = {name: view.clone() for name, view in store.weights().items()}
    with toy_engine(PARTITIONS["backward coarser"], 2, store=store, stale_layers=2) as engine:
        result = engine.forward_backward(toy_batches(1, micro_batches=2)[0])
        engine.step(1e-2)
        assert result.update().skipped and "the loss" in result.update().fault
        engine.drain()
    assert_same_state(store.weights(), before)


def test_a_fault_between_the_updates_of_two_layers_leaves_a_store_that_is_refused():
    """The first backward stage has landed its gradients and is updated when a lower layer fails."""
    store, updated = toy_store(toy_model(), mode=BOUNDED), threading.Event()

    class Noting(Observer):
        def posted(self, token):
            if kind_of(token) == WRITTEN and token.task.step == 1 and this_thread() == "torchround optimizer":
                updated.set()

    class FailingBlock(toy.ToyBlock):
        def forward(self, hidden, micro_batch):
            result = super().forward(hidden, micro_batch)
            if result.requires_grad:
                result.register_hook(fail)
            return result

    calls = []

    def fail(gradient):
        calls.append(gradient)
        if len(calls) == 4:  # two micro-batches a step: the last one of step 1
            assert updated.wait(60)
            raise RuntimeError("planted")

    model = toy_model()
    model = LayeredModel(model.names, (model.layers[0], FailingBlock(), *model.layers[2:]))
    with pytest.raises(PipelineError, match="planted.*mixes two weight versions") as raised:
        train(
            toy_engine(PARTITIONS["one layer a stage"], 2, observer=Noting(), model=model, store=store, stale_layers=2),
            toy_batches(3, micro_batches=2),
        )
    assert not raised.value.store_is_consistent and not store.is_consistent
    with pytest.raises(EngineUsageError, match="mixes two weight versions"):
        toy_engine(PARTITIONS["one stage"], 1, store=store)


@pytest.mark.parametrize(("mode", "stale_layers", "legal"), [(BOUNDED, 6, "0 to 5"), (SYNC, 1, "0 to 0")])
def test_more_stale_layers_than_come_before_the_fused_stage_are_refused(mode, stale_layers, legal):
    with pytest.raises(EngineUsageError, match=f"stale_layers.*{legal}"):
        toy_engine(PARTITIONS["backward coarser"], 1, mode=mode, stale_layers=stale_layers)
