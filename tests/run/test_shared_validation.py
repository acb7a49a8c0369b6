"""A validation on several machines, each of which evaluates its share, against the same one on one machine."""

from types import SimpleNamespace

import torch

from tests.support.joint_teams import run_agreeing
from tests.support.toy import PARTITIONS, VOCABULARY, toy_engine, toy_model
from torchround.config import ValidationTable
from torchround.data import DataError
from torchround.layer import IGNORED_LABEL, MicroBatch
from torchround.run.validation import RunValidation

TABLE = ValidationTable(interval_steps=1)


def batch(sequences, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCABULARY, (2, sequences, 8), generator=generator)
    labels[torch.rand(sequences, 8, generator=generator) < 0.4] = IGNORED_LABEL
    positions = torch.arange(8).repeat(sequences, 1)
    return MicroBatch(tokens, labels, positions, torch.zeros_like(tokens))


# The last batch has fewer micro-batches than there are machines.
BATCHES = [batch(11, 0), batch(11, 1), batch(11, 2), batch(3, 3)]


def loss_on(num_machines, batches_of, size=2, names=()):
    def work(machine, gather):
        called = names or [f"machine {rank}" for rank in range(num_machines)]
        agree = lambda channel, value, what: gather(value)
        machines = SimpleNamespace(agree=agree, rank=machine, size=num_machines, names=called)
        with toy_engine(PARTITIONS["forward coarser"], 1, model=toy_model()) as engine:
            validation = RunValidation(TABLE, batches_of(machine), size, machines)
            try:
                return validation.loss(engine)
            except DataError as error:
                return str(error)

    return run_agreeing(num_machines, work)


def test_the_loss_on_several_machines_is_the_loss_on_one_to_the_last_bit():
    (whole,) = loss_on(1, lambda _: BATCHES)
    assert whole is not None
    assert loss_on(2, lambda _: BATCHES) == [whole] * 2
    assert loss_on(3, lambda _: BATCHES) == [whole] * 3


def test_batches_without_labels_have_no_loss_on_any_machine():
    bare = batch(4, 0)
    bare.labels.fill_(IGNORED_LABEL)
    assert loss_on(2, lambda _: [bare, bare]) == [None, None]


def failing_batches(machine):
    yield BATCHES[0]
    if machine == 1:
        raise DataError("x.jsonl: cannot be read")
    yield BATCHES[1]


def test_an_error_on_one_machine_is_raised_on_all_with_its_name():
    assert loss_on(3, failing_batches, names=["a", "b", "c"]) == ["b: x.jsonl: cannot be read"] * 3
