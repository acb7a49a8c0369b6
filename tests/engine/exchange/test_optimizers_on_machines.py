"""Every optimizer and state format on several machines: the bits of one machine, and no race on any."""

import pytest
import torch

from tests.engine.exchange.test_machine_races import races
from tests.support.optimizers import OPTIMIZERS, POLICIES
from tests.support.shared_steps import Case, assert_equal_to_one_machine
from tests.support.toy import PARTITIONS, toy_batches, toy_model
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, BOUNDED, SYNC

UNEVEN = [batch[:count] for batch, count in zip(toy_batches(4, 8), (7, 2, 5, 8), strict=True)]
NAMES = [
    pytest.param(name, marks=() if name in ("adamw compact", "muon") else pytest.mark.slow)
    for name in OPTIMIZERS
]
MODES = [(name, policy) for name in OPTIMIZERS for policy in POLICIES[name] if policy is not BOUNDED]


def label(value):
    return value.name + "-predict" * value.predicts if hasattr(value, "predicts") else None


def case(name, policy, **options):
    return Case(
        UNEVEN,
        lambda: toy_model(tied=True),
        PARTITIONS["backward coarser"],
        dtype=torch.bfloat16,
        optimizer=OPTIMIZERS[name],
        store={"policy": policy},
        **options,
    )


@pytest.mark.parametrize("num_machines", [2, 3])
@pytest.mark.parametrize(("name", "policy"), MODES, ids=label)
def test_machines_give_the_bits_of_one(name, policy, num_machines):
    found = assert_equal_to_one_machine(case(name, policy, rounds=num_machines - 1), num_machines)
    if not policy.predicts:
        assert any(key.startswith("residual/") for key in found[0].views), "the weights are not split"
    if name.startswith("muon"):
        matrices = [{key for key in machine.views if key.startswith("momentum_buffer/")} for machine in found]
        assert all(matrices), "a machine owns no matrix"


@pytest.mark.parametrize("name", NAMES)
def test_no_race_on_any_machine(name):
    assert races(case(name, ASYNC, num_devices=2, evaluates=True), 2) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", ["before_overwriting_sent", "_before_landing"])
def test_rules_7_and_8_are_needed(monkeypatch, name, rule):
    monkeypatch.setattr(Ordering, rule, lambda *_: ())
    found = []
    for policy in (SYNC, ASYNC):
        found += races(case(name, policy, evaluates=True), 3)
    assert found != []
