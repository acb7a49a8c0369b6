"""Steps that are left out: each machine decides alike, from the figures of all."""

from dataclasses import replace

import pytest
import torch

from tests.support.engine_rows import Row, assert_same
from tests.support.toy import VOCABULARY, toy_batches


@pytest.mark.parametrize("update", ["sync", "async"])
def test_a_step_whose_loss_is_not_finite(update):
    """The embedding of one token is not a number, and only one machine meets the token, in the second step."""
    bad = VOCABULARY - 1
    batches = [
        [replace(part, tokens=part.tokens.masked_fill(part.tokens == bad, 0)) for part in batch]
        for batch in toy_batches(4, micro_batches=6)
    ]
    batches[1][4].tokens[0, 0] = bad

    def break_one_row(store):
        filling = store.filling()
        if "embedding.weight" in filling:  # on its owner
            with filling["embedding.weight"] as weight:
                weight[bad].fill_(torch.nan)
            store.refresh_device_weights()

    row = Row(2, 3, "forward", update, batches=batches, before=break_one_row)
    found = row.run_all()
    assert_same(found, row.alone().run())
    assert found.skipped == [False, True, False, False] and found.updates[1].not_finite == (4,)
