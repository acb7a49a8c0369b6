"""The race checker finds nothing in any mode, and finds a race once one wait of a device orders nothing.

A recorded run is judged by what was synchronised, so these verdicts do not depend on timing.
"""

from dataclasses import replace

import pytest
import torch

from tests.support import toy
from tests.support.faults import Unordered
from tests.support.optimizers import OPTIMIZERS, POLICIES
from tests.support.torch_loop import MAKERS
from tests.support.toy import KEPT, PARTITIONS, ToyHead, linked, toy_batches, toy_engine, toy_model, toy_store
from torchround.checkpoint import Checkpointer
from torchround.engine.passes import UPDATED
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC
from torchround.engine.watch.race_checker import AccessLog, Entry, Region, find_races
from torchround.layer import LayeredModel
from torchround.optim import NO_STATE, HostOptimizer, make_optimizer

pytestmark = pytest.mark.filterwarnings("ignore::torchround.optim.SlowerOptimizerWarning")

BFLOAT16 = torch.bfloat16
ONE, FINEST, FORWARD, BACKWARD = PARTITIONS


def record(
    folder,
    partition=BACKWARD,
    devices=3,
    policy=SYNC,
    optimizer="adamw",
    fault=None,
    passes=False,
    tied=False,
    dtype=torch.float32,
    steps=3,
    calls=1,
    frozen=(),
    **options,
):
    """Return the log of a short run, and its store. If `poisoned`, no gradient is finite and every update is skipped."""
    log, model = AccessLog(), passing_model() if passes else toy_model(tied)
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
    with toy_engine(PARTITIONS[partition], devices, model=model, store=store, **options) as engine:
        for step, micro_batches in enumerate(toy_batches(steps, micro_batches=4 * calls)):
            if flags["evaluates"] and step == 1:
                engine.evaluate(micro_batches)  # not awaited, so that it runs beside the next step
            for call in range(calls):
                result = engine.forward_backward(micro_batches[4 * call : 4 * call + 4])
            engine.step(None if is_host else 1e-2)
            if flags["saves"]:
                checkpoints = Checkpointer(folder)
                engine.save(lambda s, to=checkpoints: to.save(s.step, s.tensors, s.state, s)).may_publish()
            if flags["evaluates"] and step == 1:
                result.update()  # first: asking for the evaluation's loss would order the two
            if flags["true_weights"]:
                # Neither is awaited, so that their uploads may run when the weights are replaced.
                engine.evaluate(micro_batches)
                with engine.true_device_weights():
                    engine.evaluate(micro_batches)
        engine.drain()
    assert sum(entry.action == "access" for entry in log.entries) > 100
    return log.entries, store


def races(folder, **run):
    return find_races(record(folder, **run)[0])


class PassingBlock(toy.ToyBlock):
    def forward(self, hidden, micro_batch):
        return super().forward(hidden[0], micro_batch), hidden[1]


class TwoTensorEmbedding(toy.ToyEmbedding):
    def forward(self, hidden, micro_batch):
        embedded = super().forward(hidden, micro_batch)
        return embedded, embedded.detach() * 0.5


class TwoTensorHead(ToyHead):
    def forward(self, hidden, micro_batch):
        return super().forward(hidden[0] + hidden[1], micro_batch)


def passing_model():
    """Return a toy model whose blocks pass a part of their input on, so that what they send lies in a ring slot."""
    blocks = [PassingBlock() for _ in range(toy.BLOCKS)]
    return LayeredModel(toy_model().names, (TwoTensorEmbedding(), *blocks, TwoTensorHead(None)))


def kept_above(layers):
    return tuple(() if layer < layers else names for layer, names in enumerate(KEPT["all"]))


OPTIMIZER = "torchround optimizer"
LAGGING = {"policy": BOUNDED, "stale_layers": 5}


def run(flags="", **options):
    """Return the options of `record`, of which the flags are True."""
    return dict.fromkeys(flags.split(), True) | options


RUNS = [
    run("evaluates saves", partition=ONE, devices=8),
    run("evaluates tied", partition=ONE, devices=8, policy=ASYNC, optimizer="muon", rounds=2),
    run("evaluates tied saves", partition=FINEST, devices=8, rounds=2),
    run("poisoned evaluates saves", partition=FORWARD, policy=ASYNC),
    run("tied saves", partition=FORWARD, devices=2, optimizer="adamw compact", dtype=BFLOAT16),
    run(partition=FORWARD, policy=ASYNC, steps=4),
    run("evaluates saves tied", devices=2, policy=ASYNC_PREDICT),
    run(devices=8, frozen=(0, 2, 3), rounds=2),
    run("evaluates saves", optimizer="muon compact", dtype=BFLOAT16),
    run("poisoned", devices=1, policy=ASYNC, optimizer="muon", dtype=BFLOAT16),
    # Micro-batches of the next round or step find buffers and slots that kept activations have left.
    run(partition=FINEST, devices=1, kept=KEPT["mixed"], rounds=2, policy=ASYNC),
    # Gradients leave early at every stage, and device weights that lag are written between two kinds of uploads.
    run("tied saves", policy=BOUNDED, stale_layers=0, devices=1, dtype=BFLOAT16),
    run("evaluates", policy=BOUNDED, stale_layers=1, partition=FINEST, optimizer="adamw compact"),
    run("layerwise_recompute saves", policy=BOUNDED, stale_layers=3, devices=8),
    run(policy=BOUNDED, stale_layers=2, partition=FORWARD, kept=kept_above(2)),
    # The first backward stage shows whether the input of a layer that begins anew stays until its backward has read it.
    run(**LAGGING, partition=FORWARD, devices=2, steps=2),
    run("tied true_weights", **LAGGING),
    run("tied true_weights", policy=ASYNC_PREDICT, devices=1),
    # The first call of a step may be dispatched before the update that it waits for has begun.
    run("evaluates", calls=2, devices=1),
    run("saves", calls=2, policy=ASYNC_PREDICT, dtype=BFLOAT16, partition=FINEST, devices=2),
    run("saves", optimizer="PyTorch's", calls=2),
    run("saves", optimizer="PyTorch's", partition=FORWARD, policy=ASYNC, steps=4),
    # What these blocks send lies in a slot that the next upload but one overwrites.
    run("passes", partition=FINEST, devices=1),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_there_is_no_race(tmp_path, run):
    assert races(tmp_path, **run) == []


@pytest.mark.nightly
@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("options", [{"evaluates": True}, {"kept": KEPT["mixed"], "rounds": 2}], ids=str)
def test_there_is_no_race_for_any_partition_and_device_count(tmp_path, options, devices, partition, policy):
    assert races(tmp_path, partition=partition, devices=devices, policy=policy, **options) == []


@pytest.mark.nightly
@pytest.mark.parametrize("run", [{"saves": True}, {"policy": ASYNC, "steps": 4}], ids=["sync", "async"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_there_is_no_race_with_any_optimizer(tmp_path, optimizer, run):
    assert races(tmp_path, partition=FORWARD, optimizer=optimizer, dtype=BFLOAT16, **run) == []


def updates_apart(entries):
    """Yield the entries as if each step's update ran on a thread of its own. One thread orders its own updates."""
    step = 0
    for entry in entries:
        yield replace(entry, actor=f"update {step}") if entry.actor == OPTIMIZER else entry
        step += getattr(entry.token, "kind", None) == UPDATED and entry.action == "signal"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_rule_5_updates_of_a_layer_follow_each_other(tmp_path, optimizer):
    """Skipped updates, which carry the weights over, follow each other by this rule alone: others by rules 3 and 4."""
    entries, _ = record(tmp_path, FORWARD, policy=ASYNC, optimizer=optimizer, poisoned=True)
    assert find_races(updates_apart(entries)) == []


# Places of a device that order nothing, with what shows it.
KEEPS = {"kept": KEPT["all"], "steps": 2}
PLACES = {
    ("an uploaded input", "no wait"): KEEPS,
    ("an uploaded input", "empty event"): KEEPS,
    ("inputs that are read", "empty event"): KEEPS,
    ("a free slot to pack into", "no wait"): KEEPS,
    ("packed tensors", "no wait"): KEEPS,
    ("a free slot for an input", "no wait"): {"steps": 2},
    ("an input in host memory", "no wait"): {"steps": 2},
    ("inputs that are read", "stale event"): {"partition": FINEST, "devices": 1, "passes": True},
    ("a free slot for weights", "no wait"): {"partition": FINEST, "devices": 1},
    ("a free slot for gradients", "no wait"): {"partition": FINEST, "devices": 1},
    ("final gradients", "no wait"): {"partition": ONE, "devices": 1, "steps": 2},
    ("final gradients", "stale event"): {"partition": ONE, "devices": 1, "steps": 2},
    ("a landed gradient", "stale event"): {"partition": ONE, "devices": 1},
}


@pytest.mark.parametrize("place", PLACES, ids=", ".join)
def test_each_wait_of_a_device_orders_something(tmp_path, place):
    fault = Unordered(*place)
    assert races(tmp_path, fault=fault, **PLACES[place]) != []
    assert fault.times > 0


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[pytest.mark.nightly] * (policy is not SYNC and name != "adamw compact"))
        for name in OPTIMIZERS
        for policy in POLICIES[name]
    ],
    ids=str,
)
def test_the_checker_is_told_of_every_buffer_that_an_update_changes(tmp_path, name, policy):
    """Otherwise a race on a buffer, such as one of scales, could not be found."""
    entries, store = record(tmp_path, optimizer=name, policy=policy, dtype=BFLOAT16, steps=2)
    told = {region for entry in entries if entry.actor == OPTIMIZER for region in entry.writes}
    for bundle in store.trained:
        changed = [*bundle.state(), *bundle.device_weights]
        assert len(changed) >= len(bundle.device_weights) + 2
        for own in map(Region.of, changed):
            assert any(found.allocation == own.allocation and found.covers(own) for found in told), bundle


def access(actor, start, stop, writes=True):
    region = (Region(0, start, stop),)
    return Entry(actor, "access", writes=region) if writes else Entry(actor, "access", reads=region)


LOGS = {
    "unordered overlap": (1, [access("a", 0, 8), access("b", 4, 12, False)]),
    "disjoint bytes": (0, [access("a", 0, 8), access("b", 8, 12, False)]),
    "two reads": (0, [access("a", 0, 8, False), access("b", 0, 8, False)]),
    "ordered through a third actor": (
        0,
        [
            access("a", 0, 8),
            Entry("a", "signal", 1),
            Entry("c", "wait", 1),
            Entry("c", "signal", 2),
            Entry("b", "wait", 2),
            access("b", 0, 8),
        ],
    ),
    "signal before the write": (
        1,
        [Entry("a", "signal", 1), access("a", 0, 8), Entry("b", "wait", 1), access("b", 0, 8, False)],
    ),
    "one of two writers heard of": (
        1,
        [
            access("a", 0, 4),
            access("b", 4, 8),
            Entry("a", "signal", 1),
            Entry("c", "wait", 1),
            access("c", 0, 8, False),
        ],
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_checker_itself_on_hand_written_logs(name):
    count, entries = LOGS[name]
    assert len(find_races(entries)) == count
