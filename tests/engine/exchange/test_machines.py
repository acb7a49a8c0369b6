"""Steps that are left out: each machine decides alike, from the figures of all."""

from dataclasses import replace

import pytest
import torch

from tests.support.shared_steps import Case, assert_equal_to_one_machine
from tests.support.toy import VOCABULARY, toy_batches
from torchround.engine.store.bundles import ASYNC


@pytest.mark.parametrize("policy", [{}, {"policy": ASYNC}], ids=["sync", "async"])
def test_a_step_whose_loss_is_not_finite(policy):
    """The embedding of one token is not a number, and only one machine meets the token, in the second step."""
    bad = VOCABULARY - 1
    batches = [
        [replace(part, tokens=part.tokens.masked_fill(part.tokens == bad, 0)) for part in batch]
        for batch in toy_batches(4, micro_batches=6)
    ]
    batches[1][4].tokens[0, 0] = bad

    def break_one_row(store):
        with store.filling()["embedding.weight"] as weight:
            weight[bad].fill_(torch.nan)
        store.refresh_device_weights()

    found = assert_equal_to_one_machine(Case(batches, store=policy, before=break_one_row), 3)
    assert [update.skipped for update in found[0].updates] == [False, True, False, False]
    assert found[2].updates[1].not_finite == (4,)
