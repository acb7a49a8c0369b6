"""Bounded updates equal, bit for bit, a plain loop with the same rule; what they skip, save and report."""

import math
import threading

import pytest
import torch

from tests.support.bounded_loop import BoundedLoop
from tests.support.toy import (
    KEPT,
    PARTITIONS,
    ToyBlock,
    assert_same_state,
    linked,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine.bounded_updates import BoundedOptimizerWorker
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.landed_gradients import LandedGradients
from torchround.engine.store.bundles import ASYNC, BOUNDED, SYNC
from torchround.layer import LayeredModel
from torchround.optim import SpikeBounds
from torchround.pipeline.partition import StageKind

STEPS = 4


def run_both(partition, num_devices, stale_layers, tied=False, dtype=torch.float32, model=None, **settings):
    """Train with the engine and with the plain loop, and compare every loss and every saved tensor."""
    model, batches = model or toy_model(tied), toy_batches(STEPS, micro_batches=3)
    store = toy_store(model, dtype, policy=BOUNDED)
    loop = BoundedLoop(model, {name: view.clone() for name, view in store.weights().items()}, stale_layers, dtype)
    with toy_engine(model, store, partition, num_devices, stale_layers=stale_layers, **settings) as engine:
        losses = train(engine, batches)
    assert losses == loop.train(batches)
    assert_same_state(trained(store), loop.state())
    return losses, store


def trained(store):
    frozen = {p.name for bundle in store.bundles if not bundle.trainable for p in bundle.parameters}
    return {name: view for name, view in store.named_views().items() if name.split("/")[1] not in frozen}


# Every K that a partition allows: the layers before its fused stage.
CASES = [
    (name, stale_layers) for name, partition in PARTITIONS.items() for stale_layers in range(sum(partition.forward) + 1)
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("partition", "stale_layers"), CASES)
def test_bounded_training_is_bitwise_that_of_a_plain_loop(partition, stale_layers, tied):
    num_devices = (1, 2, 3, 8)[stale_layers % 4]
    run_both(PARTITIONS[partition], num_devices, stale_layers, tied, wrap=linked)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_results_depend_on_k_alone(num_devices, tied):
    losses = [
        run_both(PARTITIONS[name], num_devices, 4, tied)[0]
        for name in ("one layer a stage", "forward coarser", "backward coarser")
    ]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] != run_both(PARTITIONS["forward coarser"], 1, 3, tied)[0]


@pytest.mark.parametrize("options", [{"layerwise_recompute": True}, {"times_layers": True}], ids=str)
def test_other_ways_to_recompute_give_the_same_bits(options):
    run_both(PARTITIONS["backward coarser"], 2, 4, **options)
    run_both(PARTITIONS["forward coarser"], 3, 6, tied=True, **options)


@pytest.mark.parametrize("stale_layers", [0, 3, 5])
def test_bf16_has_fp32_state_and_older_device_weights(stale_layers):
    run_both(PARTITIONS["backward coarser"], 3, stale_layers, dtype=torch.bfloat16)
    run_both(PARTITIONS["forward coarser"], 2, stale_layers, tied=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("rounds", [1, 2])
def test_without_stale_layers_bounded_is_sync_with_the_same_clipping(rounds):
    states = []
    for policy in (BOUNDED, SYNC):
        store = toy_store(toy_model(tied=True), policy=policy)
        options = {"clip": "layer", "rounds": rounds}
        with toy_engine(toy_model(tied=True), store, PARTITIONS["forward coarser"], 3, **options) as engine:
            losses = train(engine, toy_batches(STEPS, micro_batches=4))
        states.append((losses, store.named_views()))
    assert states[0][0] == states[1][0]
    assert_same_state(states[0][1], states[1][1])


def test_memory_is_that_of_sync_with_whole_fp32_weights():
    sizes = {}
    for policy in (SYNC, BOUNDED, ASYNC):
        store = toy_store(toy_model(), torch.bfloat16, policy=policy)
        store.set_stale_layers(4 if policy is BOUNDED else 0)
        store.allocate_gradients(1)
        sizes[policy.name] = store.nbytes() / sum(bundle.numel for bundle in store.trained)
    # Two moments, and a gradient and device weights of 2 bytes; async has device weights twice. Weights that lag are no
    # halves of the fp32 weights, so bounded keeps 4 bytes in place of a residual of 2.
    assert sizes == {"sync": 14, "bounded": 16, "async": 16}


def test_drift_is_counted_from_the_uploads():
    found = {}
    for stale_layers in (0, 3):
        store = toy_store(toy_model(), policy=BOUNDED)
        partition = PARTITIONS["forward coarser"]
        with toy_engine(toy_model(), store, partition, 2, stale_layers=stale_layers) as engine:
            results = []
            for batch in toy_batches(3, micro_batches=2):
                results.append(engine.forward_backward(batch))
                engine.step(1e-2)
            found[stale_layers] = [result.weight_drift() for result in results]
            forward = {}
            for report in results[1].reports():
                if report.task.stage.kind is StageKind.FORWARD:
                    forward |= {layer: version for (layer, _), version in report.versions.items()}
            assert forward == {layer: 1 - (layer < stale_layers) for layer in range(6)}
    assert found == {0: [0, 0, 0], 3: [1, 1, 1]}


# What a step leaves out.


def test_a_loss_that_is_not_finite_skips_the_whole_step():
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=3)
    store = toy_store(model, policy=BOUNDED)
    with toy_engine(model, store, PARTITIONS["backward coarser"], 2, stale_layers=3) as engine:
        train(engine, batches[:2])
        weight = store.bundles[-1].device_weights[0]
        kept = weight.clone()
        before = {name: view.clone() for name, view in store.named_views().items()}
        weight.fill_(math.nan)
        result = engine.forward_backward(batches[2])
        engine.step(1e-2)
        engine.drain()
        update = result.update()
        assert update.skipped and update.fault == "the loss is not finite" and update.left_out == ()
        weight.copy_(kept)
    after = store.named_views()
    same = [name for name in before if not name.startswith("master_")]
    assert_same_state({name: after[name] for name in same}, {name: before[name] for name in same})
    # The device weights that lagged are the newest ones now: the next step's forward reads the version of this one.
    assert all(torch.equal(bundle.device_weights[0], bundle.weight) for bundle in store.trained)
    assert (store.step, store.applied_updates) == (3, 2)


def test_a_layer_whose_gradient_is_not_finite_is_left_out_alone(monkeypatch):
    """The engine and the plain loop get the same infinite gradient in block 2 of step 1."""
    model, batches = toy_model(), toy_batches(STEPS, micro_batches=2)
    store = toy_store(model, policy=BOUNDED)
    loop = BoundedLoop(model, {name: view.clone() for name, view in store.weights().items()}, 4)
    landed, steps = LandedGradients.squares, []

    def overflowing(self, bundle):
        steps.append(bundle.index)
        if bundle.layers == (3,) and steps.count(bundle.index) == 2:
            bundle.gradient[0] = math.inf
        return landed(self, bundle)

    monkeypatch.setattr(LandedGradients, "squares", overflowing)
    results = []
    with toy_engine(model, store, PARTITIONS["backward coarser"], 3, stale_layers=4) as engine:
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
        loop.apply(gradients, 1e-2)
    assert [result.loss() for result in results] == losses
    assert_same_state(store.named_views(), loop.state())
    assert [update.skipped for update in updates] == [False] * STEPS
    assert [update.left_out for update in updates] == [(), ("block.2",), (), ()]
    assert updates[1].fault and not math.isfinite(updates[1].grad_norm)


def test_a_spike_of_the_loss_skips_the_whole_step():
    store = toy_store(toy_model(), policy=BOUNDED, spikes=SpikeBounds(10.0, window=10))
    for step in range(10):
        store.spikes.record(0.1 + 0.001 * step, 1.0)
    before = {name: view.clone() for name, view in store.weights().items()}
    with toy_engine(toy_model(), store, PARTITIONS["backward coarser"], 2, stale_layers=2) as engine:
        result = engine.forward_backward(toy_batches(1, micro_batches=2)[0])
        engine.step(1e-2)
        assert result.update().skipped and "the loss" in result.update().fault
        engine.drain()
    assert_same_state(store.weights(), before)


# Stops, faults, and what can be saved.


@pytest.mark.parametrize("stale_layers", [0, 2, 5])
def test_a_checkpoint_taken_between_steps_resumes_bit_for_bit(stale_layers):
    batches = toy_batches(5, micro_batches=2)
    model, whole = toy_model(tied=True), toy_store(toy_model(tied=True), torch.bfloat16, policy=BOUNDED)
    options = {"stale_layers": stale_layers}
    with toy_engine(model, whole, PARTITIONS["backward coarser"], 2, **options) as engine:
        first = train(engine, batches[:2])
        saved = {name: view.clone() for name, view in whole.named_views().items()}
        state = whole.resume_state()
        expected = train(engine, batches[2:])
    lagging = {name for name in saved if name.startswith("master_1_old/")}
    assert bool(lagging) == (stale_layers > 0) and state["stale_layers"] == stale_layers
    resumed = toy_store(toy_model(tied=True), torch.bfloat16, seed=1, policy=BOUNDED)
    views = resumed.loadable_views()
    for name, value in saved.items():
        views[name].copy_(value)
    resumed.resume(2, state["applied_updates"], stale_layers=state["stale_layers"])
    with toy_engine(model, resumed, PARTITIONS["one layer a stage"], 3, **options) as engine:
        assert train(engine, batches[2:]) == expected
    assert_same_state(resumed.named_views(), whole.named_views())
    assert len(first) == 2


def test_another_engine_goes_on_with_the_older_device_weights():
    batches = toy_batches(4, micro_batches=2)
    stores = []
    for cuts in ([4], [2, 4], [1, 2, 3, 4]):
        store, start = toy_store(toy_model(), policy=BOUNDED), 0
        for stop in cuts:
            with toy_engine(toy_model(), store, PARTITIONS["forward coarser"], 2, stale_layers=5) as engine:
                train(engine, batches[start:stop])
            start = stop
        stores.append(store)
    assert_same_state(stores[1].named_views(), stores[0].named_views())
    assert_same_state(stores[2].named_views(), stores[0].named_views())


@pytest.mark.parametrize("stale_layers", [0, 4])
def test_a_save_beside_training_is_the_state_after_its_step(stale_layers):
    batches = toy_batches(5, micro_batches=2)
    options = {"stale_layers": stale_layers}
    expected = toy_store(toy_model(), policy=BOUNDED)
    with toy_engine(toy_model(), expected, PARTITIONS["backward coarser"], 2, **options) as engine:
        train(engine, batches[:3])
    store, saved = toy_store(toy_model(), policy=BOUNDED), {}

    def write(source):
        for name, tensor in source.tensors.items():
            source.reading(tensor)
            saved[name] = tensor.clone()
            source.finished_reading(name)

    with toy_engine(toy_model(), store, PARTITIONS["backward coarser"], 2, **options) as engine:
        for index, batch in enumerate(batches):
            engine.forward_backward(batch)
            engine.step(1e-2)
            if index == 2:
                pending = engine.save(write)
        engine.drain()
        pending.result()
    assert_same_state(saved, expected.named_views())


def test_evaluations_between_steps_change_no_bits():
    batches, held_out = toy_batches(STEPS, micro_batches=2), toy_batches(1, micro_batches=2, seed=5)[0]
    expected = toy_store(toy_model(), policy=BOUNDED)
    with toy_engine(toy_model(), expected, PARTITIONS["backward coarser"], 3, stale_layers=4) as engine:
        train(engine, batches)
    store = toy_store(toy_model(), policy=BOUNDED)
    with toy_engine(toy_model(), store, PARTITIONS["backward coarser"], 3, stale_layers=4) as engine:
        for batch in batches:
            engine.forward_backward(batch)
            engine.step(1e-2)
            engine.evaluate(held_out)
        engine.drain()
    assert_same_state(store.named_views(), expected.named_views())


def test_a_fault_between_the_updates_of_two_layers_leaves_a_store_that_is_refused(monkeypatch):
    """The first backward stage has landed its gradients and is updated when a lower layer fails."""
    store, updated = toy_store(toy_model(), policy=BOUNDED), threading.Event()
    leave = BoundedOptimizerWorker._apply_to

    def noting(worker, bundle, step, lr):
        result = leave(worker, bundle, step, lr)
        if step == 1:
            updated.set()
        return result

    class FailingBlock(ToyBlock):
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

    monkeypatch.setattr(BoundedOptimizerWorker, "_apply_to", noting)
    model = toy_model()
    model = LayeredModel(model.names, (model.layers[0], FailingBlock(), *model.layers[2:]))
    with pytest.raises(PipelineError, match="planted.*mixes two weight versions") as raised:
        train(
            toy_engine(model, store, PARTITIONS["one layer a stage"], 2, stale_layers=2),
            toy_batches(3, micro_batches=2),
        )
    assert not raised.value.store_is_consistent and not store.is_consistent
    with pytest.raises(EngineUsageError, match="mixes two weight versions"):
        toy_engine(toy_model(), store, PARTITIONS["one stage"], 1)


def test_an_exception_of_the_caller_leaves_whole_steps():
    batches = toy_batches(3, micro_batches=2)
    expected, store = (toy_store(toy_model(), policy=BOUNDED) for _ in range(2))
    options = {"stale_layers": 4}
    with toy_engine(toy_model(), expected, PARTITIONS["one layer a stage"], 3, **options) as engine:
        train(engine, batches[:2])
    with (
        pytest.raises(ValueError, match="of the caller"),
        toy_engine(toy_model(), store, PARTITIONS["one layer a stage"], 3, **options) as engine,
    ):
        for batch in batches[:2]:
            engine.forward_backward(batch)
            engine.step(1e-2)
        raise ValueError("of the caller")
    assert_same_state(store.named_views(), expected.named_views())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stale_layers": 6}, "stale_layers is 6; legal under bounded: 0 to 5"),
        ({"stale_layers": 1, "rounds": 2}, "needs 1 round, got 2"),
        ({"clip": "global"}, "global norm"),
        ({"stale_layers": 2, "kept": KEPT["all"]}, r"layers \[1\] keep activations"),
    ],
    ids=["layers", "rounds", "clip", "kept"],
)
def test_settings_that_do_not_fit_are_refused(options, message):
    store = toy_store(toy_model(), policy=BOUNDED)
    with pytest.raises(EngineUsageError, match=message):
        toy_engine(toy_model(), store, PARTITIONS["backward coarser"], 1, **options)


def test_float16_and_other_policies_are_refused():
    with pytest.raises(EngineUsageError, match="bfloat16 or float32"):
        toy_engine(toy_model(), toy_store(toy_model(), torch.float16, policy=BOUNDED), PARTITIONS["one stage"], 1)
    with pytest.raises(EngineUsageError, match="legal under sync: 0 to 0"):
        toy_engine(toy_model(), toy_store(toy_model()), PARTITIONS["backward coarser"], 1, stale_layers=1)


def test_layers_behind_the_stale_ones_may_keep_activations():
    kept = tuple(() if layer < 2 else names for layer, names in enumerate(KEPT["all"]))
    run_both(PARTITIONS["forward coarser"], 2, 2, kept=kept)
    run_both(PARTITIONS["backward coarser"], 3, 2, tied=True, kept=kept, layerwise_recompute=True)
