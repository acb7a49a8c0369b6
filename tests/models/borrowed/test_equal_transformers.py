"""Families of `transformers` in layer form against the models themselves: toy sizes, random weights, fp32.

Packed batches everywhere: the reference runs each document alone.
"""

import copy
from types import SimpleNamespace

import pytest
import torch

from tests.support.rounding import assert_close_in_sums
from tests.support.toy import assert_same_state
from tests.support.toy_decoders import VOCAB
from tests.support.transformers_loop import (
    document_logits,
    engine_of,
    loss_sum,
    make_pair,
    packed_steps,
    reference_training,
    store_of,
    train,
)
from torchround.pipeline.partition import Partition

FAMILIES_SHOWN = (
    *("qwen2", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "glm4", "smollm3"),
    *("qwen3_next", "qwen3_5_text"),
)
# Six layers: embedding, four blocks, head.
PARTITIONS = {1: Partition((), 6, ()), 2: Partition((1, 2), 3, (2, 1)), 3: Partition((2, 1, 1), 2, (1, 1, 2))}


@pytest.fixture(scope="module", params=FAMILIES_SHOWN)
def pair(request, tools):
    return make_pair(tools, request.param)


def test_logits_and_loss_of_packed_documents_equal_those_of_each_document_alone(pair, tools):
    batch = tools.micro_batch([[13, 1, 10], [24]], VOCAB)
    with torch.no_grad():
        # The same sums in other orders, through four blocks: some hundred terms each on the path of a logit.
        assert_close_in_sums(tools.all_logits(pair.ours, batch), document_logits(pair.theirs, batch), 1000)
        loss = loss_sum(pair.theirs, batch)
        torch.testing.assert_close(tools.loss_sum(pair.ours, batch), loss, rtol=1e-5, atol=0)


def test_ten_adamw_steps_equal_those_of_transformers(pair, tools):
    steps = packed_steps(tools, 10, sequences=1)
    store = store_of(model := pair.build(), tools.stored_parameters(pair.ours))
    with engine_of(model, store, PARTITIONS[2], num_devices=2) as engine:
        losses = train(engine, steps)
    theirs = copy.deepcopy(pair.theirs)
    assert losses == pytest.approx(reference_training(theirs, steps), rel=1e-5)
    released = tools.released_tensors(theirs)
    # An update changes a weight by at most lr / eps = 1 per unit of gradient. Gradients are clipped to a norm of 1, and
    # their elements agree to 1e-5 (sums of some hundred terms, 2^-24 each).
    for name, weight in store.weights().items():
        torch.testing.assert_close(weight, tools.gather(pair.names[name], released), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def one_device(pair, tools):
    """Train two steps on one device, and keep the state after each."""
    steps = packed_steps(tools, 2, micro_batches=3, sequences=1)
    store = store_of(model := pair.build(), tools.stored_parameters(pair.ours))
    states, losses = [], []
    with engine_of(model, store, PARTITIONS[1], num_devices=1) as engine:
        for step in steps:
            losses += train(engine, [step])
            states.append(({name: view.clone() for name, view in store.named_views().items()}, store.resume_state()))
    return SimpleNamespace(steps=steps, losses=losses, states=states)


@pytest.mark.parametrize("devices", [2, 3])
def test_several_devices_give_the_bits_of_one(pair, one_device, devices, tools):
    store = store_of(model := pair.build(), tools.stored_parameters(pair.ours))
    with engine_of(model, store, PARTITIONS[devices], devices) as engine:
        assert train(engine, one_device.steps) == one_device.losses
    assert_same_state(store.named_views(), one_device.states[1][0])


def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(pair, one_device, tools):
    (views, state), (last, _) = one_device.states
    store = store_of(model := pair.build(), tools.stored_parameters(pair.ours))
    for name, view in store.named_views().items():
        view.copy_(views[name])
    store.resume(1, **state)
    with engine_of(model, store, PARTITIONS[2], num_devices=2) as engine:
        assert train(engine, one_device.steps[1:]) == one_device.losses[1:]
    assert_same_state(store.named_views(), last)


def test_names_are_those_of_the_tensors_that_transformers_writes(pair, tools):
    released, stored = tools.released_tensors(pair.theirs), tools.stored_parameters(pair.ours)
    assert pair.names.keys() == stored.keys()
    assert sorted(tools.all_names(pair.names)) == sorted(released)
    for name, parameter in stored.items():
        assert parameter.shape == tools.gather(pair.names[name], released).shape, name


def test_buffers_are_those_of_a_model_that_was_built_with_memory(pair):
    theirs = dict(pair.theirs.named_buffers())
    ours = {
        f"{name}.{path}": buffer
        for name, layer in zip(pair.ours.names, pair.ours.layers, strict=True)
        for path, buffer in layer.named_buffers()
    }
    assert theirs, "the reference has no buffers: nothing is compared"
    for name, buffer in theirs.items():
        same = [value for path, value in ours.items() if path.endswith(name.rpartition(".")[2])]
        assert any(torch.equal(value, buffer) for value in same), name
