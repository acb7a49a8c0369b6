"""Shares of several machines: together they are one machine's step, and owners are balanced."""

import itertools

import pytest

from torchround.pipeline.machine_shares import assign_owners, step_share
from torchround.pipeline.partition import PlanError, split_evenly


@pytest.mark.parametrize(("num_machines", "rounds"), [(1, 3), (2, 2), (3, 1), (4, 3)])
def test_machines_together_run_the_rounds_of_one_machine(num_machines, rounds):
    for count in range(1, 30):
        shares = [step_share(count, rounds, machine, num_machines) for machine in range(num_machines)]
        total = min(num_machines * rounds, count)
        expected = dict(enumerate(split_evenly(count, total)))
        found = {}
        for share in shares:
            assert share.total_rounds == total and share.total_micro_batches == count
            # The engine cuts a machine's own micro-batches into its own rounds.
            cuts = split_evenly(len(share.micro_batches), len(share.rounds)) if share.rounds else []
            for local, (round_index, cut) in enumerate(zip(share.rounds, cuts, strict=True)):
                assert round_index == local * num_machines + share.machine
                found[round_index] = tuple(share.micro_batches[index] for index in cut)
        assert found == {index: tuple(cut) for index, cut in expected.items()}


def test_a_machine_may_have_nothing_to_compute_and_impossible_shares_are_refused():
    share = step_share(2, 2, machine=3, num_machines=4)
    assert share.micro_batches == share.rounds == () and share.total_rounds == 2
    for arguments in ((0, 1, 0, 1), (4, 0, 0, 1), (4, 1, 2, 2)):
        with pytest.raises(PlanError, match="no share of"):
            step_share(*arguments)


def test_owners_are_balanced_by_size_and_ties_go_to_the_lower_rank():
    assert assign_owners([10, 10, 10, 10], 2) == (0, 1, 0, 1)
    assert assign_owners([1, 2, 9, 3], 2) == (1, 1, 0, 1)
    assert assign_owners([5, 5], 4) == (0, 1)
    for sizes in itertools.product((1, 4, 7), repeat=6):
        owners = assign_owners(sizes, 3)
        loads = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == m) for m in range(3)]
        assert max(loads) - min(loads) <= max(sizes)
