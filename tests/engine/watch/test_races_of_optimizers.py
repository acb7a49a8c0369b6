"""The race checker with every optimizer and state format: no race, and one for each ordering rule that is taken out.

The bfloat16 weights of these runs are split, so an update reads the newest device weights and writes their residual.
"""

import functools

import pytest
import torch

from tests.engine.watch.test_race_checker import on_a_thread_of_its_own
from tests.support.optimizers import OPTIMIZERS, POLICIES
from tests.support.toy import PARTITIONS, linked, toy_batches, toy_engine, toy_model, toy_store, watched
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, BOUNDED, SYNC
from torchround.engine.watch.race_checker import AccessLog, Region, find_races
from torchround.optim import make_optimizer

# Both have all kinds of buffers between them; the other two are in the nightly tier.
QUICK = ("adamw compact", "muon")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in OPTIMIZERS]
MODES = [(name, policy) for name in OPTIMIZERS for policy in POLICIES[name]]


def label(value):
    return value.name + "-predict" * value.predicts if hasattr(value, "predicts") else None


def recorded(name, policy=SYNC, partition="forward coarser", evaluates=False, saves=False, poisoned=False, **options):
    """Return the log of a run of four steps, and its store.

    With `poisoned`, no gradient is finite and every update is skipped.
    """
    log, model = AccessLog(), toy_model(options.pop("tied", False))
    num_devices = options.pop("num_devices", 3)
    store = toy_store(model, torch.bfloat16, policy=policy, optimizer=make_optimizer(OPTIMIZERS[name]))
    if poisoned:
        for device_weight in store.bundles[1].device_weights:
            device_weight.fill_(torch.inf)
    settings = {"observer": log, "wrap": lambda device: watched(linked(device), log), **options}
    with toy_engine(model, store, PARTITIONS[partition], num_devices, optimizer=OPTIMIZERS[name], **settings) as engine:
        for step, micro_batches in enumerate(toy_batches(4, micro_batches=4)):
            if evaluates and step == 1:
                engine.evaluate(micro_batches)  # not awaited, so that it runs beside the next step
            result = engine.forward_backward(micro_batches)
            engine.step(1e-2)
            if saves and step < 3:
                engine.save(lambda source: read_all(source, log))
            if evaluates and step == 1:
                result.update()  # first: asking for the evaluation's loss would order the two
        engine.drain()
    assert sum(entry.action == "access" for entry in log.entries) > 100
    return log, store


def read_all(source, log):
    """Read everything that a checkpoint holds, as a writer of files does."""
    for name, tensor in source.tensors.items():
        log.touched([tensor], [])
        source.finished_reading(name)


def races(name, **options):
    return find_races(recorded(name, **options)[0].entries)


@pytest.mark.parametrize(("name", "policy"), MODES, ids=label)
def test_no_race_with_any_optimizer(name, policy):
    options = {"stale_layers": 3, "partition": "backward coarser"} if policy is BOUNDED else {"rounds": 2}
    assert races(name, policy=policy, tied=True, evaluates=True, saves=True, **options) == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_race_around_updates_that_are_skipped(name):
    assert races(name, policy=ASYNC, poisoned=True, evaluates=True, saves=True) == []


@functools.cache
def is_clean(name, policy, *options):
    return races(name, policy=policy, **dict(options)) == []


# By rule: the method whose wait is taken out, and a run that needs it. Directions of matrices order an update after all
# that their devices did before. So rule 1 shows with more devices than there are blocks.
RULES = {
    "1": ("before_device_weight_write", SYNC, {"evaluates": True, "partition": "one stage", "num_devices": 8}),
    "2": ("before_upload", SYNC, {}),
    "3": ("before_gradient_read", SYNC, {}),
    "4": ("before_gradient_write", ASYNC, {}),
    "6, saves of sync": ("before_overwriting_saved", SYNC, {"saves": True}),
    "6, saves of async": ("before_overwriting_saved", ASYNC, {"saves": True}),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_each_rule_is_needed_with_every_optimizer(monkeypatch, name, rule):
    method, policy, options = RULES[rule]
    assert is_clean(name, policy, *options.items())
    if method == "before_gradient_read":
        # Otherwise hand-overs are forgotten that the optimizer runs past.
        monkeypatch.setattr(Ordering, "retire", lambda *_: None)
    monkeypatch.setattr(Ordering, method, lambda *_: None)
    assert races(name, policy=policy, **options) != []


@pytest.mark.parametrize("rule_holds", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_rule_5_is_needed_with_every_optimizer(monkeypatch, name, rule_holds):
    """A skipped update, which carries the weights over to the next version, follows the previous one by this rule alone."""
    monkeypatch.setattr(OptimizerWorker, "_update", on_a_thread_of_its_own(OptimizerWorker._update))
    if not rule_holds:
        monkeypatch.setattr(Ordering, "before_update", lambda *_: None)
    assert bool(races(name, policy=ASYNC, poisoned=True)) is not rule_holds


@pytest.mark.parametrize(("name", "policy"), MODES, ids=label)
def test_the_checker_is_told_of_every_buffer_that_an_update_changes(name, policy):
    """Otherwise a race on a buffer, such as one of scales, could not be found."""
    log, store = recorded(name, policy)
    told = {region for entry in log.entries if entry.actor == "torchround optimizer" for region in entry.writes}
    for bundle in store.trained:
        changed = [*bundle.state(), *bundle.device_weights]
        assert len(changed) >= len(bundle.device_weights) + 2
        for buffer in changed:
            own = Region.of(buffer)
            assert any(found.allocation == own.allocation and found.covers(own) for found in told), bundle
