"""A fault on one of several machines: all engines end, each names the machine at fault, and no thread is left."""

import re
import threading
from dataclasses import replace

import pytest

from tests.support.engine_rows import STEPS, Row
from tests.support.faults import engine_threads, kind_of
from tests.support.machines import run_machines
from tests.support.toy import PARTITIONS, ToyBlock, toy_batches, toy_engine, toy_model, toy_store
from torchround.engine.board import Observer
from torchround.engine.device import CpuDevice
from torchround.engine.errors import DeviceMemoryError, EngineUsageError, HangError, PipelineError
from torchround.engine.exchange import share_weights
from torchround.engine.store.bundles import Ownership
from torchround.layer import LayeredModel, MicroBatch
from torchround.planning.machine_shares import step_share
from torchround.planning.update_modes import BOUNDED

BATCHES = toy_batches(4, micro_batches=4)
BAD_TOKEN = -7  # a label; only the broken layer looks at it
ROW = Row(2, 2, "forward", batches=BATCHES)


class BrokenBlock(ToyBlock):
    def forward(self, hidden, micro_batch):
        if (micro_batch.positions == BAD_TOKEN).any():
            raise RuntimeError("planted")
        return super().forward(hidden, micro_batch)


def broken_model():
    model = toy_model()
    layers = list(model.layers)
    layers[3] = BrokenBlock()
    return LayeredModel(model.names, tuple(layers))


def error_of(row, group, error=PipelineError, **settings):
    with pytest.raises(error) as raised:
        row.run(group, **settings)
    return raised.value


def test_a_fault_of_one_machine_ends_all_and_names_it():
    batches = [[part for part in batch] for batch in BATCHES]
    bad = batches[2][2]  # of machine 1 of 2, in the third step
    batches[2][2] = MicroBatch(bad.tokens, bad.labels, bad.positions * 0 + BAD_TOKEN, bad.document_ids)
    row = replace(ROW, batches=batches, build=broken_model)
    healthy, broken = run_machines(2, lambda group: str(error_of(row, group)))
    assert engine_threads() == []
    where = r"device cpu:\d, forward stage \(block.2 .. block.4\), micro-batch 0: RuntimeError: planted"
    assert re.fullmatch(where, broken)
    assert re.match(rf"machine 1 \(node1\): has failed: {where}", healthy)


def test_an_engine_that_is_left_in_the_middle_of_a_step_ends_the_others():
    class Leaves(Exception):
        pass

    def leave(engine):
        share = step_share(4, 1, 1, 2)
        # Once the loss of all machines is there, no thread of this one waits for another machine.
        engine.forward_backward([BATCHES[1][m] for m in share.micro_batches], share, 1).loss()
        raise Leaves

    def run(group):
        if group.rank == 0:
            return str(error_of(ROW, group))
        return error_of(replace(ROW, after_step=leave), group, Leaves)

    assert run_machines(2, run)[0].startswith("machine 1 (node1): has failed: it stopped in the middle of a step")
    assert engine_threads() == []


def test_a_machine_that_lives_but_does_not_move_is_named_by_the_one_that_waits():
    ended = threading.Event()

    def wait(engine):
        ended.wait(60.0)
        return []

    def run(group):
        if group.rank == 0:
            error = error_of(ROW, group, HangError, hang_timeout_s=1.0)
            ended.set()
        else:
            error = error_of(replace(ROW, after_step=wait), group, hang_timeout_s=60.0)
            assert not isinstance(error, HangError)
        return str(error)

    waiting, idle = run_machines(2, run)
    assert engine_threads() == []
    assert re.search(
        r"torchround optimizer: waits for part \d+ of step 1's gradient of \S+ from machine 1 \(node1\)", waiting
    )
    assert idle.startswith("machine 0 (node0): has failed: controller: nothing moved for 1 s")


def test_what_several_machines_cannot_do_is_refused():
    def run(group):
        model = toy_model()
        ownership = Ownership(group.rank, group.size)
        stale = toy_store(model, mode=BOUNDED, ownership=ownership)
        stale.set_stale_layers(2)
        for store, message in [
            (toy_store(model), "the host store is of .*num_machines=1.*, this is .*num_machines=2"),
            (stale, "device weights of 2 layers are one version old"),
        ]:
            with pytest.raises(EngineUsageError, match=message):
                toy_engine(PARTITIONS["one stage"], 1, model=model, store=store, machines=group)
        store = toy_store(model, ownership=ownership)
        with toy_engine(PARTITIONS["one stage"], 2, model=model, store=store, machines=group) as engine:
            share = step_share(4, 1, group.rank, group.size)
            with pytest.raises(EngineUsageError, match="needs the share of each step"):
                engine.forward_backward(BATCHES[0])
            for wrong, message in (
                (share, "a share of 2 micro-batches came with 4"),
                (step_share(12, 1, 0, 3), "num_machines=3"),
            ):
                with pytest.raises(EngineUsageError, match=message):
                    engine.forward_backward(BATCHES[0], wrong)

    run_machines(2, run)


def test_an_engine_that_does_not_fit_is_not_told_of_faults_of_other_machines():
    """The group would keep it, with the memory of its pool."""

    def run(group):
        model = toy_model()
        store = toy_store(model, ownership=Ownership(group.rank, group.size))
        told = []
        group.on_fault = told.append
        small = {"wrap": lambda device: CpuDevice(0, 1)}
        with pytest.raises(DeviceMemoryError):
            toy_engine(PARTITIONS["one stage"], 1, model=model, store=store, machines=group, **small)
        return told

    assert run_machines(2, run) == [[], []]


def test_a_bounded_call_without_its_step_is_drained_after_its_losses():
    """The last sums of a call wait for `step`, and other machines for these sums."""
    row = Row(1, 2, "one", "bounded", clip="layer")

    class HasLosses(Observer):
        def __init__(self):
            self.seen = threading.Event()

        def posted(self, token):
            if kind_of(token) == "the losses":
                self.seen.set()

    def run(group):
        model, observer = row.model(), HasLosses()
        store = row.store(model, ownership=Ownership(group.rank, 2))
        share_weights(store, group)
        share = step_share(len(STEPS[0]), 1, group.rank, 2)
        with row.engine(model, store, row.table, machines=group, hang_timeout_s=5.0, observer=observer) as engine:
            batch = [STEPS[0][index] for index in share.micro_batches]
            engine.forward_backward(batch, share, sum(each.num_labels() for each in STEPS[0]))
            assert observer.seen.wait(20.0)
        return store.step

    assert run_machines(2, run) == [0, 0]
