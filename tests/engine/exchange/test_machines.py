"""Training on several machines gives, bit for bit, what one machine with as many rounds in all gives."""

import pytest

from tests.support.shared_steps import Case, assert_equal_to_one_machine
from tests.support.toy import toy_batches

BATCHES = toy_batches(3, micro_batches=8)


@pytest.mark.parametrize("num_machines", [2, 3, 4])
def test_sync_training_equals_one_machine(num_machines):
    assert_equal_to_one_machine(Case(BATCHES), num_machines)
