"""The host store: which state is stored where and how often, its views, and what a resume restores."""

import contextlib
import itertools

import pytest
import torch

from tests.support import toy
from tests.support.reference import Reference
from tests.support.toy import PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.config import AdamWTable
from torchround.engine.store.host_store import HostStore
from torchround.models import FAMILIES
from torchround.optim.optimizer import make_optimizer
from torchround.planning.update_modes import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC
from torchround.run.numbers import num_parameters

PARTITION = PARTITIONS["forward coarser"]
BATCHES = toy_batches(6, micro_batches=3)


def buffers(bundle):
    gradient = [] if bundle.gradient is None else [bundle.gradient]
    return [*bundle.device_weights, *gradient, *bundle.state()]


def frozen_model(*trainable):
    model = toy_model()
    for name, layer in zip(model.names, model.layers, strict=True):
        layer.requires_grad_(name in trainable)
    return model


def test_every_parameter_is_aligned_for_vector_loads_and_copies():
    for bundle in toy_store(toy_model(), torch.bfloat16).bundles:
        places = sorted((parameter.start, parameter.stop) for parameter in bundle.parameters)
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(places))
        assert places[0][0] == 0 and places[-1][1] <= bundle.numel
        # 256 bytes in 16 bits from the start of the buffer, and so in a device's slot.
        assert all(start % 128 == 0 for start, _ in places) and bundle.numel % 128 == 0
        assert all(buffer.data_ptr() % 64 == 0 for buffer in buffers(bundle))


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state_nor_versions():
    store = toy_store(frozen_model("block.2"), torch.bfloat16, mode=ASYNC)
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


def test_a_parameter_that_two_layers_or_two_names_share_is_stored_once():
    model = toy_model(tied=True)
    model.layers[1].again = model.layers[1].up  # one module under two names
    shared, plain = toy_store(model), toy_store(toy_model())
    assert plain.weights().keys() - shared.weights().keys() == {"head.weight"}
    assert shared.weights().keys() <= plain.weights().keys()
    shared_numel, plain_numel = (sum(map(torch.numel, store.weights().values())) for store in (shared, plain))
    assert shared_numel == plain_numel - plain.weights()["head.weight"].numel()
    [tied] = [bundle for bundle in shared.bundles if len(bundle.layers) > 1]
    assert tied.layers == (0, 6)
    places = [{place.path: (place.bundle, place.parameter) for place in places} for places in shared.locations]
    assert places[0]["weight"] == places[6]["weight"] and places[1]["up.weight"] == places[1]["again.weight"]


# Device weights 2 for each version, gradient 2 (4 if rounds add up), what fp32 weights take beside the device weights 2 or
# 4, and two moments of 4, or of 1 + 2 / 128, bytes each.
@pytest.mark.parametrize(
    ("dtype", "mode", "state", "rounds", "expected"),
    [
        (torch.bfloat16, SYNC, "exact", 2, 2 + 4 + 2 + 8),
        (torch.bfloat16, ASYNC, "exact", 1, 4 + 2 + 2 + 8),
        (torch.bfloat16, BOUNDED, "exact", 1, 2 + 2 + 4 + 8),
        (torch.bfloat16, SYNC, "compact", 1, 2 + 2 + 2 + 2.03),
        (torch.bfloat16, ASYNC_PREDICT, "compact", 1, 4 + 2 + 4 + 2.03),
        (torch.float16, SYNC, "exact", 1, 2 + 2 + 4 + 8),
        (torch.float32, ASYNC, "exact", 1, 8 + 4 + 4 + 8),
    ],
    ids=str,
)
def test_bytes_per_trained_parameter(dtype, mode, state, rounds, expected):
    llama3 = FAMILIES["llama3"]
    model, optimizer = llama3.build(llama3.config_from_flavor("debug")), make_optimizer(AdamWTable(state=state))
    store = HostStore(model, dtype, mode=mode, optimizer=optimizer)
    store.allocate_gradients(rounds)
    padded = sum(bundle.numel for bundle in store.bundles)
    assert store.nbytes() / padded == pytest.approx(expected, rel=0.001)
    assert padded / num_parameters(model)[0] < 1.03


def test_initial_weights_depend_on_the_seed_and_on_nothing_else():
    exact = toy_store(toy_model())
    reference = exact.weights()
    half = toy_store(toy_model(), torch.bfloat16, mode=ASYNC)
    frozen = toy_store(frozen_model("head", *(f"block.{index}" for index in range(5))))
    for store in (half, frozen):
        assert_same_state(store.weights(), reference)
    # None of the weights is half-way between two numbers of bfloat16.
    for bundle, truth in zip(half.bundles, exact.bundles, strict=True):
        assert len(bundle.device_weights) == 2
        assert all(torch.equal(weights, truth.weight.bfloat16()) for weights in bundle.device_weights)
    other = toy_store(toy_model(), seed=1).weights()
    assert not any(torch.equal(other[name], reference[name]) for name in reference if "norm" not in name)
    tied = toy_store(toy_model(tied=True)).weights()
    assert_same_state(tied, {name: reference[name] for name in tied})


def copy_of(store):
    return {name: view.clone() for name, view in store.named_views().items()}


def read(store, saved):
    views = store.named_views()
    assert views.keys() == saved.keys()
    for name, view in views.items():
        view.copy_(saved[name])


@pytest.mark.parametrize(("mode", "resumes"), [(SYNC, False), (ASYNC, True)], ids=["write_weights", "resume"])
def test_weights_written_into_the_store_are_what_the_next_step_uses(mode, resumes):
    """A store that kept an older copy would overwrite the loaded weights with it at the next step."""
    store = toy_store(toy_model(), mode=mode)
    loaded = {name: view + 0.125 for name, view in store.weights().items()}
    if not resumes:
        store.write_weights(loaded)
    else:
        store.write_weights(loaded)
        saved = copy_of(store)
        for name in [name for name in saved if name.startswith("master_1_old/")]:
            saved[name] = loaded[name.partition("/")[2]]
        read(store, saved)
        store.resume(step=0, applied_updates=0)
    reference = Reference(toy_model(), loaded, toy.OPTIMIZER)
    expected = reference.train(BATCHES[:1])
    with toy_engine(PARTITION, 2, store=store) as engine:
        assert train(engine, BATCHES[:1]) == expected
    state = copy_of(store)
    assert_same_state({name: state[name] for name in reference.state()}, reference.state())


def by_version(store):
    return [[bundle.version(store.step - age) for age in range(len(bundle.device_weights))] for bundle in store.bundles]


# The saved step and the step that the store was at before are each even or odd.
@pytest.mark.parametrize(
    ("dtype", "step", "before"),
    [(torch.float32, 1, 0), (torch.bfloat16, 1, 1), (torch.bfloat16, 2, 0), (torch.float32, 2, 1)],
)
def test_a_resume_in_async_restores_the_older_weights_too(dtype, step, before):
    model = toy_model(tied=True)
    original = toy_store(model, dtype, mode=ASYNC)
    with toy_engine(PARTITION, 2, model=model, store=original) as engine:
        train(engine, BATCHES[:step])
    saved = copy_of(original)
    resumed = toy_store(toy_model(tied=True), dtype, mode=ASYNC, seed=1)
    with toy_engine(PARTITION, 1, model=model, store=resumed) as engine:
        train(engine, BATCHES[:before])
    read(resumed, saved)
    resumed.resume(step, applied_updates=step)
    assert resumed.step == step
    for ours, theirs in zip(by_version(resumed), by_version(original), strict=True):
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
        assert not torch.equal(theirs[0], theirs[1])
    assert_same_state(copy_of(resumed), saved)
    losses = []
    for store in (original, resumed):
        with toy_engine(PARTITIONS["one stage"], 3, model=model, store=store) as engine:
            losses.append(train(engine, BATCHES[step : step + 2]))
    assert losses[0] == losses[1]
    assert_same_state(resumed.named_views(), original.named_views())


DAMAGES = {
    "sound": (lambda saved: saved, None),
    "not finite": (lambda saved: {**saved, "lr": float("nan")}, "nan"),
    "no number": (lambda saved: {**saved, "lr": True}, "lr"),
    "of an older release": (lambda saved: {**saved, "betas": [0.9, 0.95], "eps": 1e-8}, None),
    "no rate": (lambda saved: {"betas": [0.9, 0.95]}, "betas"),
    "no table": (lambda saved: [], "prediction"),
}


@pytest.mark.parametrize(("damage", "key"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_prediction_is_refused_before_anything_changes(damage, key):
    with toy_engine(PARTITION, 2, dtype=torch.bfloat16, mode=ASYNC_PREDICT) as engine:
        train(engine, BATCHES[:2])
    sound, before = engine.store.resume_state()["prediction"], copy_of(engine.store)
    weights = [bundle.version(2).clone() for bundle in engine.store.bundles]
    with pytest.raises(ValueError, match=key) if key else contextlib.nullcontext():
        engine.store.resume(2, applied_updates=2, prediction=damage(sound))
    with pytest.raises(ValueError, match="prediction"):  # its bias correction would divide by zero
        engine.store.resume(2, applied_updates=0, prediction=sound)
    assert_same_state(copy_of(engine.store), before)
    assert all(torch.equal(b.version(2), old) for b, old in zip(engine.store.bundles, weights, strict=True))
