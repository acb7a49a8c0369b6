"""Ownership of bundles: each machine holds the state of its own, and all machines together hold what one machine does."""

import pytest
import torch

from tests.support.small_decoders import decoder
from tests.support.toy import assert_same_state, toy_model, toy_store
from torchround.engine.store.bundles import Ownership

BFLOAT16 = torch.bfloat16


def stores(num_machines, model, dtype=torch.float32, **options):
    owners = [Ownership(machine, num_machines) for machine in range(num_machines)]
    return [toy_store(model, dtype, ownership=owner, **options) for owner in owners]


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
