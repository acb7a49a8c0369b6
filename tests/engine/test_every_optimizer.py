"""Every optimizer and state format: the bits of a plain loop, on any number of devices, in each mode that it may train in."""

from functools import partial

import pytest
import torch

from tests.support.optimizers import OPTIMIZERS, POLICIES
from tests.support.small_decoders import small_decoder
from tests.support.stateful_loop import StatefulLoop
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.store.bundles import ASYNC, BOUNDED, SYNC
from torchround.layer import with_dropout_seeds
from torchround.optim import make_optimizer
from torchround.pipeline.partition import Partition

LR = 1e-2
BATCHES = toy_batches(4, micro_batches=4)
SEEDED = [with_dropout_seeds(batch, seed=7, step=step) for step, batch in enumerate(BATCHES[:3])]
# Four layers: one stage, and a stage for each layer and pass.
CUTS = [(1, Partition((), 4, ())), (2, Partition((1, 1, 1), 1, (1, 1, 1))), (3, Partition((2,), 2, (2,)))]
CUTS.append((8, Partition((1, 1), 2, (1, 1))))
tied_model = partial(toy_model, True)
DECODERS = {
    "experts, tied": partial(small_decoder, "qwen3", "debug_moe", tied_embeddings=True),
    "adapters with dropout": partial(small_decoder, "llama3", "debug", ("q_proj", "down_proj")),
    "adapters on experts": partial(small_decoder, "qwen3", "debug_moe", ("o_proj", "up_proj")),
}
PLAIN = [(name, policy) for name in OPTIMIZERS for policy in POLICIES[name] if policy is not BOUNDED]


def label(value):
    return value.name + "-predict" * value.predicts if hasattr(value, "predicts") else None


def trained(
    name,
    policy,
    num_devices,
    partition=PARTITIONS["backward coarser"],
    build=toy_model,
    batches=BATCHES,
    dtype=torch.bfloat16,
    **settings,
):
    """Return the losses of a run and the store that it leaves."""
    model = build()
    store = toy_store(model, dtype, policy=policy, optimizer=make_optimizer(OPTIMIZERS[name]))
    options = {"optimizer": OPTIMIZERS[name], **settings}
    with toy_engine(model, store, partition, num_devices, **options) as engine:
        return train(engine, batches, LR), store


def looped(name, policy, build=toy_model, tied=False, batches=BATCHES, dtype=torch.bfloat16, rounds=1):
    """Return the losses and the state of the plain loop. `tied` says whether the model is."""
    model = build()
    weights = {key: view.float().clone() for key, view in toy_store(model, dtype).weights().items()}
    loop = StatefulLoop(model, weights, tied, OPTIMIZERS[name], dtype, rounds, policy.predicts)
    losses = loop.train(batches, LR) if policy is SYNC else loop.train_late(batches, LR)
    return losses, loop.state()


def assert_equal_to_the_loop(store, state):
    views = store.named_views()
    newest = {key: view for key, view in views.items() if not key.startswith("master_")}
    assert_same_state(newest, state)


@pytest.mark.parametrize(("name", "policy"), PLAIN, ids=label)
def test_any_number_of_devices_gives_the_bits_of_a_plain_loop(name, policy):
    losses, state = looped(name, policy)
    for num_devices, partition in ((1, "one stage"), (2, "one layer a stage"), (3, "forward coarser")):
        found, store = trained(name, policy, num_devices, PARTITIONS[partition])
        assert found == losses
        assert_equal_to_the_loop(store, state)
    found, store = trained(name, policy, 8)
    assert found == losses
    assert_equal_to_the_loop(store, state)


@pytest.mark.parametrize(("name", "policy"), PLAIN, ids=label)
@pytest.mark.parametrize("rounds", [1, 2])
def test_tied_weights_and_rounds_add_up_as_in_a_plain_loop(name, policy, rounds):
    losses, state = looped(name, policy, tied_model, tied=True, rounds=rounds)
    found, store = trained(name, policy, 2, build=tied_model, rounds=rounds)
    assert found == losses
    assert_equal_to_the_loop(store, state)


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=label)
@pytest.mark.parametrize("name", ["adamw compact", "muon", "muon compact"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_experts_and_adapters_give_the_bits_of_a_plain_loop_on_any_number_of_devices(decoder, name, policy):
    """In two rounds. An expert is a matrix of its own, an adapter two; frozen weights have no state and stay."""
    case = {"build": DECODERS[decoder], "batches": SEEDED, "rounds": 2}
    losses, state = looped(name, policy, tied="tied" in decoder, **case)
    stacks = [key for key, view in state.items() if key.startswith("momentum_buffer/") and view.ndim == 3]
    assert bool(stacks) == (name != "adamw compact" and "experts" in decoder)
    frozen = {key: view.clone() for key, view in toy_store(case["build"](), torch.bfloat16).named_views().items()}
    for num_devices, partition in CUTS:
        found, store = trained(name, policy, num_devices, partition, **case)
        assert found == losses
        kept = {key: frozen[key] for key in store.named_views() if key.startswith("weights/") and key not in state}
        assert bool(kept) == ("adapters" in decoder)
        assert_equal_to_the_loop(store, state | kept)


def test_the_dropout_of_adapters_is_a_part_of_the_loop():
    losses = [looped("muon", SYNC, DECODERS["adapters with dropout"], batches=b)[0] for b in (SEEDED, BATCHES[:3])]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_weights_are_not_split_and_keep_any_state(name):
    losses, state = looped(name, ASYNC, dtype=torch.float32)
    found, store = trained(name, ASYNC, 3, dtype=torch.float32)
    assert found == losses
    assert_equal_to_the_loop(store, state)
    assert not any(key.startswith("residual/") for key in state)


@pytest.mark.parametrize("stale_layers", [0, 3])
@pytest.mark.parametrize("name", [name for name, policies in POLICIES.items() if BOUNDED in policies])
def test_bounded_updates_do_not_depend_on_devices_and_cuts(name, stale_layers):
    runs = [
        trained(name, BOUNDED, num_devices, PARTITIONS[partition], stale_layers=stale_layers)
        for num_devices, partition in ((1, "one layer a stage"), (3, "forward coarser"), (8, "backward coarser"))
    ]
    for losses, store in runs[1:]:
        assert losses == runs[0][0]
        assert_same_state(store.named_views(), runs[0][1].named_views())
