"""A fault on one of several machines: all engines end, each names the machine at fault, and no thread is left."""

import re
import threading

import pytest
from torch import Tensor

from tests.support.machines import run_machines
from tests.support.shared_steps import train_shared
from tests.support.toy import PARTITIONS, ToyBlock, toy_batches, toy_engine, toy_model, toy_store
from torchround.engine.engine import Engine
from torchround.engine.errors import EngineUsageError, HangError, PipelineError
from torchround.engine.exchange.start import share_weights
from torchround.engine.store.bundles import BOUNDED
from torchround.engine.store.ownership import Ownership
from torchround.layer import LayeredModel, MicroBatch
from torchround.machines.group import MachineGroup
from torchround.pipeline.machine_shares import step_share

BATCHES = toy_batches(4, micro_batches=4)
BAD_TOKEN = -7  # a label; only the broken layer looks at it


class BrokenBlock(ToyBlock):
    def forward(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        if (micro_batch.positions == BAD_TOKEN).any():
            raise RuntimeError("planted")
        return super().forward(hidden, micro_batch)


def broken_model() -> LayeredModel:
    model = toy_model()
    layers = list(model.layers)
    layers[3] = BrokenBlock()
    return LayeredModel(model.names, tuple(layers))


def engine_of(group: MachineGroup, model: LayeredModel | None = None, **settings) -> Engine:
    model = model or toy_model()
    store = toy_store(model, ownership=Ownership(group.rank, group.size))
    share_weights(store, group)
    return toy_engine(model, store, PARTITIONS["forward coarser"], 2, machines=group, **settings)


def assert_ended(engine: Engine) -> None:
    assert not [thread.name for thread in engine._life._threads if thread.is_alive()]


def test_a_fault_of_one_machine_ends_all_and_names_it():
    batches = [[part for part in batch] for batch in BATCHES]
    bad = batches[2][2]  # of machine 1 of 2, in the third step
    batches[2][2] = MicroBatch(bad.tokens, bad.labels, bad.positions * 0 + BAD_TOKEN, bad.document_ids)

    def run(group: MachineGroup) -> str:
        engine = engine_of(group, broken_model())
        with pytest.raises(PipelineError) as raised, engine:
            train_shared(engine, batches, group.rank, group.size)
        assert_ended(engine)
        return str(raised.value)

    healthy, broken = run_machines(2, run)
    where = r"device cpu:\d, forward stage \(block.2 .. block.4\), micro-batch 0: RuntimeError: planted"
    assert re.fullmatch(where, broken)
    assert re.match(rf"machine 1 \(node1\): has failed: {where}", healthy)


def test_an_engine_that_is_left_in_the_middle_of_a_step_ends_the_others():
    class Leaves(Exception):
        pass

    def run(group: MachineGroup) -> str:
        engine = engine_of(group)
        with pytest.raises((PipelineError, Leaves)) as raised, engine:
            if group.rank == 1:
                train_shared(engine, BATCHES[:1], group.rank, group.size)
                share = step_share(4, 1, 1, 2)
                # Once the loss of all machines is there, no thread of this one waits for another machine.
                engine.forward_backward([BATCHES[1][m] for m in share.micro_batches], share, 1).loss()
                raise Leaves
            train_shared(engine, BATCHES, group.rank, group.size)
        assert_ended(engine)
        return str(raised.value)

    assert run_machines(2, run)[0].startswith("machine 1 (node1): has failed: it stopped in the middle of a step")


def test_a_machine_that_lives_but_does_not_move_is_named_by_the_one_that_waits():
    """Machine 1 never begins the second step. Machine 0 ends after its hang time-out, and machine 1 with it."""
    ended = threading.Event()

    def run(group: MachineGroup) -> str:
        engine = engine_of(group, hang_timeout_s=1.0 if group.rank == 0 else 60.0)
        with pytest.raises(PipelineError) as raised, engine:
            train_shared(engine, BATCHES[: 2 - group.rank], group.rank, group.size)
            ended.wait(60.0)
            train_shared(engine, BATCHES[1:2], group.rank, group.size)
        ended.set()
        assert_ended(engine)
        assert isinstance(raised.value, HangError) is (group.rank == 0)
        return str(raised.value)

    waiting, idle = run_machines(2, run)
    assert re.search(
        r"torchround optimizer: waits for part \d+ of step 1's gradient of \S+ from machine 1 \(node1\)", waiting
    )
    assert idle.startswith("machine 0 (node0): has failed: controller: nothing moved for 1 s")


def test_what_several_machines_cannot_do_is_refused():
    def run(group: MachineGroup) -> None:
        model = toy_model()
        ownership = Ownership(group.rank, group.size)
        for store, message in [
            (toy_store(model, policy=BOUNDED, ownership=ownership), "bounded updates run on one machine"),
            (toy_store(model), "the host store is of machine 0 of 1, this is machine"),
        ]:
            with pytest.raises(EngineUsageError, match=message):
                toy_engine(model, store, PARTITIONS["one stage"], 1, machines=group)
        with engine_of(group) as engine:
            share = step_share(4, 1, group.rank, group.size)
            for arguments, message in [
                ((BATCHES[0],), "needs the share of each step"),
                ((BATCHES[0], share), "the share has 2 micro-batches, but 4 were given"),
                ((BATCHES[0], step_share(4, 1, 0, 3)), "the share is of machine 0 of 3"),
            ]:
                with pytest.raises(EngineUsageError, match=message):
                    engine.forward_backward(*arguments)

    run_machines(2, run)
