"""Each use of memory is declared by its task, no run has a race, and what is not declared or orders nothing is found.

A recorded run is judged by what was synchronised, so these verdicts do not depend on timing. Each machine is judged by itself.
"""

from dataclasses import replace

import pytest
import torch

from tests.engine.test_packed_weights import ROWS as PACKED_ROWS
from tests.support import toy
from tests.support.engine_rows import Row, validate_true_weights
from tests.support.faults import Unordered
from tests.support.machines import run_machines
from tests.support.planting import DeclaredLog, declared
from tests.support.race_checker import Entry, Region, find_races, tasks_apart
from tests.support.toy import ToyHead, linked, toy_batches, toy_model
from torchround.engine.errors import PipelineError
from torchround.engine.program import Program
from torchround.engine.tasks import DECISION, DIRECTION, GRADIENT, PART, RECORDS, STATE, WEIGHTS, Buffer
from torchround.layer import LayeredModel

# Three steps: with async updates the third reads the weights of the first update.
UNEVEN = [batch[:count] for batch, count in zip(toy_batches(3, 4), (3, 1, 2), strict=True)]


def logs_of(row, dropped=None, fault=None):
    logs = []

    def run(group=None):
        own = DeclaredLog()
        logs.append(own)

        def before(store):
            row.before(store)
            own.watch(store)

        def wrap(device):
            device.watchers += [own, *([fault] if fault else [])]
            return linked(device)

        replace(row, before=before).run(group, observer=own, wrap=wrap)
        assert sum(entry.action == "access" for entry in own.entries) > 100

    with declared(dropped):
        try:
            run() if row.machines == 1 else run_machines(row.machines, run)
        except PipelineError:
            assert dropped or fault
            for log in logs:
                log.failed = True
    return logs


def save(engine):
    def read(source):
        for name, tensor in source.tensors.items():
            source.reading(tensor)
            source.finished_reading(name)

    engine.save(read).may_publish()
    return []


def poison(store):
    """Let no gradient be finite, so that every update is skipped."""
    for device_weights in store.bundles[1].device_weights:
        device_weights.fill_(torch.inf)


def frozen_model():
    model = toy_model()
    for layer in (0, 2, 3):
        model.layers[layer].requires_grad_(False)
    return model


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


def run(devices, cut, update="sync", flags="", **options):
    flags = dict.fromkeys(flags.split(), True)
    flags |= {"after_step": save} if flags.pop("saves", False) else {}
    return Row(devices, 1, cut, update, **{"batches": UNEVEN} | flags | options)


def machines(count, update, **options):
    return Row(2, count, "forward", update, **{"batches": UNEVEN, "evaluates": True} | options)


def tied(count, update, **options):
    usual = {"devices": 2, "cut": "backward", "dtype": "bf16", "batches": UNEVEN, "evaluates": True}
    return Row(machines=count, update=update, tied=True, **usual | options)


TRUE, LAYER = {"after_step": validate_true_weights, "tied": True}, {"clip": "layer"}
RUNS = {
    "sync": run(8, "one", "sync", "evaluates saves"),
    "async, muon": run(8, "one", "async", "evaluates tied", optimizer="muon", rounds=2),
    "sync, tied": run(8, "each", "sync", "evaluates tied saves", rounds=2),
    "async, skipped": run(3, "forward", "async", "evaluates saves", before=poison),
    "adamw8": run(2, "forward", "sync", "tied saves", optimizer="adamw8", dtype="bf16"),
    "async": run(3, "forward", "async"),
    "predict": run(2, "backward", "predict", "evaluates tied saves"),
    "frozen": run(8, "backward", rounds=2, build=frozen_model),
    "muon8": run(3, "backward", "sync", "evaluates saves", optimizer="muon8", dtype="bf16"),
    "muon, skipped": run(1, "backward", "async", optimizer="muon", dtype="bf16", before=poison),
    # Micro-batches of the next round or step find buffers and slots that kept activations have left.
    "kept": run(1, "each", "async", kept="upper", rounds=2),
    # Gradients leave early at every stage, and device weights that lag are written between two kinds of uploads.
    "bounded": run(1, "backward", "bounded", "tied saves", dtype="bf16", **LAYER),
    "one stale": run(3, "each", "stale", "evaluates", stale=1, optimizer="adamw8", **LAYER),
    "stale": run(8, "backward", "stale", "saves", recompute="layer", **LAYER),
    "stale, kept": run(3, "forward", "stale", kept="upper", **LAYER),
    # The first backward stage shows whether the input of a layer that begins anew stays until its backward has read it.
    "all stale": run(2, "forward", "stale", stale=5, **LAYER),
    "true weights of stale layers": run(3, "backward", "stale", stale=5, **LAYER, **TRUE),
    "true weights": run(1, "backward", "predict", **TRUE),
    # The first call of a step may be dispatched before the update that it waits for has begun.
    "calls": run(1, "backward", "sync", "evaluates", calls=2),
    "calls, predict": run(2, "each", "predict", "saves", calls=2, dtype="bf16"),
    "torch, calls": run(3, "backward", "sync", "saves", optimizer="torch", calls=2),
    "torch": run(3, "forward", "async", "saves", optimizer="torch"),
    # What these blocks send lies in a slot that the next upload but one overwrites.
    "passes": run(1, "each", build=passing_model),
    # Experts come up in the compute stream, while the weights of the next stage come up beside them.
    "experts by need": replace(PACKED_ROWS["nf4, experts by need"], batches=UNEVEN[:2]),
    "machines": machines(3, "sync"),
    "machines, async": machines(2, "async"),
    "machines, tied": tied(2, "sync", rounds=2, devices=3),
    "machines, muon": tied(2, "async", optimizer="muon8"),
    "machines, predict": tied(2, "predict", rounds=2, devices=3),
    "machines, skipped": machines(2, "async", before=poison, evaluates=False),
    "machines, true weights": tied(2, "predict", after_step=validate_true_weights),
    "machines, stale": tied(2, "stale", rounds=2, after_step=validate_true_weights, **LAYER),
    "machines, stale, calls": tied(2, "stale", calls=2, **LAYER),
}
# Every kind of access that a task declares: the task, the memory and what it does with it, and a run that shows it if dropped.
ACCESSES = {
    ("stage", WEIGHTS, "reads"): "sync",
    ("stage", GRADIENT, "writes"): "sync",
    ("stage", PART, "writes"): "bounded",
    ("the sum", PART, "reads"): "async, muon",
    ("the sum", GRADIENT, "writes"): "async, muon",
    ("the norm", GRADIENT, "reads"): "sync",
    ("the norm", STATE, "reads"): "async, muon",
    ("the norm", DIRECTION, "writes"): "async, muon",
    ("directions", DIRECTION, "writes"): "async, muon",
    ("the decision", DIRECTION, "reads"): "async, muon",
    ("the decision", DECISION, "writes"): "machines",
    ("the decision", RECORDS, "writes"): "sync",
    ("the update", GRADIENT, "reads"): "sync",
    ("the update", DIRECTION, "reads"): "async, muon",
    ("the update", STATE, "writes"): "stale",
    ("the update", WEIGHTS, "reads"): "async, skipped",
    ("the update", WEIGHTS, "writes"): "sync",
    ("the stale device weights", STATE, "reads"): "all stale",
    ("the stale device weights", WEIGHTS, "writes"): "all stale",
    ("the optimizer", GRADIENT, "writes"): "torch",
    ("the optimizer", STATE, "writes"): "torch",
    ("the optimizer", RECORDS, "writes"): "torch",
    ("the end", RECORDS, "writes"): "sync",
    ("the save", RECORDS, "reads"): "sync",
    ("the save", STATE, "reads"): "stale",
    ("the save", WEIGHTS, "reads"): "stale",
    ("the rewriting of device weights", STATE, "reads"): "true weights",
    ("the rewriting of device weights", WEIGHTS, "writes"): "true weights of stale layers",
    ("the rewriting of device weights", GRADIENT, "writes"): "true weights of stale layers",
    ("the sending of gradients", PART, "reads"): "machines",
    ("the sending of weights", DECISION, "reads"): "machines",
    ("the sending of weights", WEIGHTS, "reads"): "machines",
    ("the receiving of weights", DECISION, "reads"): "machines",
    ("the receiving of weights", WEIGHTS, "reads"): "machines, skipped",
    ("the receiving of weights", WEIGHTS, "writes"): "machines",
}
# These only declare a use: other accesses of the same tasks order them too, or a call that waits for all steps.
IMPLIED = {
    ("the norm", STATE, "reads"),
    ("the update", WEIGHTS, "reads"),
    ("the rewriting of device weights", STATE, "reads"),
    ("the rewriting of device weights", GRADIENT, "writes"),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_use_of_memory_is_declared_and_there_is_no_race(name):
    """A task's declared accesses alone order it with those before it, also of its own thread."""
    for log in logs_of(RUNS[name]):
        assert log.undeclared == set()
        assert find_races(tasks_apart(log.entries)) == []
        assert log.kinds <= ACCESSES.keys()


@pytest.mark.parametrize("access", ACCESSES, ids=", ".join)
def test_an_access_that_is_not_declared_is_found(access):
    """Each use is seen to lack its declaration. Without the wait the run fails or has a race, unless others imply it."""
    logs = logs_of(replace(RUNS[ACCESSES[access]], batches=UNEVEN[:2]), dropped=access)
    assert any(log.undeclared for log in logs)
    races = (find_races(tasks_apart(log.entries)) for log in logs)
    assert access in IMPLIED or access[1] == DECISION or any(log.failed for log in logs) or any(races)


def test_parts_share_the_places_in_which_they_land(monkeypatch):
    landing, own = Program._landing, {}

    def apart(program, bundle, use):  # the same memory, as if no two bundles shared it
        place = landing(program, bundle, use)
        return own.setdefault((id(program), bundle.index, use), Buffer(PART, content=place.content))

    monkeypatch.setattr(Program, "_landing", apart)
    assert any(find_races(log.entries) for log in logs_of(RUNS["machines"]))


# Places of a device that order nothing, with what shows it.
TWO_STEPS = run(3, "backward", batches=toy_batches(2, 4))
KEEPS = replace(TWO_STEPS, kept="all")
SMALL, WHOLE = run(1, "each"), run(1, "one", batches=toy_batches(2, 4))
PLACES = {
    ("an uploaded input", "no wait"): KEEPS,
    ("an uploaded input", "empty event"): KEEPS,
    ("inputs that are read", "empty event"): KEEPS,
    ("a free slot to pack into", "no wait"): KEEPS,
    ("packed tensors", "no wait"): KEEPS,
    ("a free slot for an input", "no wait"): TWO_STEPS,
    ("an input in host memory", "no wait"): TWO_STEPS,
    ("inputs that are read", "stale event"): RUNS["passes"],
    ("a free slot for weights", "no wait"): SMALL,
    ("a free slot for gradients", "no wait"): SMALL,
    ("final gradients", "no wait"): WHOLE,
    ("final gradients", "stale event"): WHOLE,
    ("a landed gradient", "stale event"): WHOLE,
}


@pytest.mark.parametrize("place", PLACES, ids=", ".join)
def test_each_wait_of_a_device_orders_something(place):
    fault = Unordered(*place)
    [log] = logs_of(PLACES[place], fault=fault)
    assert find_races(log.entries) != []
    assert fault.times > 0


@pytest.mark.nightly
@pytest.mark.parametrize("update", ["sync", "async"])
@pytest.mark.parametrize("cut", ["one", "each", "forward", "backward"])
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("options", [{"evaluates": True}, {"kept": "upper", "rounds": 2}], ids=str)
def test_there_is_no_race_for_any_cut_and_device_count(options, devices, cut, update):
    [log] = logs_of(Row(devices, cut=cut, update=update, **options))
    assert find_races(tasks_apart(log.entries)) == []


WRITTEN = [(name, update) for name in ("adamw", "adamw8") for update in ("sync", "async", "predict", "bounded")]
WRITTEN += [(optimizer, update) for optimizer in ("muon", "muon8") for update in ("sync", "async")]


@pytest.mark.parametrize(
    ("optimizer", "update"),
    [pytest.param(*row, marks=[pytest.mark.nightly] * (row[1] != "sync" and row[0] != "adamw8")) for row in WRITTEN],
)
def test_the_checker_is_told_of_every_buffer_that_an_update_changes(optimizer, update):
    """Otherwise a race on a buffer, such as one of scales, could not be found."""
    clip = "layer" if update == "bounded" else "global"
    [log] = logs_of(run(3, "backward", update, optimizer=optimizer, dtype="bf16", clip=clip))
    told = {region for entry in log.entries if entry.actor == "torchround optimizer" for region in entry.writes}
    for bundle in log.store.trained:
        changed = [*bundle.state(), *bundle.device_weights]
        assert len(changed) >= len(bundle.device_weights) + 2
        for own in map(Region.of, changed):
            assert any(found.allocation == own.allocation and found.covers(own) for found in told), bundle


def access(actor, start, stop, writes=True):
    region = (Region(0, start, stop),)
    return Entry(actor, "access", writes=region) if writes else Entry(actor, "access", reads=region)


def heard(by, actor, token):
    return Entry(actor, "signal", token), Entry(by, "wait", token)


LOGS = {
    "unordered overlap": (1, [access("a", 0, 8), access("b", 4, 12, False)]),
    "disjoint bytes": (0, [access("a", 0, 8), access("b", 8, 12, False)]),
    "two reads": (0, [access("a", 0, 8, False), access("b", 0, 8, False)]),
    "ordered through a third actor": (
        0,
        [access("a", 0, 8), *heard("c", "a", 1), *heard("b", "c", 2), access("b", 0, 8)],
    ),
    "signal before the write": (
        1,
        [Entry("a", "signal", 1), access("a", 0, 8), Entry("b", "wait", 1), access("b", 0, 8, False)],
    ),
    "one of two writers heard of": (
        1,
        [access("a", 0, 4), access("b", 4, 8), *heard("c", "a", 1), access("c", 0, 8, False)],
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_checker_itself_on_hand_written_logs(name):
    count, entries = LOGS[name]
    assert len(find_races(entries)) == count
