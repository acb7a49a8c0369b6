"""A validation on several machines, each of which evaluates its share, against the same one on one machine."""

import pytest
import torch

from tests.support.agreeing_threads import run_agreeing
from tests.support.toy import PARTITIONS, VOCABULARY, toy_engine, toy_model, toy_store
from torchround.config import ValidationTable
from torchround.data import DataError
from torchround.layer import IGNORED_LABEL, MicroBatch
from torchround.run.validation import RunValidation

TABLE = ValidationTable(interval_steps=1)


def batch(sequences, seed):
    """Make a batch of sequences of 8 tokens, some of them without a label."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCABULARY, (2, sequences, 8), generator=generator)
    labels[torch.rand(sequences, 8, generator=generator) < 0.4] = IGNORED_LABEL
    positions = torch.arange(8).repeat(sequences, 1)
    return MicroBatch(tokens, labels, positions, torch.zeros_like(tokens))


# The last batch has fewer micro-batches than there are machines.
BATCHES = [batch(11, 0), batch(11, 1), batch(11, 2), batch(3, 3)]


def loss_on(num_machines, batches, size=2):
    def work(machine, gather):
        agree = gather if num_machines > 1 else None
        model = toy_model()
        with toy_engine(model, toy_store(model), PARTITIONS["forward coarser"], 1) as engine:
            return RunValidation(TABLE, batches, size, agree, machine, num_machines).loss(engine)

    return run_agreeing(num_machines, work)


def test_the_loss_on_several_machines_is_the_loss_on_one_to_the_last_bit():
    (whole,) = loss_on(1, BATCHES)
    assert whole is not None
    assert loss_on(2, BATCHES) == [whole] * 2
    assert loss_on(3, BATCHES) == [whole] * 3


def test_batches_without_labels_have_no_loss_on_any_machine():
    bare = batch(4, 0)
    bare.labels.fill_(IGNORED_LABEL)
    assert loss_on(2, [bare, bare]) == [None, None]


class FailingBatches:
    """Batches of which the second raises an error on one machine."""

    def __init__(self, error):
        self._error = error

    def __iter__(self):
        yield BATCHES[0]
        if self._error is not None:
            raise DataError(self._error)
        yield BATCHES[1]


def test_an_error_on_one_machine_is_raised_on_all_with_its_name():
    def work(machine, gather):
        model = toy_model()
        batches = FailingBatches("x.jsonl: cannot be read" if machine == 1 else None)
        with (
            toy_engine(model, toy_store(model), PARTITIONS["forward coarser"], 1) as engine,
            pytest.raises(DataError) as caught,
        ):
            RunValidation(TABLE, batches, 2, gather, machine, 3, names=["a", "b", "c"]).loss(engine)
        return str(caught.value)

    assert run_agreeing(3, work) == ["b: x.jsonl: cannot be read"] * 3


def test_other_validation_data_on_one_machine_are_noticed():
    def work(machine, gather):
        model = toy_model()
        with toy_engine(model, toy_store(model), PARTITIONS["forward coarser"], 1) as engine:
            RunValidation(TABLE, BATCHES[machine : machine + 2], 2, gather, machine, 2).loss(engine)

    with pytest.raises(DataError, match="machine 1 reads other batches than machine 0"):
        run_agreeing(2, work)
