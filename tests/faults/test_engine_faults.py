"""Faults and delays at every place of an engine: no hang, no thread left, and a store that is whole, or marked as mixed.

A fault in a layer goes off by what is being computed (step, layer, micro-batch), not by when. So its location, which the
engine must report, follows from the partition and the dispatch rule alone. Training continues from what a fault left, on
other devices with another partition, to the bits of a run without a fault.
"""

import itertools
import re
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import nn

from tests.support import toy
from tests.support.faults import (
    CONSUMED,
    ERRORS,
    LANDED,
    UPLOADED,
    WRITTEN,
    Bomb,
    PlantedError,
    armed,
    before,
    copied,
    engine_threads,
    kind_of,
    lose,
)
from tests.support.toy import KEPT, PARTITIONS, assert_same_state, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.device import Stream
from torchround.engine.errors import EngineUsageError, FaultLocation, HangError, PipelineError
from torchround.engine.passes import KEPT as KEPT_ACTIVATIONS
from torchround.engine.passes import LOSS
from torchround.engine.store import host_store
from torchround.layer import LayeredModel
from torchround.optim.optimizer import make_optimizer
from torchround.planning.update_modes import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC

nightly = pytest.mark.nightly
STEPS, MICRO_BATCHES, LAYERS = 3, 4, 7
BATCHES = toy_batches(STEPS, MICRO_BATCHES)
[VALIDATION] = toy_batches(1, MICRO_BATCHES, seed=1)
MODES = {"sync": SYNC, "async": ASYNC, "predict": ASYNC_PREDICT, "bounded": BOUNDED}
ONE, FINEST, FORWARD, BACKWARD = PARTITIONS
WHERE = {
    micro_batch.tokens.numpy().tobytes(): (step, index)
    for step, batch in [*enumerate(BATCHES), ("validation", VALIDATION)]
    for index, micro_batch in enumerate(batch)
}

IN_LAYERS = ("forward", "recompute", "backward", "validation")
OF_KEPT = ("an uploaded input", "inputs that are read", ("posts", KEPT_ACTIVATIONS))
# Layers have them in forwards and recomputations, recorded and replayed if they keep activations.
IN_DEVICES = (
    *(*Stream, "a part", "an allocation", "packed tensors", "sent tensors", "inputs that are read", "uploaded weights"),
    *("an uploaded version", "a landed gradient", *OF_KEPT),
)
# Between an update and its announcement, and so on: the fault may leave layers of two versions.
MAY_MIX = (("posts", CONSUMED), ("posts", WRITTEN))
IN_OPTIMIZER = (*("a norm", "an update", "update_", ("has", LOSS), ("has", LANDED)), *(("has", UPLOADED), *MAY_MIX))
ONCE_A_STAGE = ("uploaded weights",)


@dataclass(frozen=True)
class Fault:
    """A fault at a place; without an `error`, a delay at each chance. `stale_layers` is for bounded updates."""

    place: object
    error: type[BaseException] | None
    hit: int = 1
    mode: str = "sync"
    devices: int = 2
    partition: str = FINEST
    variant: str = "plain"
    rounds: int = 1
    stale_layers: int = 0
    kept: str = ""
    layerwise: bool = False
    stays: bool = False

    def __str__(self):
        place = getattr(self.place, "value", self.place)
        if isinstance(place, tuple):
            place = " ".join(re.sub(r"\W+", " ", str(getattr(part, "words", part))) for part in place)
        error = self.error.__name__ if self.error else "delay"
        return f"{place}-{error}-{self.hit}-{self.mode}-{self.devices}-{self.kept}".replace(" ", "_")

    @property
    def site(self):
        return self.place[0] if isinstance(self.place, tuple) and self.place[0] in IN_LAYERS else self.place


def all_faults(rounds_of_table):
    errors, devices, partitions = itertools.cycle(ERRORS), itertools.cycle((1, 2, 3, 8)), itertools.cycle(PARTITIONS)
    modes = itertools.cycle(
        [
            *({"mode": "sync"}, {"mode": "async", "kept": "mixed"}, {"mode": "bounded", "stale_layers": 3}),
            *({"mode": "sync", "rounds": 2, "variant": "tied"}, {"mode": "predict"}),
            *({"mode": "async", "variant": "frozen", "layerwise": True}, {"mode": "bounded", "variant": "tied"}),
            *({"mode": "async", "rounds": 2, "kept": "all"}, {"mode": "bounded", "stale_layers": 6}),
            *({"mode": "sync", "kept": "half"}, {"mode": "bounded", "kept": "all", "stale_layers": 3}),
        ]
    )
    steps, layers, micro_batches = itertools.cycle((1, 0, 2)), itertools.cycle(range(LAYERS)), itertools.cycle(range(4))
    for late in rounds_of_table:
        for site in (*IN_LAYERS, *IN_DEVICES, *IN_OPTIMIZER):
            fault = Fault(site, next(errors), devices=next(devices), partition=next(partitions), **next(modes))
            if (fault.mode == "bounded" and fault.partition == ONE) or site in ONCE_A_STAGE:
                fault = replace(fault, partition=FINEST)
            before_fused = LAYERS - PARTITIONS[fault.partition].fused
            fault = replace(fault, stale_layers=min(fault.stale_layers, before_fused))
            if site in OF_KEPT:
                fault = replace(fault, kept="all", partition=FINEST, stale_layers=min(fault.stale_layers, 3))
            hit = 1 if site == "an allocation" else 9 if late else 2
            if site in IN_LAYERS:
                if site in ("forward", "recompute") and fault.partition == ONE:
                    fault = replace(fault, partition=BACKWARD)
                split = LAYERS - PARTITIONS[fault.partition].fused
                layer = next(layers) % split if site in ("forward", "recompute") else max(next(layers), 1)
                # A recorded forward has to be computed with the layer's kept names; a stale one begins anew.
                where = ("validation" if site == "validation" else next(steps), next(micro_batches))
                yield replace(fault, place=(site, layer, *where))
            else:
                yield replace(fault, place=site, hit=hit)


NAMED = [
    Fault(Stream.ACTIVATION_DOWNLOAD, RuntimeError, 9, "async", 3, kept="all", stays=True),  # a device that is lost
    Fault(Stream.COMPUTE, RuntimeError, 40, "bounded", 2, stale_layers=3, stays=True),
    Fault("update_", PlantedError, 3, "bounded", 2, variant="tied", stays=True),  # a second try that fails too
    Fault("update_", PlantedError, 3, "predict", 2, stays=True),
    Fault("update_", PlantedError, 13, "predict", 2),  # the last of a step
    Fault("one buffer", MemoryError, 2, "bounded", 2, stale_layers=6),  # in the middle of the delayed copies
    Fault("caller", PlantedError, 1, "async", 3, kept="all"),
    Fault("caller", PlantedError, 2, "bounded", 2, stale_layers=3),
    Fault("caller", PlantedError, 3, "predict", 1),
    Fault(("validation", 3, "validation", 1), PlantedError, 1, "predict", 2),
]
DELAYS = [
    Fault(Stream.ACTIVATION_DOWNLOAD, None, 0, "async", 8, kept="all"),
    Fault(Stream.WEIGHT_UPLOAD, None, 0, "bounded", 3, stale_layers=3),
    Fault("an update", None, 0, "async", 5, rounds=2),
    Fault("a part", None, 0, "sync", 3, kept="mixed"),
    Fault(("has", LANDED), None, 0, "predict", 2),
]
FAULTS = [*all_faults([False]), *NAMED]
MORE_FAULTS = list(all_faults([True, False, True, True]))[len(FAULTS) - len(NAMED) :]


class ArmedLayer(nn.Module):
    def __init__(self, inner, index, bomb):
        super().__init__()
        self.inner, self.index, self.bomb = inner, index, bomb
        if hasattr(inner, "up"):
            inner.up.register_forward_hook(lambda *_: bomb("a part"))

    def forward(self, hidden, micro_batch):
        where = WHERE[micro_batch.tokens.numpy().tobytes()]
        if not torch.is_grad_enabled():
            self.bomb(("validation" if where[0] == "validation" else "forward", self.index, *where))
            return self.inner(hidden, micro_batch)
        self.bomb(("recompute", self.index, *where))
        return Tripwire.apply(self.inner(hidden, micro_batch), self.bomb, self.index, where)

    def init_weights(self, generator):
        self.inner.init_weights(generator)

    def work(self, *sizes):
        return self.inner.work(*sizes)


class Tripwire(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, bomb, index, where):
        ctx.site = bomb, index, where
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        bomb, index, where = ctx.site
        bomb(("backward", index, *where))
        return gradient, None, None, None


def armed_model(variant, bomb):
    model = toy_model(tied=variant == "tied")
    if variant == "frozen":  # as with adapters, some layers train nothing and one trains a part
        for index in (1, 4):
            model.layers[index].requires_grad_(False)
        model.layers[3].up.requires_grad_(False)
    return LayeredModel(model.names, tuple(ArmedLayer(layer, i, bomb) for i, layer in enumerate(model.layers)))


def engine_of(fault, store, bomb, **options):
    kept = KEPT[fault.kept] if fault.kept else ()
    # A layer whose forward read older weights must be computed anew.
    kept = tuple(() if layer < fault.stale_layers else names for layer, names in enumerate(kept))
    options = {"rounds": fault.rounds, "stale_layers": fault.stale_layers, "kept": kept, **options}
    options |= {"layerwise_recompute": fault.layerwise, **armed(bomb)}
    model = armed_model(fault.variant, bomb)
    return toy_engine(PARTITIONS[fault.partition], fault.devices, model=model, store=store, **options)


def store_of(fault, **options):
    optimizer = make_optimizer(toy.OPTIMIZER)
    return toy_store(armed_model(fault.variant, Bomb(None)), mode=MODES[fault.mode], optimizer=optimizer, **options)


def whole_state(store):
    newest = store.trained if store.mode.predicts else ()
    return copied(store) | {f"newest/{bundle.index}": bundle.version(store.step).clone() for bundle in newest}


@cache
def undisturbed(variant, mode, rounds, stale_layers):
    alone = Fault(None, None, mode=mode, devices=1, variant=variant, rounds=rounds, stale_layers=stale_layers)
    store = store_of(alone)
    with engine_of(alone, store, Bomb(None)) as engine:
        states, others, losses = [whole_state(store)], [dict(store.resume_state())], []
        for batch in BATCHES:
            losses += train(engine, [batch])
            states.append(whole_state(store))
            others.append(dict(store.resume_state()))
    return states, others, losses


def expected(fault):
    return undisturbed(fault.variant, fault.mode, fault.rounds, fault.stale_layers)


def run(fault, store, bomb):
    with pytest.MonkeyPatch.context() as patch:
        before(patch, host_store, "update_", bomb)
        with engine_of(fault, store, bomb) as engine:
            results = []
            for step, batch in enumerate(BATCHES):
                results.append(engine.forward_backward(batch))
                engine.step(1e-2)
                if fault.site == "validation" and step == 1:
                    with engine.true_device_weights():
                        engine.evaluate(VALIDATION).loss()
                bomb("caller")
            engine.drain()
            return [result.loss() for result in results]


@pytest.mark.parametrize("fault", [*DELAYS[:2], *(pytest.param(fault, marks=nightly) for fault in DELAYS[2:])], ids=str)
def test_a_delay_changes_nothing(fault):
    states, _, losses = expected(fault)
    bomb, store = Bomb(fault.place, None), store_of(fault)
    assert run(fault, store, bomb) == losses
    assert bomb.chances > 0 and engine_threads() == []
    assert_same_state(whole_state(store), states[STEPS])


@pytest.mark.parametrize("fault", [*FAULTS, *(pytest.param(fault, marks=nightly) for fault in MORE_FAULTS)], ids=str)
def test_a_fault_is_named_and_training_continues_from_what_it_leaves(fault):
    bomb, store = Bomb(fault.place, fault.error, fault.hit, fault.stays), store_of(fault)
    with pytest.raises(BaseException) as raised:
        run(fault, store, bomb)
    assert bomb.raised is not None, f"the bomb has not gone off; instead: {raised.value!r}"
    check_named(fault, bomb, raised.value)
    if fault.mode != "bounded" and fault.place not in MAY_MIX and not (fault.place == "update_" and fault.stays):
        assert store.is_consistent and store.step in possible_steps(fault)
    elif fault.place in ("an update", "update_") or (fault.place == ("has", UPLOADED) and not fault.stale_layers):
        assert store.is_consistent is not fault.stays  # the second try completes it
    check_continues(fault, store)


def check_named(fault, bomb, error):
    if fault.place == "caller":  # in the caller's own code, which is no part of the pipeline
        assert error is bomb.raised
        return
    assert type(error) is PipelineError and error.__cause__ is bomb.raised, repr(error)
    location = error.location
    assert str(location) in str(error) and fault.error.__name__ in str(error)
    if fault.site == "validation":
        assert (location.stage, location.micro_batch) == ("forward", fault.place[3])
    elif fault.site in IN_LAYERS:
        assert location == expected_location(fault)
    elif bomb.device or fault.site in IN_DEVICES:
        assert location.actor == f"device {bomb.device}" if bomb.device else location.actor.startswith("device cpu:")
    else:
        assert location.actor == "optimizer worker"


def expected_location(fault):
    """Return the location of a fault in a layer: slot `i` of the run is on device `i mod N` (RoundPipe section 3.2)."""
    partition, (site, layer, step, micro_batch) = PARTITIONS[fault.partition], fault.place
    split = LAYERS - partition.fused
    ends = list(itertools.accumulate(partition.forward))
    starts_back = [split - done for done in itertools.accumulate(partition.backward)]
    if site == "forward":
        kind, position = "forward", next(i for i, end in enumerate(ends) if layer < end)
        span = range(ends[position] - partition.forward[position], ends[position])
    elif layer >= split:
        kind, position, span = "fused", len(ends), range(split, LAYERS)
    else:
        back = next(i for i, start in enumerate(starts_back) if layer >= start)
        kind, position = "backward", len(ends) + 1 + back
        span = range(starts_back[back], starts_back[back] + partition.backward[back])
    stages = len(partition.forward) + 1 + len(partition.backward)
    slot = (step * fault.rounds + micro_batch * fault.rounds // MICRO_BATCHES) * stages + position
    names = tuple(toy_model().names[index] for index in span)
    return FaultLocation(f"device cpu:{slot % fault.devices}", kind, names, micro_batch)


def possible_steps(fault):
    """Return how many updates may be in the store: those that the failed pass needed, and in async one more or less."""
    if fault.site == "validation":
        return [2]  # it reads the newest weights
    if fault.site in IN_LAYERS:
        step = fault.place[2]
        return [step] if fault.mode == "sync" else [max(step - 1, 0), step]
    return range(1 if fault.place in ("an update", "update_") else 0, STEPS + 1)


def check_continues(fault, store):
    states, others, losses = expected(fault)
    assert engine_threads() == []
    again = replace(fault, devices=fault.devices % 3 + 1, partition=FORWARD, kept="one part" if fault.kept else "")
    if fault.mode == "bounded":
        again = replace(again, kept="")
    if not store.is_consistent:
        with pytest.raises(EngineUsageError, match="mixes two weight versions"):
            engine_of(fault, store, Bomb(None))
        saved = max(store.step - 1, 0)
        store = store_of(fault, seed=1)
        views = store.loadable_views()
        for name, value in states[saved].items():
            if not name.startswith("newest/"):
                views[name].copy_(value)
        store.resume(saved, **others[saved])
    left = store.step
    state = whole_state(store)
    assert_same_state(state, {name: states[left][name] for name in state})
    with engine_of(again, store, Bomb(None)) as engine:
        assert train(engine, BATCHES[left:]) == losses[left:]
    assert_same_state(whole_state(store), states[STEPS])


# Hangs, and faults beside a run.


def test_a_hand_over_to_a_delayed_copy_that_never_comes_is_a_hang_that_names_it(monkeypatch, planted, over):
    """`tests/engine/test_watchdog.py` loses each of the others."""
    fault = Fault(None, None, mode="bounded", stale_layers=4)
    store = store_of(fault)
    with monkeypatch.context() as patch:
        lose(patch, planted, lambda key: kind_of(key) == UPLOADED and key.task.step == 1)
        engine = engine_of(fault, store, Bomb(None), hang_timeout_s=0.4)
        with pytest.raises(HangError, match="to read the device weights"):
            train(engine, BATCHES)
    check_continues(fault, store)


@pytest.mark.parametrize(
    ("mode", "stale_layers", "read"),
    [("predict", 0, 0), ("bounded", 4, 5), *(pytest.param(mode, 0, 5, marks=nightly) for mode in ("async", "bounded"))],
)
def test_a_save_that_fails_beside_training_changes_nothing(mode, stale_layers, read):
    """Delayed copies and updates wait for the save, and continue as soon as it has failed."""

    def failing(source):
        for name in list(source.tensors)[:read]:
            source.finished_reading(name)
        raise PlantedError("the disk")

    fault = Fault(None, None, mode=mode, devices=3, stale_layers=stale_layers, kept="mixed")
    store = store_of(fault)
    with engine_of(fault, store, Bomb(None)) as engine:
        losses = train(engine, BATCHES[:1])
        pending = engine.save(failing)
        losses += train(engine, BATCHES[1:])
        with pytest.raises(PlantedError, match="the disk"):
            pending.result()
    states, _, wanted = expected(fault)
    assert losses == wanted
    assert_same_state(whole_state(store), states[STEPS])
