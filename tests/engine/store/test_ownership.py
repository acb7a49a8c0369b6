"""Ownership of bundles: each machine holds the state of its own, and all machines together hold what one machine does."""

import pytest
import torch

from tests.support.small_decoders import decoder
from tests.support.toy import assert_same_state, toy_model, toy_store
from torchround.engine.store.bundles import ASYNC_PREDICT, SYNC
from torchround.engine.store.ownership import Ownership
from torchround.engine.store.prediction import Prediction

BFLOAT16 = torch.bfloat16


def stores(num_machines, model, dtype=torch.float32, **options):
    return [
        toy_store(model, dtype, ownership=Ownership(machine, num_machines), **options)
        for machine in range(num_machines)
    ]


def adapted_model():
    """Return a model with a frozen base and adapters, so that a layer's bundles may have unlike owners."""
    return decoder("llama3", "debug", ("q_proj", "v_proj"), vocab_size=64, num_layers=3)


def partly_frozen_model():
    """Return a model whose blocks draw a trained weight before a frozen one."""
    model = toy_model()
    for block in model.layers[1:-1]:
        block.down.requires_grad_(False)
    return model


def joined(views):
    """Return what several machines hold together; no two may hold the same thing."""
    together = {name: view for machine in views for name, view in machine.items()}
    assert len(together) == sum(map(len, views))
    return together


@pytest.mark.parametrize(("num_machines", "tied"), [(1, False), (2, True), (3, False), (9, True)])
def test_every_machine_finds_the_same_owners_and_each_bundle_has_one(num_machines, tied):
    each = stores(num_machines, toy_model(tied))
    owners = [[bundle.owner for bundle in store.bundles] for store in each]
    assert owners == [owners[0]] * num_machines
    for machine, store in enumerate(each):
        assert [bundle.is_owned for bundle in store.bundles] == [owner == machine for owner in owners[0]]
        assert store.owned == [bundle for bundle in store.trained if bundle.owner == machine]
    assert set(owners[0]) == set(range(min(num_machines, len(owners[0]))))


@pytest.mark.parametrize(
    ("num_machines", "build"),
    [(2, adapted_model), (2, partly_frozen_model), (3, lambda: toy_model(tied=True)), (3, adapted_model)],
)
def test_initial_weights_of_all_machines_are_those_of_one(build, num_machines):
    """A layer whose bundles have unlike owners draws the same numbers on each of them."""
    [alone] = stores(1, build(), BFLOAT16)
    each = stores(num_machines, build(), BFLOAT16)
    assert_same_state(joined([store.named_views() for store in each]), alone.named_views())
    frozen = {p.name for bundle in alone.bundles if not bundle.trainable for p in bundle.parameters}
    for store in each:
        names = {parameter.name for bundle in store.owned for parameter in bundle.parameters}
        assert_same_state(store.weights(), {n: v for n, v in alone.weights().items() if n in frozen | names})
        assert store.loadable_views().keys() == store.named_views().keys() | {f"weights/{n}" for n in frozen}


def test_layers_of_other_machines_are_not_even_drawn():
    model, drawn = toy_model(), []
    for name, layer in zip(model.names, model.layers, strict=True):
        fill = layer.init_weights
        layer.init_weights = lambda generator, name=name, fill=fill: (drawn.append(name), fill(generator))
    for machine in range(3):
        store = toy_store(model, ownership=Ownership(machine, 3))
        own = {name for bundle in store.owned for name in (model.names[layer] for layer in bundle.layers)}
        assert set(drawn) == own
        drawn.clear()


@pytest.mark.parametrize("policy", [SYNC, ASYNC_PREDICT], ids=["sync", "predict"])
def test_a_resume_gives_each_machine_the_device_weights_of_its_own(policy):
    each = [*stores(2, toy_model(), BFLOAT16, policy=policy), *stores(1, toy_model(), BFLOAT16, policy=policy)]
    generator = torch.Generator().manual_seed(5)
    values = {name: torch.rand(view.shape, generator=generator) for name, view in each[2].named_views().items()}
    prediction = Prediction(1e-2, {"betas": (0.9, 0.95), "eps": 1e-8}).state()
    for store in each:
        for bundle in store.bundles:
            for device_weights in bundle.device_weights:
                device_weights.fill_(-1.0)
        for name, view in store.loadable_views().items():
            view.copy_(values[name])
        store.resume(5, applied_updates=5, prediction=prediction)
    for ours, theirs in (
        (ours, theirs) for store in each[:2] for ours, theirs in zip(store.bundles, each[2].bundles, strict=True)
    ):
        for age in range(policy.versions):
            assert torch.equal(ours.version(5 - age), theirs.version(5 - age)) == ours.is_owned
    # Old device weights of other machines are left alone until their owners send them.
    assert all((b.version(5) == -1).all() for store in each[:2] for b in store.bundles if b.is_remote)


def test_true_weights_are_written_by_their_owners_alone():
    shared = []
    for store in stores(2, toy_model(), BFLOAT16, policy=ASYNC_PREDICT):
        store.resume(1, applied_updates=1, prediction=Prediction(1e-2, {"betas": (0.9, 0.95), "eps": 1e-8}).state())
        for bundle in store.owned:
            for segment in bundle.segments:
                segment.parts["exp_avg"].fill_(1.0)
        store.resume(1, applied_updates=1, prediction=Prediction(1e-2, {"betas": (0.9, 0.95), "eps": 1e-8}).state())
        for bundle in store.bundles:
            if bundle.is_remote:
                bundle.version(1).fill_(7.0)
        predicted = [bundle.version(1).clone() for bundle in store.bundles]
        with store.true_device_weights(share=lambda: shared.append(True)):
            for bundle in store.owned:
                assert torch.equal(bundle.version(1), bundle.weight.bfloat16())
            assert len(shared) == 1
        assert len(shared) == 2
        shared.clear()
        for bundle, before in zip(store.bundles, predicted, strict=True):
            assert torch.equal(bundle.version(1), before)
            assert bundle.is_remote or not torch.equal(before, bundle.weight.bfloat16())
