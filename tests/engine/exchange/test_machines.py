"""Training on several machines gives, bit for bit, what one machine with as many rounds in all gives."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.shared_steps import Case, assert_equal_to_one_machine
from tests.support.small_decoders import small_decoder
from tests.support.toy import PARTITIONS, VOCABULARY, toy_batches, toy_model
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT
from torchround.engine.store.host_store import HostStore
from torchround.layer import with_dropout_seeds
from torchround.optim import stability
from torchround.pipeline.partition import Partition

MACHINES = pytest.mark.parametrize("num_machines", [2, 3, 4])
BATCHES = toy_batches(3, micro_batches=8)
# Some steps leave machines without a round, or without the last one.
UNEVEN = [batch[:count] for batch, count in zip(toy_batches(6, 8), (7, 3, 1, 2, 5, 8), strict=True)]
SMALL = Partition((1, 2), 1, (1, 1, 1))  # embedding; two blocks; head, and back one by one


@MACHINES
def test_sync(num_machines):
    assert_equal_to_one_machine(Case(BATCHES), num_machines)


@MACHINES
def test_uneven_batches_of_two_rounds(num_machines):
    assert_equal_to_one_machine(Case(UNEVEN, rounds=2), num_machines)


@MACHINES
def test_async_in_bfloat16_with_tied_weights(num_machines):
    case = Case(
        UNEVEN,
        lambda: toy_model(tied=True),
        PARTITIONS["backward coarser"],
        dtype=torch.bfloat16,
        store={"policy": ASYNC},
    )
    assert_equal_to_one_machine(case, num_machines)


@MACHINES
def test_predicted_weights_clipped_by_layer(num_machines):
    case = Case(
        BATCHES,
        num_devices=1,
        dtype=torch.bfloat16,
        store={"policy": ASYNC_PREDICT, "gradient_dtype": torch.float32},
        settings={"clip": "layer"},
    )
    assert_equal_to_one_machine(case, num_machines)


experts = partial(small_decoder, "qwen3", "debug_moe")
adapters = partial(small_decoder, "llama3", "debug", ("q_proj", "v_proj"))


@pytest.mark.parametrize(("model", "num_machines"), [(experts, 2), (adapters, 3)], ids=["experts", "adapters"])
def test_experts_and_adapters_with_dropout(model, num_machines):
    seeded = [with_dropout_seeds(batch, seed=7, step=step) for step, batch in enumerate(BATCHES[:2])]
    assert_equal_to_one_machine(Case(seeded, model, SMALL, dtype=torch.bfloat16), num_machines)


# Steps that are left out: each machine decides alike, from the figures of all.


@pytest.mark.parametrize("policy", [{}, {"policy": ASYNC}], ids=["sync", "async"])
def test_a_step_whose_loss_is_not_finite(policy):
    """The embedding of one token is not a number, and only one machine meets the token, in the second step."""
    bad = VOCABULARY - 1
    batches = [
        [replace(part, tokens=part.tokens.masked_fill(part.tokens == bad, 0)) for part in batch]
        for batch in toy_batches(4, micro_batches=6)
    ]
    batches[1][4].tokens[0, 0] = bad

    def break_one_row(store: HostStore) -> None:
        with store.filling()["embedding.weight"] as weight:
            weight[bad].fill_(torch.nan)
        store.refresh_device_weights()

    found = assert_equal_to_one_machine(Case(batches, store=policy, before=break_one_row), 3)
    assert [update.skipped for update in found[0].updates] == [False, True, False, False]
    assert found[2].updates[1].not_finite == (4,)


def test_overflows_in_float16(monkeypatch):
    monkeypatch.setattr(stability, "GROWTH_INTERVAL_STEPS", 1)
    found = assert_equal_to_one_machine(Case(toy_batches(6, micro_batches=4), dtype=torch.float16), 2)
    assert 0 < sum(update.skipped for update in found[0].updates) < 6


def test_a_spike():
    case = Case(toy_batches(6, micro_batches=4), spikes=(1.0, 3))
    found = assert_equal_to_one_machine(case, 2)
    assert 0 < sum(update.skipped for update in found[0].updates) < 6
