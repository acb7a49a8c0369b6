"""The race checker finds nothing in any mode, and finds a race once one ordering rule or one wait orders nothing.

A recorded run is judged by what was synchronised, so these verdicts do not depend on timing.
"""

from dataclasses import replace

import pytest
import torch

from tests.support.faults import DeafLog, Unordered
from tests.support.optimizers import OPTIMIZERS, POLICIES
from tests.support.torch_loop import MAKERS
from tests.support.toy import (
    BLOCKS,
    KEPT,
    PARTITIONS,
    ToyBlock,
    ToyEmbedding,
    ToyHead,
    linked,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
)
from torchround.engine.ordering import (
    DIRECTION_LANDED,
    GRADIENT_CONSUMED,
    GRADIENT_LANDED,
    LOOK_AHEAD,
    READ_BY_SAVE,
    UPLOADED,
    WEIGHTS,
)
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC
from torchround.engine.update_report import UPDATED
from torchround.engine.watch.race_checker import AccessLog, Entry, Region, find_races
from torchround.layer import LayeredModel
from torchround.optim import NO_STATE, HostOptimizer, make_optimizer

pytestmark = pytest.mark.filterwarnings("ignore::torchround.optim.SlowerOptimizerWarning")

BFLOAT16 = torch.bfloat16
ONE, FINEST, FORWARD, BACKWARD = PARTITIONS
OPTIMIZER = "torchround optimizer"


def record(
    partition=BACKWARD,
    devices=3,
    policy=SYNC,
    optimizer="adamw",
    log=None,
    fault=None,
    model=None,
    tied=False,
    dtype=torch.float32,
    steps=3,
    calls=1,
    frozen=(),
    **options,
):
    """Return the log of a short run, and its store. If `poisoned`, no gradient is finite and every update is skipped."""
    log, model = log or AccessLog(), model or toy_model(tied)
    flags = {name: options.pop(name, False) for name in ("evaluates", "saves", "poisoned", "true_weights")}
    for layer in frozen:
        model.layers[layer].requires_grad_(False)
    is_host, table = optimizer == "PyTorch's", OPTIMIZERS.get(optimizer)
    store = toy_store(model, dtype, policy=policy, optimizer=NO_STATE if is_host else make_optimizer(table))
    if flags["poisoned"]:
        for device_weight in store.bundles[1].device_weights:
            device_weight.fill_(torch.inf)

    def wrap(device):
        device.watchers += [log, *([fault] if fault else [])]
        return linked(device)

    options |= {"observer": log, "wrap": wrap, "accumulates": calls > 1}
    options["optimizer"] = HostOptimizer(MAKERS["sgd"]) if is_host else table
    with toy_engine(model, store, PARTITIONS[partition], devices, **options) as engine:
        for step, micro_batches in enumerate(toy_batches(steps, micro_batches=4 * calls)):
            if flags["evaluates"] and step == 1:
                engine.evaluate(micro_batches)  # not awaited, so that it runs beside the next step
            for call in range(calls):
                result = engine.forward_backward(micro_batches[4 * call : 4 * call + 4])
            engine.step(None if is_host else 1e-2)
            if flags["saves"]:
                engine.save(lambda source: read_all(source, log))
            if flags["evaluates"] and step == 1:
                result.update()  # first: asking for the evaluation's loss would order the two
            if flags["true_weights"]:
                # Neither is awaited, so that their uploads may run when the weights are replaced.
                engine.evaluate(micro_batches)
                with engine.true_device_weights():
                    engine.evaluate(micro_batches)
        engine.drain()
    assert sum(entry.action == "access" for entry in log.entries) > 100
    return log, store


def read_all(source, log):
    """Read everything that a checkpoint holds, as a writer of files does."""
    for name, tensor in source.tensors.items():
        log.touched([tensor], [])
        source.finished_reading(name)


def races(**run):
    return find_races(record(**run)[0].entries)


class PassingBlock(ToyBlock):
    def forward(self, hidden, micro_batch):
        return super().forward(hidden[0], micro_batch), hidden[1]


class TwoTensorEmbedding(ToyEmbedding):
    def forward(self, hidden, micro_batch):
        embedded = super().forward(hidden, micro_batch)
        return embedded, embedded.detach() * 0.5


class TwoTensorHead(ToyHead):
    def forward(self, hidden, micro_batch):
        return super().forward(hidden[0] + hidden[1], micro_batch)


def passing_model():
    """Return a toy model whose blocks pass a part of their input on, so that what they send lies in a ring slot."""
    blocks = [PassingBlock() for _ in range(BLOCKS)]
    return LayeredModel(toy_model().names, (TwoTensorEmbedding(), *blocks, TwoTensorHead(None)))


def kept_above(layers):
    return tuple(() if layer < layers else names for layer, names in enumerate(KEPT["all"]))


LAGGING = {"policy": BOUNDED, "stale_layers": 5}
CLEAN = [
    {"partition": ONE, "devices": 1, "evaluates": True, "saves": True},
    {
        "partition": ONE,
        "devices": 8,
        "policy": ASYNC,
        "optimizer": "muon",
        "evaluates": True,
        "tied": True,
        "rounds": 2,
    },
    {"partition": FINEST, "devices": 2, "policy": ASYNC, "evaluates": True, "dtype": BFLOAT16},
    {"partition": FINEST, "devices": 8, "evaluates": True, "tied": True, "rounds": 2, "saves": True},
    {"partition": FORWARD, "devices": 3, "policy": ASYNC, "poisoned": True, "evaluates": True, "saves": True},
    {"partition": FORWARD, "devices": 2, "optimizer": "adamw compact", "dtype": BFLOAT16, "tied": True, "saves": True},
    {"devices": 2, "policy": ASYNC_PREDICT, "evaluates": True, "saves": True, "tied": True},
    {"policy": ASYNC_PREDICT, "optimizer": "adamw compact", "dtype": BFLOAT16, "rounds": 2, "evaluates": True},
    {"devices": 8, "frozen": (0, 2, 3), "rounds": 2},
    {"devices": 1, "policy": ASYNC, "dtype": BFLOAT16, "layerwise_recompute": True, "rounds": 4},
    {"devices": 3, "optimizer": "muon compact", "dtype": BFLOAT16, "evaluates": True, "saves": True},
    {"devices": 1, "policy": ASYNC, "optimizer": "muon", "dtype": BFLOAT16, "poisoned": True},
    # Micro-batches of the next round or step find buffers and slots that kept activations have left.
    {"kept": KEPT["all"], "rounds": 2, "evaluates": True},
    {"partition": FINEST, "devices": 1, "kept": KEPT["mixed"], "rounds": 2, "policy": ASYNC},
    {"partition": FINEST, "kept": KEPT["half"], "policy": ASYNC_PREDICT, "evaluates": True},
    # Gradients leave early at every stage, and device weights that lag are written between two kinds of uploads.
    {"policy": BOUNDED, "stale_layers": 0, "devices": 1, "tied": True, "dtype": BFLOAT16, "saves": True},
    {"policy": BOUNDED, "stale_layers": 1, "partition": FINEST, "evaluates": True, "optimizer": "adamw compact"},
    {"policy": BOUNDED, "stale_layers": 3, "devices": 8, "layerwise_recompute": True, "saves": True},
    {"policy": BOUNDED, "stale_layers": 3, "partition": FINEST, "poisoned": True, "evaluates": True},
    {"policy": BOUNDED, "stale_layers": 2, "partition": FORWARD, "kept": kept_above(2)},
    # The first backward stage shows whether the input of a layer that begins anew stays until its backward has read it.
    {**LAGGING, "partition": FORWARD, "devices": 2, "steps": 2},
    {**LAGGING, "tied": True, "true_weights": True},
    {"policy": ASYNC_PREDICT, "devices": 1, "tied": True, "true_weights": True},
    # The first call of a step may be dispatched before the update that it waits for has begun.
    {"calls": 2, "devices": 1, "evaluates": True},
    {"calls": 2, "partition": FORWARD},
    {"calls": 2, "policy": ASYNC, "tied": True, "rounds": 2, "evaluates": True},
    {"calls": 2, "policy": ASYNC_PREDICT, "dtype": BFLOAT16, "partition": FINEST, "devices": 2, "saves": True},
    {"optimizer": "PyTorch's", "calls": 2, "saves": True},
    {"optimizer": "PyTorch's", "partition": FORWARD, "policy": ASYNC, "evaluates": True, "saves": True},
    {"optimizer": "PyTorch's", "partition": ONE, "policy": ASYNC, "calls": 2, "evaluates": True},
    # What these blocks send lies in a slot that the next upload but one overwrites.
    {"partition": FINEST, "devices": 1, "model": "passing"},
    {"partition": FORWARD, "devices": 1, "model": "passing"},
]


@pytest.mark.parametrize("run", CLEAN, ids=str)
def test_there_is_no_race(run):
    run = {**run, "model": passing_model() if "model" in run else None}
    assert races(**run) == []


@pytest.mark.nightly
@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("options", [{"evaluates": True}, {"kept": KEPT["mixed"], "rounds": 2}], ids=str)
def test_there_is_no_race_for_any_partition_and_device_count(options, devices, partition, policy):
    assert races(partition=partition, devices=devices, policy=policy, **options) == []


# By rule: whose waits for what order nothing, and a run that needs them. Directions of matrices order an update after all
# that their devices did before. So rule 1 shows with more devices than there are blocks.
READERS, DEVICES = (UPLOADED, "uploads finished"), "torchround cpu"
RULES = {
    "1": (READERS, OPTIMIZER, {"partition": ONE, "devices": 8, "evaluates": True}),
    "1, device weights that lag": (READERS, OPTIMIZER, LAGGING),
    "1, weights that are rewritten": ((UPLOADED, READ_BY_SAVE), "MainThread", {**LAGGING, "true_weights": True}),
    "1, predictions that are rewritten": (UPLOADED, "MainThread", {"policy": ASYNC_PREDICT, "true_weights": True}),
    "2": (WEIGHTS, DEVICES, {"partition": FORWARD}),
    "2, device weights that lag": (WEIGHTS, DEVICES, LAGGING),
    "2, several calls": (WEIGHTS, DEVICES, {"partition": FORWARD, "calls": 2}),
    "3": (GRADIENT_LANDED, OPTIMIZER, {"partition": FORWARD}),
    "3, several calls": (GRADIENT_LANDED, OPTIMIZER, {"partition": FORWARD, "calls": 2}),
    # Rule 2 implies it in sync; in async the next step's backward overtakes the update.
    "4": (GRADIENT_CONSUMED, DEVICES, {"partition": FORWARD, "policy": ASYNC, "steps": 4}),
    "6, saves of sync": (READ_BY_SAVE, OPTIMIZER, {"saves": True}),
    "6, saves of async": (READ_BY_SAVE, OPTIMIZER, {"saves": True, "policy": ASYNC}),
    "9": (LOOK_AHEAD, DEVICES, {"optimizer": "muon"}),
    "10": (DIRECTION_LANDED, OPTIMIZER, {"optimizer": "muon", "policy": ASYNC}),
}

for _rule in ("1", "2", "3", "4", "6, saves of sync"):
    _kinds, _threads, _run = RULES[_rule]
    RULES[f"{_rule}, an optimizer of PyTorch"] = (_kinds, _threads, {**_run, "optimizer": "PyTorch's"})


def deaf(kinds, threads):
    return DeafLog(*(kinds if isinstance(kinds, tuple) else (kinds,)), threads=threads)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule):
    kinds, threads, run = RULES[rule]
    log = deaf(kinds, threads)
    assert races(log=log, **run) != []
    assert log.times > 0


@pytest.mark.nightly
@pytest.mark.parametrize("rule", [rule for rule in RULES if "optimizer" not in RULES[rule][2] and "," not in rule])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_rule_is_needed_with_every_optimizer(optimizer, rule):
    kinds, threads, run = RULES[rule]
    run = {"optimizer": optimizer, "dtype": BFLOAT16, **run}
    assert races(**run) == []
    assert races(log=deaf(kinds, threads), **run) != []


def updates_apart(entries):
    """Yield the entries as if each step's update ran on a thread of its own. One thread orders its own updates."""
    step = 0
    for entry in entries:
        yield replace(entry, actor=f"update {step}") if entry.actor == OPTIMIZER else entry
        step += getattr(entry.token, "kind", None) is UPDATED and entry.action == "signal"


@pytest.mark.parametrize("rule_holds", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rule_5_updates_of_a_layer_follow_each_other(optimizer, rule_holds):
    """Skipped updates, which carry the weights over, follow each other by this rule alone: others by rules 3 and 4."""
    log = AccessLog() if rule_holds else DeafLog(WEIGHTS, threads=OPTIMIZER)
    record(FORWARD, policy=ASYNC, optimizer=optimizer, poisoned=True, log=log)
    assert bool(find_races(updates_apart(log.entries))) is not rule_holds


# Places of a device that order nothing, with what shows it.
KEEPS = {"kept": KEPT["all"], "steps": 2}
PLACES = {
    ("uploaded kept activations", "no wait"): KEEPS,
    ("uploaded kept activations", "empty event"): KEEPS,
    ("a free slot for kept activations", "no wait"): KEEPS,
    ("kept activations in host memory", "no wait"): KEEPS,
    ("kept activations that are read", "empty event"): KEEPS,
    ("a free slot to pack into", "no wait"): KEEPS,
    ("packed tensors", "no wait"): KEEPS,
    ("a free slot for an input", "no wait"): {"steps": 2},
    ("an input in host memory", "no wait"): {"steps": 2},
    ("inputs that are read", "stale event"): {"partition": FINEST, "devices": 1, "model": "passing"},
    ("a free slot for weights", "no wait"): {"partition": FINEST, "devices": 1},
    ("a free slot for gradients", "no wait"): {"partition": FINEST, "devices": 1},
    ("final gradients", "no wait"): {"partition": ONE, "devices": 1, "steps": 2},
    ("final gradients", "stale event"): {"partition": ONE, "devices": 1, "steps": 2},
    ("a landed gradient", "stale event"): {"partition": ONE, "devices": 1},
}


@pytest.mark.parametrize("place", PLACES, ids=", ".join)
def test_each_wait_of_a_device_orders_something(place):
    fault, run = Unordered(*place), dict(PLACES[place])
    if run.get("model"):
        run["model"] = passing_model()
    assert races(fault=fault, **run) != []
    assert fault.times > 0


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=() if policy is SYNC or policy is BOUNDED else pytest.mark.nightly)
        for name in OPTIMIZERS
        for policy in POLICIES[name]
    ],
    ids=str,
)
def test_the_checker_is_told_of_every_buffer_that_an_update_changes(name, policy):
    """Otherwise a race on a buffer, such as one of scales, could not be found."""
    log, store = record(optimizer=name, policy=policy, dtype=BFLOAT16, steps=2)
    told = {region for entry in log.entries if entry.actor == OPTIMIZER for region in entry.writes}
    for bundle in store.trained:
        changed = [*bundle.state(), *bundle.device_weights]
        assert len(changed) >= len(bundle.device_weights) + 2
        for own in map(Region.of, changed):
            assert any(found.allocation == own.allocation and found.covers(own) for found in told), bundle


def reads(actor, start, stop):
    return Entry(actor, "access", reads=(Region(0, start, stop),))


def writes(actor, start, stop):
    return Entry(actor, "access", writes=(Region(0, start, stop),))


def signal(actor, token):
    return Entry(actor, "signal", token)


def wait(actor, token):
    return Entry(actor, "wait", token)


LOGS = {
    "unordered overlap": (1, [writes("a", 0, 8), reads("b", 4, 12)]),
    "disjoint bytes": (0, [writes("a", 0, 8), reads("b", 8, 12)]),
    "two reads": (0, [reads("a", 0, 8), reads("b", 0, 8)]),
    "ordered through a third actor": (
        0,
        [writes("a", 0, 8), signal("a", 1), wait("c", 1), signal("c", 2), wait("b", 2), writes("b", 0, 8)],
    ),
    "signal before the write": (1, [signal("a", 1), writes("a", 0, 8), wait("b", 1), reads("b", 0, 8)]),
    "one of two writers heard of": (
        1,
        [writes("a", 0, 4), writes("b", 4, 8), signal("a", 1), wait("c", 1), reads("c", 0, 8)],
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_checker_itself_on_hand_written_logs(name):
    count, entries = LOGS[name]
    assert len(find_races(entries)) == count
