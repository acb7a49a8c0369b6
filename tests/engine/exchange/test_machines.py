"""Steps that are left out: each machine decides alike, from the figures of all."""

from dataclasses import replace

import pytest
import torch

from tests.support.engine_rows import LR, STEPS, Row, assert_same, validate_true_weights
from tests.support.machines import run_machines
from tests.support.toy import VOCABULARY, planted_model, toy_batches, toy_model
from torchround.engine.exchange import share_weights
from torchround.engine.store.bundles import Ownership
from torchround.planning.machine_shares import step_share


@pytest.mark.parametrize("update", ["sync", "async", "bounded"])
def test_a_step_whose_loss_is_not_finite(update):
    """The embedding of one token is not a number, and only one machine meets the token, in the second step."""
    bad = VOCABULARY - 1
    batches = [
        [replace(part, tokens=part.tokens.masked_fill(part.tokens == bad, 0)) for part in batch]
        for batch in toy_batches(3, micro_batches=5)
    ]
    batches[1][4].tokens[0] = bad

    def break_one_row(store):
        if "embedding.weight" in store.weights():  # on its owner
            with store.writing() as weights, weights["embedding.weight"] as weight:
                weight[bad].fill_(torch.nan)

    row = Row(2, 3, "forward", update, clip="layer", batches=batches, before=break_one_row)
    found = row.run_all()
    assert_same(found, row.alone().run())
    assert found.skipped == [False, True, False] and found.updates[1].not_finite == (4,)


def breaking(hidden, micro_batch):
    passed = hidden * 1.0
    if passed.requires_grad and torch.equal(micro_batch.tokens, STEPS[1][0].tokens):
        passed.register_hook(lambda gradient: gradient * torch.inf)
    return passed


def test_bounded_updates_leave_out_the_same_layers_on_all_machines():
    row = Row(2, 2, "each", "bounded", clip="layer", tied=True, build=lambda: planted_model(breaking))
    found = row.run_all()
    assert_same(found, row.reference())
    assert [bool(update.left_out) for update in found.updates] == [False, True, False]
    assert [update.left_out for update in found.updates] == [u.left_out for u in row.alone().run().updates]


def test_true_weights_of_stale_layers_are_those_of_their_owners():
    """With one micro-batch a step, two machines compute what one computes."""
    steps = [batch[:1] for batch in STEPS]
    row = Row(2, 2, "each", "stale", clip="layer", dtype="bf16", batches=steps, after_step=validate_true_weights)
    assert_same(row.run_all(), replace(row, machines=1).run())


def test_a_call_can_be_waited_for_before_its_step_although_gradients_share_the_memory_that_they_land_in():
    row = Row(1, 2, "each", "bounded", clip="layer")

    def run(group):
        store = row.store(toy_model(), ownership=Ownership(group.rank, group.size))
        share_weights(store, group)
        losses = []
        with row.engine(toy_model(), store, row.table, machines=group, hang_timeout_s=60.0) as engine:
            for batch in STEPS:
                share = step_share(len(batch), 1, group.rank, group.size)
                labels = sum(micro_batch.num_labels() for micro_batch in batch)
                result = engine.forward_backward([batch[index] for index in share.micro_batches], share, labels)
                result.reports()
                losses.append(result.loss())
                engine.step(LR)
        return losses

    assert run_machines(2, run) == [row.reference().losses] * 2
