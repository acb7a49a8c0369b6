"""The engine's losses, weights and moments equal a plain PyTorch loop's bit for bit, in fp32 on the CPU."""

import math

import pytest
import torch
from torch import nn

from tests.support.rounding import FP32, assert_close_in_sums, assert_states_close
from tests.support.toy import (
    MAX_NORM,
    OPTIMIZER,
    PARTITIONS,
    PlainLoop,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine.store.bundles import ASYNC
from torchround.layer import MicroBatch

STEPS = 20
LR = 1e-2


def plain_loop(model, store, tied, clip="global"):
    return PlainLoop(model, {name: view.clone() for name, view in store.weights().items()}, tied, clip)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_sync_training_is_bitwise_that_of_a_plain_loop(num_devices, partition, tied):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=4)
    store = toy_store(model)
    loop = plain_loop(model, store, tied)
    with toy_engine(model, store, PARTITIONS[partition], num_devices) as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_clipping_layer_by_layer_is_bitwise_that_of_a_plain_loop(tied):
    model, batches = toy_model(tied), toy_batches(5, micro_batches=3)
    store = toy_store(model)
    loop, other = plain_loop(model, store, tied, "layer"), plain_loop(model, store, tied)
    with toy_engine(model, store, PARTITIONS["backward coarser"], 2, clip="layer") as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())
    # The layers' bounds together are the global one, but most layers reach theirs at other times.
    assert losses != other.train(batches, LR)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_async_training_is_bitwise_a_plain_loop_that_applies_gradients_one_step_late(num_devices, tied):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=4)
    store = toy_store(model, policy=ASYNC)
    loop = plain_loop(model, store, tied)
    with toy_engine(model, store, PARTITIONS["backward coarser"], num_devices) as engine:
        losses = train(engine, batches, LR)
    expected, waiting = [], None
    for micro_batches in batches:
        loss, gradients = loop.gradients(micro_batches)  # at the weights before the last update
        expected.append(loss)
        if waiting is not None:
            loop.update(waiting, LR)
        waiting = {name: gradient.clone() for name, gradient in gradients.items()}
    loop.update(waiting, LR)
    assert losses == expected
    views = store.named_views()
    assert_same_state({name: views[name] for name in loop.state()}, loop.state())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_two_rounds_differ_from_a_plain_loop_only_in_where_sums_round(tied):
    model, batches = toy_model(tied), toy_batches(STEPS, micro_batches=5)
    store = toy_store(model)
    loop = plain_loop(model, store, tied)
    with toy_engine(model, store, PARTITIONS["forward coarser"], 3, rounds=2) as engine:
        losses = train(engine, batches, LR)
    # Two rounds add up five micro-batches as two sums: five terms more on the path in each step.
    terms = 5 * STEPS
    assert losses == pytest.approx(loop.train(batches, LR), rel=terms * FP32)
    weights = {name: view for name, view in loop.state().items() if name.startswith("weights/")}
    assert_states_close(store.named_views(), weights, terms)


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_two_rounds_do_not_depend_on_the_number_of_devices(num_devices):
    states = []
    for devices in (3, num_devices):
        model = toy_model(tied=True)
        store = toy_store(model)
        with toy_engine(model, store, PARTITIONS["forward coarser"], devices, rounds=2) as engine:
            train(engine, toy_batches(5, micro_batches=5), LR)
        states.append(store.named_views())
    assert_same_state(*states)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_layerwise_recompute_gives_the_same_bits_as_stage_recompute(partition):
    model, batches = toy_model(), toy_batches(5, micro_batches=3)
    store = toy_store(model)
    loop = plain_loop(model, store, tied=False)
    with toy_engine(model, store, PARTITIONS[partition], 2, layerwise_recompute=True) as engine:
        losses = train(engine, batches, LR)
    assert losses == loop.train(batches, LR)
    assert_same_state(store.named_views(), loop.state())


def test_a_tied_weight_follows_ordinary_autograd_and_torch_adamw_to_rounding():
    """The reference here is torch alone: one shared `nn.Parameter`, clip_grad_norm_ and torch.optim.AdamW."""
    model, batches = toy_model(tied=True), toy_batches(STEPS, micro_batches=4)
    store = toy_store(model)
    module = nn.Sequential(*toy_model(tied=True).layers).to_empty(device="cpu")
    module[-1].weight = module[0].weight  # to_empty unties
    names = [
        f"{name}.{path}"
        for name, layer in zip(model.names, module, strict=True)
        for path, _ in layer.named_parameters()
    ]
    by_name = dict(zip(names, (p for layer in module for p in layer.parameters()), strict=True))
    for name, value in store.weights().items():
        by_name[name].data.copy_(value)
    with toy_engine(model, store, PARTITIONS["one layer a stage"], 3) as engine:
        losses = train(engine, batches, LR)
    # The tied gradient has two terms, and torch's update rounds elsewhere: about ten roundings a step.
    terms = 12 * STEPS
    assert losses == pytest.approx(torch_training(module, batches), rel=terms * FP32)
    for name, value in store.weights().items():
        assert_close_in_sums(value, by_name[name].data, terms, name)


def torch_training(module: nn.Module, batches: list[list[MicroBatch]]) -> list[float]:
    decayed = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    )
    losses = []
    for micro_batches in batches:
        labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        total = 0.0
        for micro_batch in micro_batches:
            hidden = None
            for layer in module:
                hidden = layer(hidden, micro_batch)
            (hidden / labels).backward()
            total += hidden.item()
        torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / labels)
    return losses


def test_bf16_gradients_accumulate_in_fp32_and_are_rounded_once():
    """Sums of 32 micro-batches in bf16 would lose more than the final rounding does."""
    norms = {}
    for name, options in {"fp32 sums": {}, "bf16 sums": {"accumulate_dtype": torch.bfloat16}}.items():
        model = toy_model()
        store = toy_store(model, torch.bfloat16)
        with toy_engine(model, store, PARTITIONS["forward coarser"], 2, **options) as engine:
            train(engine, toy_batches(1, micro_batches=32), LR)
        norms[name] = {bundle.index: bundle.gradient.double() for bundle in store.trained}
    reference = bf16_gradient_in_fp64(toy_batches(1, micro_batches=32)[0])
    errors = {
        name: math.sqrt(sum(float((gradients[i] - reference[i]).square().sum()) for i in reference))
        for name, gradients in norms.items()
    }
    assert errors["fp32 sums"] < 0.5 * errors["bf16 sums"]


def bf16_gradient_in_fp64(micro_batches: list[MicroBatch]) -> dict[int, torch.Tensor]:
    """Return the sum of every micro-batch's own bf16 gradient, added in fp64."""
    total: dict[int, torch.Tensor] = {}
    labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
    for micro_batch in micro_batches:
        model = toy_model()
        store = toy_store(model, torch.bfloat16)
        with toy_engine(model, store, PARTITIONS["forward coarser"], 1) as engine:
            train(engine, [[micro_batch]], LR)
        for bundle in store.trained:
            part = bundle.gradient.double() * micro_batch.num_labels() / labels
            total[bundle.index] = total.get(bundle.index, 0.0) + part
    return total
