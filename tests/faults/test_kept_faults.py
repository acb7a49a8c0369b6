"""Planted faults in the way of kept activations: each is named, leaves a whole update, no thread, and nothing behind.

Training continues from what is left, on other devices, with other choices of what is kept, to the bits of a run that
keeps nothing and met no fault.
"""

import itertools
import logging
import threading
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from tests.support.kept_faults import SITES, Bomb, PlantedError, changed_before_sending, never_posted
from tests.support.planted_hangs import over, planted
from tests.support.toy import (
    KEPT,
    PARTITIONS,
    ToyBlock,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround import keeping
from torchround.engine.errors import DeviceMemoryError, HangError, HostMemoryError, PipelineError
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC
from torchround.keeping import KeptActivationError

__all__ = ["over", "planted"]

STEPS = 3
BATCHES = toy_batches(STEPS, micro_batches=4)
PARTITION = PARTITIONS["one layer a stage"]
POLICIES = {"sync": SYNC, "async": ASYNC, "async, predict": ASYNC_PREDICT}
ERRORS = (PlantedError, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit, MemoryError, StopIteration)
# A site has an error of its own where the engine itself would raise it.
OWN_ERRORS = {"room on the device": DeviceMemoryError, "a buffer of the pool": HostMemoryError}


@dataclass(frozen=True)
class KeptFault:
    """One planted fault; without an `exception`, a delay at every chance."""

    site: str
    exception: type[BaseException] | None
    hit: int
    policy: str
    num_devices: int
    kept: str
    settings: tuple[tuple[str, object], ...]

    def __str__(self) -> str:
        what = self.exception.__name__ if self.exception else "delay"
        return f"{self.site}-{what}-{self.hit}-{self.policy}-{self.num_devices}-{self.kept}".replace(" ", "_")


def all_cases() -> list[KeptFault]:
    """Two faults at every site, early and late in the run, over modes, devices and choices; then a few delays."""
    modes = itertools.cycle(itertools.product(POLICIES, (1, 2, 3, 8)))
    settings = itertools.cycle([(), (("rounds", 2),), (("layerwise_recompute", True),), (("times_layers", True),), ()])
    kept, errors = itertools.cycle(["all", "mixed", "half"]), itertools.cycle(ERRORS)
    once = ("room on the device",)
    cases = [
        KeptFault(site, OWN_ERRORS.get(site) or next(errors), hit, *next(modes), next(kept), next(settings))
        for site in SITES
        for hit in ((1, 2) if site in once else (1, 23))
    ]
    for site in ("the copy down", "the copy up", "a layer that is recorded", "a part that is replayed"):
        cases.append(KeptFault(site, None, 0, *next(modes), next(kept), next(settings)))
    return cases


CASES = all_cases()


@cache
def undisturbed(policy: str, rounds: int):
    """Return the state after 0, 1, .. steps and each step's loss, of a run on one device that keeps nothing."""
    model = toy_model()
    store = toy_store(model, policy=POLICIES[policy])
    states, losses = [copied(store)], []
    with toy_engine(model, store, PARTITIONS["one stage"], 1, rounds=rounds) as engine:
        for batch in BATCHES:
            losses += train(engine, [batch])
            states.append(copied(store))
    return states, losses


def copied(store):
    return {name: view.clone() for name, view in store.named_views().items()}


def engine_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchround")]


def check_continues(store, policy, rounds, num_devices):
    """Require a whole update in the store, and train on from it with another plan and choice."""
    states, losses = undisturbed(policy, rounds)
    left = store.step
    assert store.is_consistent and engine_threads() == []
    assert keeping._thread.active is None and keeping._thread.mode is None
    assert_same_state(store.named_views(), states[left])
    model, partition = toy_model(), PARTITIONS["backward coarser"]
    with toy_engine(model, store, partition, num_devices % 3 + 1, rounds=rounds, kept=KEPT["one part"]) as engine:
        assert train(engine, BATCHES[left:]) == losses[left:]
    assert_same_state(store.named_views(), states[STEPS])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_is_named_leaves_a_whole_update_and_training_continues(case: KeptFault, monkeypatch):
    bomb = Bomb(case.exception, case.hit)
    model, store = toy_model(), toy_store(toy_model(), policy=POLICIES[case.policy])
    options = dict(case.settings)
    rounds = int(options.get("rounds", 1))
    with monkeypatch.context() as patch:
        SITES[case.site](patch, bomb)
        if case.exception is None:
            with toy_engine(model, store, PARTITION, case.num_devices, kept=KEPT[case.kept], **options) as engine:
                assert train(engine, BATCHES) == undisturbed(case.policy, rounds)[1]
            assert bomb.chances > 0
        else:
            with (
                pytest.raises(PipelineError) as raised,
                toy_engine(model, store, PARTITION, case.num_devices, kept=KEPT[case.kept], **options) as engine,
            ):
                train(engine, BATCHES)
            assert raised.value.__cause__ is bomb.raised is not None, repr(raised.value)
            assert raised.value.location.actor.startswith("device cpu:")
            assert case.exception.__name__ in str(raised.value)
            assert engine.pool._buffers == []
    check_continues(store, case.policy, rounds, case.num_devices)


def test_the_cases_cover_every_site_mode_device_count_and_choice():
    faults = [case for case in CASES if case.exception is not None]
    assert (len(faults), len(CASES) - len(faults)) == (34, 4)
    assert {case.site for case in faults} == SITES.keys()
    modes = set(itertools.product(POLICIES, (1, 2, 3, 8)))
    assert {(case.policy, case.num_devices) for case in faults} == modes
    assert {case.exception for case in faults} == {*ERRORS, *OWN_ERRORS.values()}
    assert {case.kept for case in faults} == {"all", "mixed", "half"}


# Records that do not fit their layer.

MISFITS = {
    "one is missing": (lambda tensors: tensors[:1], "needs kept activation number 2, and only 1 were kept"),
    "they are swapped": (lambda tensors: tensors[::-1], "kept activation number 1 has shape"),
    "another shape": (lambda tensors: [tensors[0].flatten(), *tensors[1:]], "kept activation number 1 has"),
    "another type": (lambda tensors: [*tensors[:1], tensors[1].bfloat16()], "type torch.bfloat16"),
    "one too many": (
        lambda tensors: [*tensors[:1], tensors[1].bfloat16().float()[:0], *tensors[1:]],
        "kept activation number 2 has",
    ),
}


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_record_that_does_not_fit_its_layer_is_a_named_error(monkeypatch, misfit, num_devices):
    change, words = MISFITS[misfit]
    store = toy_store(toy_model())
    with monkeypatch.context() as patch:
        changed_before_sending(change, hit=25)(patch, Bomb(None))
        engine = toy_engine(toy_model(), store, PARTITION, num_devices, kept=KEPT["all"])
        with pytest.raises(PipelineError, match=words) as raised:
            train(engine, BATCHES)
    assert isinstance(raised.value.__cause__, KeptActivationError)
    assert raised.value.location.stage == "backward" and raised.value.location.micro_batch is not None
    check_continues(store, "sync", 1, num_devices)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: [], "recorded nothing to keep"),
        (lambda tensors: [*tensors, torch.zeros(99)], "were counted. It is recomputed instead"),
    ],
    ids=["nothing", "more than was counted"],
)
def test_a_layer_without_a_usable_record_is_recomputed(monkeypatch, caplog, change, words):
    store = toy_store(toy_model())
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        changed_before_sending(change, hit=1)(patch, Bomb(None))
        with toy_engine(toy_model(), store, PARTITION, 2, kept=KEPT["all"]) as engine:
            assert train(engine, BATCHES) == undisturbed("sync", 1)[1]
    assert words in caplog.text
    assert_same_state(store.named_views(), undisturbed("sync", 1)[0][STEPS])


def test_a_layer_that_writes_into_what_it_keeps_is_a_named_error(monkeypatch):
    forward = ToyBlock.forward

    def writing(self, hidden, micro_batch):
        found, thread = [], threading.get_ident()

        def note(module, inputs, output):
            if threading.get_ident() == thread:  # the devices share the module
                found.append(output)

        self.up.register_forward_hook(note)
        output = forward(self, hidden, micro_batch)
        if keeping._thread.active is not None:
            found[0].detach().zero_()
        return output

    store = toy_store(toy_model())
    with monkeypatch.context() as patch:
        patch.setattr(ToyBlock, "forward", writing)
        engine = toy_engine(toy_model(), store, PARTITION, 2, kept=KEPT["all"])
        with pytest.raises(PipelineError, match="writes into its own kept activation") as raised:
            train(engine, BATCHES)
    assert isinstance(raised.value.__cause__, KeptActivationError)
    check_continues(store, "sync", 1, 2)


# Hangs, and faults beside the way of kept activations.


@pytest.mark.parametrize("hit", [1, 30])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_kept_activations_that_never_come_are_a_hang_that_names_them(monkeypatch, planted, over, num_devices, hit):
    store = toy_store(toy_model())
    with monkeypatch.context() as patch:
        never_posted(patch, planted, hit)
        engine = toy_engine(toy_model(), store, PARTITION, num_devices, kept=KEPT["all"], hang_timeout_s=0.4)
        with pytest.raises(HangError, match=r"the kept activations of layer \d for micro-batch \d of pass \d"):
            train(engine, BATCHES)
    check_continues(store, "sync", 1, num_devices)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_save_that_fails_beside_kept_activations_changes_nothing(policy):
    def failing(source):
        for number, name in enumerate(source.tensors):
            if number == 5:
                raise PlantedError("the disk")
            source.finished_reading(name)

    store = toy_store(toy_model(), policy=POLICIES[policy])
    with toy_engine(toy_model(), store, PARTITION, 3, kept=KEPT["mixed"]) as engine:
        losses = train(engine, BATCHES[:1])
        pending = engine.save(failing)
        losses += train(engine, BATCHES[1:])
        with pytest.raises(PlantedError, match="the disk"):
            pending.result()
    assert losses == undisturbed(policy, 1)[1]
    assert_same_state(store.named_views(), undisturbed(policy, 1)[0][STEPS])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_caller_that_fails_between_two_steps_leaves_kept_activations_nowhere(policy):
    store = toy_store(toy_model(), policy=POLICIES[policy])
    with pytest.raises(PlantedError), toy_engine(toy_model(), store, PARTITION, 2, kept=KEPT["all"]) as engine:
        engine.forward_backward(BATCHES[0])
        engine.step(1e-2)
        engine.forward_backward(BATCHES[1])
        raise PlantedError
    assert engine.pool._buffers == []
    check_continues(store, policy, 1, 2)
