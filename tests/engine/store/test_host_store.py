"""The host store: which state is stored where and how often, its views, and what a resume restores."""

import itertools
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.support.reference import Reference
from tests.support.toy import (
    OPTIMIZER,
    PARTITIONS,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.config import AdamWTable
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC, Bundle, UpdatePolicy
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel
from torchround.models import FAMILIES
from torchround.optim.optimizer import make_optimizer

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(6, micro_batches=3)


def buffers(bundle: Bundle) -> list[Tensor]:
    gradient = [] if bundle.gradient is None else [bundle.gradient]
    return [*bundle.device_weights, *gradient, *bundle.state()]


def copy_of(store: HostStore) -> dict[str, Tensor]:
    return {name: view.clone() for name, view in store.named_views().items()}


def read(store: HostStore, saved: dict[str, Tensor]) -> None:
    """Write into the views in place, as a checkpoint does."""
    views = store.named_views()
    assert views.keys() == saved.keys()
    for name, view in views.items():
        view.copy_(saved[name])


def frozen_model(*trainable: str) -> LayeredModel:
    """Return the toy model with only these layers trained."""
    model = toy_model()
    for name, layer in zip(model.names, model.layers, strict=True):
        layer.requires_grad_(name in trainable)
    return model


# Where things lie.


def test_views_are_the_stores_memory_and_cover_all_of_it_except_padding() -> None:
    store = toy_store(toy_model(), policy=ASYNC)
    for bundle in store.bundles:
        for buffer in buffers(bundle):
            buffer.zero_()
    for view in store.named_views().values():
        view.fill_(1)
    for bundle in store.bundles:
        numel = sum(parameter.shape.numel() for parameter in bundle.parameters)
        moments = [flat for segment in bundle.segments for flat in segment.parts.values()]
        assert [int(flat.sum()) for flat in (*bundle.device_weights, bundle.weight)] == [0, numel, numel]
        assert sum(int(flat.sum()) for flat in moments) == 2 * numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_aligned_for_vector_loads_and_copies(dtype: torch.dtype) -> None:
    model = toy_model()
    store = toy_store(model, dtype)
    for bundle in store.bundles:
        places = sorted((parameter.start, parameter.stop) for parameter in bundle.parameters)
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(places))
        assert places[0][0] == 0 and places[-1][1] <= bundle.numel
        # 256 bytes in 16 bits from the start of the buffer, and so in a device's slot.
        assert all(start % 128 == 0 for start, _ in places) and bundle.numel % 128 == 0
        assert all(buffer.data_ptr() % 64 == 0 for buffer in buffers(bundle))


def test_weight_decay_covers_exactly_the_parameters_with_two_dimensions() -> None:
    for bundle in toy_store(toy_model()).bundles:
        for parameter in bundle.parameters:
            [segment] = [s for s in bundle.segments if s.start <= parameter.start < s.stop]
            assert parameter.stop <= segment.stop
            assert (segment.rule.weight_decay > 0) == (len(parameter.shape) >= 2)


# How often things are stored.


def test_a_tied_parameter_is_stored_once_and_bound_in_both_layers() -> None:
    tied, untied = toy_store(toy_model(tied=True)), toy_store(toy_model())
    assert untied.weights().keys() - tied.weights().keys() == {"head.weight"}
    assert tied.num_parameters() == untied.num_parameters() - untied.weights()["head.weight"].numel()
    [shared] = [bundle for bundle in tied.bundles if len(bundle.layers) > 1]
    assert shared.layers == (0, 6)
    bound = [
        location.parameter.view(tied.bundles[location.bundle].device_weights[0])
        for layer, path in ((0, "weight"), (6, "weight"))
        for location in tied.locations[layer]
        if location.path == path
    ]
    assert bound[0].data_ptr() == bound[1].data_ptr()


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state_nor_versions() -> None:
    store = toy_store(frozen_model("block.2"), torch.bfloat16, policy=ASYNC)
    store.allocate_gradients(rounds=2)
    [trained] = store.trained
    assert all(name.startswith("block.2.") for name in (p.name for p in trained.parameters))
    for bundle in store.bundles:
        if bundle is not trained:
            assert [buffer.dtype for buffer in buffers(bundle)] == [torch.bfloat16]
    kinds = {name.split("/")[0] for name in store.named_views() if "/block.2." not in name}
    assert kinds == {"weights"}
    assert store.weights()["head.weight"].dtype is torch.bfloat16
    assert store.weights()["block.2.norm"].dtype is torch.float32


# Device weights 2 for each version, gradient 2 (4 if rounds add up), what fp32 weights take beside the device weights 2 or
# 4, and two moments of 4, or of 1 + 2 / 128, bytes each.
@pytest.mark.parametrize(
    ("dtype", "policy", "state", "rounds", "expected"),
    [
        (torch.bfloat16, SYNC, "exact", 1, 2 + 2 + 2 + 8),
        (torch.bfloat16, ASYNC, "exact", 1, 4 + 2 + 2 + 8),
        (torch.bfloat16, SYNC, "exact", 2, 2 + 4 + 2 + 8),
        (torch.bfloat16, ASYNC_PREDICT, "exact", 1, 4 + 2 + 4 + 8),
        (torch.bfloat16, BOUNDED, "exact", 1, 2 + 2 + 4 + 8),
        (torch.bfloat16, SYNC, "compact", 1, 2 + 2 + 2 + 2.03),
        (torch.bfloat16, ASYNC, "compact", 1, 4 + 2 + 2 + 2.03),
        (torch.bfloat16, ASYNC_PREDICT, "compact", 1, 4 + 2 + 4 + 2.03),
        (torch.float16, SYNC, "exact", 1, 2 + 2 + 4 + 8),
        (torch.float32, SYNC, "exact", 1, 4 + 4 + 4 + 8),
        (torch.float32, ASYNC, "exact", 1, 8 + 4 + 4 + 8),
    ],
    ids=str,
)
def test_bytes_per_trained_parameter(
    dtype: torch.dtype, policy: UpdatePolicy, state: Literal["exact", "compact"], rounds: int, expected: float
) -> None:
    llama3 = FAMILIES["llama3"]
    model, optimizer = (llama3.build(llama3.config_from_flavor("debug")), make_optimizer(AdamWTable(state=state)))
    store = HostStore(model, dtype, policy=policy, optimizer=optimizer)
    store.allocate_gradients(rounds)
    padded = sum(bundle.numel for bundle in store.bundles)
    assert store.nbytes() / padded == pytest.approx(expected, rel=0.001)
    assert padded / store.num_parameters() < 1.03


# What the weights are.


def test_initial_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    reference = toy_store(toy_model()).weights()
    for store in (
        toy_store(toy_model(), torch.bfloat16, policy=ASYNC),
        toy_store(frozen_model("head", *(f"block.{index}" for index in range(5)))),
    ):
        assert_same_state(store.weights(), reference)
    other = toy_store(toy_model(), seed=1).weights()
    assert not any(torch.equal(other[name], reference[name]) for name in reference if "norm" not in name)
    tied = toy_store(toy_model(tied=True)).weights()
    assert_same_state(tied, {name: reference[name] for name in tied})


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
def test_device_weights_are_the_rounded_weights(policy) -> None:
    """Both stores draw the same fp32 weights; none of these is half-way between two numbers of bfloat16."""
    store, truth = toy_store(toy_model(), torch.bfloat16, policy=policy), toy_store(toy_model())
    for bundle, exact in zip(store.bundles, truth.bundles, strict=True):
        assert len(bundle.device_weights) == policy.versions and bundle.weight is None
        for device_weight in bundle.device_weights:
            assert torch.equal(device_weight, exact.weight.bfloat16())
        assert torch.equal(bundle.copy_weights(0), exact.weight)


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize("how", ["write_weights", "resume"])
def test_weights_written_into_the_store_are_what_the_next_step_uses(policy, how: str) -> None:
    """A store that kept an older copy would overwrite the loaded weights with it at the next step."""
    model = toy_model()
    store = toy_store(model, policy=policy)
    loaded = {name: view + 0.125 for name, view in store.weights().items()}
    if how == "write_weights":
        store.write_weights(loaded)
    else:
        for name, filling in store.filling().items():
            with filling as weight:
                weight.copy_(loaded[name])
        saved = copy_of(store)
        for name in [name for name in saved if name.startswith("master_1_old/")]:
            saved[name] = loaded[name.partition("/")[2]]
        read(store, saved)
        store.resume(step=0, applied_updates=0)
    reference = Reference(toy_model(), loaded, OPTIMIZER)
    expected = reference.train(BATCHES[:1])
    with toy_engine(model, store, PARTITION, 2) as engine:
        assert train(engine, BATCHES[:1]) == expected
    state = copy_of(store)
    assert_same_state({name: state[name] for name in reference.state()}, reference.state())


# Resuming.


def by_version(store: HostStore) -> list[list[Tensor]]:
    """Return each bundle's device weights, newest first."""
    return [[bundle.version(store.step - age) for age in range(len(bundle.device_weights))] for bundle in store.bundles]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resume_in_async_restores_the_older_weights_too(dtype: torch.dtype, step: int, steps_before: int) -> None:
    """The saved step and the step that the store was at before may each be even or odd."""
    model = toy_model(tied=True)
    original = toy_store(model, dtype, policy=ASYNC)
    with toy_engine(model, original, PARTITION, 2) as engine:
        train(engine, BATCHES[:step])
    saved = copy_of(original)
    resumed = toy_store(toy_model(tied=True), dtype, policy=ASYNC, seed=1)
    with toy_engine(model, resumed, PARTITION, 1) as engine:
        train(engine, BATCHES[:steps_before])
    read(resumed, saved)
    resumed.resume(step, applied_updates=step)
    assert resumed.step == step
    for ours, theirs in zip(by_version(resumed), by_version(original), strict=True):
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
        assert not torch.equal(theirs[0], theirs[1])
    assert_same_state(copy_of(resumed), saved)
    losses = []
    for store in (original, resumed):
        with toy_engine(model, store, PARTITIONS["one stage"], 3) as engine:
            losses.append(train(engine, BATCHES[step : step + 2]))
    assert losses[0] == losses[1]
    assert_same_state(resumed.named_views(), original.named_views())


def test_a_resume_in_async_without_the_older_weights_trains_differently() -> None:
    """Shows that the test above can fail: the older weights matter."""
    model = toy_model()
    losses = []
    for forgets in (False, True):
        store = toy_store(model, policy=ASYNC)
        with toy_engine(model, store, PARTITION, 2) as engine:
            train(engine, BATCHES[:2])
        if forgets:
            store.refresh_device_weights()
        with toy_engine(model, store, PARTITION, 2) as engine:
            losses.append(train(engine, BATCHES[2:3]))
    assert losses[0] != losses[1]


def test_a_parameter_that_a_layer_uses_twice_is_stored_once() -> None:
    model = toy_model()
    block = model.layers[1]
    block.again = block.up  # one module under two names
    store = toy_store(model)
    assert {name for name in store.weights() if name.startswith("block.0.up")} == {
        "block.0.up.weight",
        "block.0.up.bias",
    }
    assert not any("again" in name for name in store.weights())
    places = {location.path: location.parameter for location in store.locations[1]}
    assert places["up.weight"] == places["again.weight"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: None, None),
        (lambda state: state.pop("lr"), "prediction is {'betas'"),
        (lambda state: state.pop("betas"), "prediction has lr, eps; legal: lr, betas, eps"),
        (lambda state: state.update(weight_decay=0.1), "prediction has lr, betas, eps, weight_decay; legal"),
        (lambda state: state.update(lr=float("nan")), "prediction is {'lr': nan"),
        (lambda state: state.update(betas=0.9), "betas"),
        (lambda state: state.update(eps=None), "eps"),
    ],
    ids=["sound", "no lr", "no betas", "a key too many", "not finite", "no pair", "no number"],
)
def test_a_damaged_prediction_is_refused_by_one_kind_of_error_before_anything_changes(
    damage: Callable[[dict[str, Any]], object], message: str | None
) -> None:
    store = toy_store(toy_model(), torch.bfloat16, policy=ASYNC_PREDICT)
    with toy_engine(toy_model(), store, PARTITION, 2) as engine:
        train(engine, BATCHES[:2])
    saved, before = store.resume_state()["prediction"], copy_of(store)
    weights = [bundle.version(2).clone() for bundle in store.bundles]
    damage(saved)
    if message is None:
        store.resume(2, applied_updates=2, prediction=saved)
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            store.resume(2, applied_updates=2, prediction=saved)
    assert_same_state(copy_of(store), before)
    assert all(torch.equal(b.version(2), old) for b, old in zip(store.bundles, weights, strict=True))


@pytest.mark.parametrize("prediction", [[], 5, "lr"], ids=str)
def test_a_prediction_that_is_no_table_is_refused(prediction: Any) -> None:
    store = toy_store(toy_model(), policy=ASYNC_PREDICT)
    with pytest.raises(ValueError, match="prediction is "):
        store.resume(2, applied_updates=2, prediction=prediction)
