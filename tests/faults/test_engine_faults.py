"""95 planted faults and 25 delays over stages, micro-batches, modes and devices: no hang, no thread left, no wrong state."""

import threading
from collections import Counter
from functools import cache

import pytest

from tests.support.planted_faults import (
    BATCHES,
    EXCEPTIONS,
    LAYER_SITES,
    SITES,
    STEPS,
    VALIDATION,
    VARIANTS,
    Case,
    Fuse,
    FusedDevice,
    draw_cases,
    expected_location,
    fused_model,
)
from tests.support.toy import PARTITIONS, assert_same_state, toy_engine, toy_store, train
from torchround.engine import landed_gradients, optimizer_worker
from torchround.engine.errors import PipelineError
from torchround.engine.store.bundles import POLICIES

CASES = draw_cases(120, seed=4)
FAULTS = [case for case in CASES if case.exception is not None]
DELAYS = [case for case in CASES if case.exception is None]


@cache
def undisturbed(variant: str, update: str, rounds: int):
    """Return the state after 0, 1, .. steps and each step's loss, of a run on one device that waits after each step."""
    model = fused_model(variant, Fuse(None))
    store = toy_store(model, policy=POLICIES[update])
    states, losses = [copied(store)], []
    with toy_engine(model, store, PARTITIONS["one stage"], 1, rounds=rounds) as engine:
        for batch in BATCHES:
            losses += train(engine, [batch])
            states.append(copied(store))
    return states, losses


def copied(store):
    return {name: view.clone() for name, view in store.named_views().items()}


def our_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith(("torchround", "finish"))]


def run(engine, fuse):
    """Run all steps, with a validation after the second; in `caller` cases the caller itself fails."""
    results = []
    for step, batch in enumerate(BATCHES):
        results.append(engine.forward_backward(batch))
        engine.step(1e-2)
        if fuse.case.site == "validation" and step == 1:
            engine.evaluate(VALIDATION).loss()
        fuse.at_operation("caller")
    engine.drain()
    return [result.loss() for result in results]


def plant_on_host(patch, fuse):
    """Plant fuses in the optimizer's two passes over memory."""

    def with_fuse(site, function):
        def fused(*arguments, **options):
            fuse.at_operation(site)
            return function(*arguments, **options)

        return fused

    for site, module, name in (
        ("gradient norm", landed_gradients, "sum_of_squares"),
        ("update", optimizer_worker, "update_"),
    ):
        patch.setattr(module, name, with_fuse(site, getattr(module, name)))


def run_into(case, store, fuse):
    """Run a case. Raises what the run raises."""
    with pytest.MonkeyPatch.context() as patch:
        plant_on_host(patch, fuse)
        engine = toy_engine(
            fused_model(case.variant, fuse),
            store,
            PARTITIONS[case.partition],
            case.num_devices,
            rounds=case.rounds,
            layerwise_recompute=case.layerwise,
            wrap=lambda device: FusedDevice(int(device.name[4:]), fuse),
        )
        with engine:
            return run(engine, fuse)


def new_run(case):
    fuse = Fuse(case)
    return fuse, toy_store(fused_model(case.variant, fuse), policy=POLICIES[case.update])


@pytest.mark.parametrize("case", DELAYS, ids=str)
def test_a_delay_changes_nothing(case: Case):
    states, losses = undisturbed(case.variant, case.update, case.rounds)
    fuse, store = new_run(case)
    assert run_into(case, store, fuse) == losses
    assert fuse.gone_off
    assert our_threads() == []
    assert_same_state(store.named_views(), states[STEPS])


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_fault_is_named_leaves_a_whole_update_and_training_continues_from_it(case: Case):
    states, losses = undisturbed(case.variant, case.update, case.rounds)
    fuse, store = new_run(case)
    with pytest.raises(BaseException) as raised:
        run_into(case, store, fuse)
    assert_named(case, fuse, raised.value)
    assert our_threads() == []
    left = store.step
    assert store.is_consistent and left in possible_steps(case)
    assert_same_state(store.named_views(), states[left])
    assert train_on(case, store) == losses[left:]
    assert_same_state(store.named_views(), states[STEPS])


def assert_named(case, fuse, error):
    """Check that the fault is the cause of a `PipelineError` that names its location."""
    assert fuse.raised is not None, f"the fuse has not gone off; instead: {error!r}"
    if case.site == "caller":  # in the caller's own code, which is not part of the pipeline
        assert error is fuse.raised
        return
    assert type(error) is PipelineError and error.__cause__ is fuse.raised, repr(error)
    location = error.location
    assert str(location) in str(error) and case.exception.__name__ in str(error)
    names = fused_model(case.variant, fuse).names
    if case.site in ("gradient norm", "update"):
        assert location.actor == "optimizer worker" and location.layers
    elif case.site == "validation":
        assert (location.stage, location.micro_batch) == ("forward", case.micro_batch)
        assert names[case.layer] in location.layers
    elif case.site in LAYER_SITES:
        assert location == expected_location(case, names)
    else:
        assert location.actor == f"device {fuse.device}"
        # Most allocations are made before the first stage; gradients held back go down also between two stages.
        if case.site not in ("allocation", "gradients down"):
            assert location.stage and location.layers


def possible_steps(case):
    """Return how many updates may be in the store: those that the failed pass needed, and in async one more or less."""
    if case.site == "validation":
        return [2]  # it reads the newest weights
    if case.site in LAYER_SITES:
        return [case.step] if case.update == "sync" else [max(case.step - 1, 0), case.step]
    if case.site == "update":
        return range(1, STEPS + 1)  # including the one that failed in the middle
    return range(STEPS + 1)


def train_on(case, store):
    """Train the rest of the steps, on another number of devices with another partition."""
    model = fused_model(case.variant, Fuse(None))
    partition = PARTITIONS["backward coarser" if case.partition == "forward coarser" else "forward coarser"]
    with toy_engine(model, store, partition, case.num_devices % 8 + 1, rounds=case.rounds) as engine:
        return train(engine, BATCHES[store.step :])


def test_the_cases_cover_every_site_mode_device_count_and_exception():
    assert len(set(map(str, CASES))) == len(CASES)
    assert (len(FAULTS), len(DELAYS)) == (95, 25), "docs/faults.md and docs/engine.md say how many there are"
    faults = Counter(case.site for case in FAULTS)
    assert min(faults[site] for site in SITES) >= 5, faults
    for field, values in (
        ("variant", VARIANTS),
        ("update", ("sync", "async")),
        ("rounds", (1, 2)),
        ("num_devices", range(1, 9)),
        ("partition", PARTITIONS),
        ("exception", (*EXCEPTIONS, None)),
        ("micro_batch", range(4)),
        ("step", range(STEPS)),
        ("layerwise", (False, True)),
    ):
        counts = Counter(getattr(case, field) for case in CASES)
        assert min(counts[value] for value in values) >= 5, (field, counts)
