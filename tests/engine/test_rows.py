"""Each row of the table of engine runs has the losses, norms and state of the reference loop, bit for bit."""

import itertools
import random

import pytest

from tests.support.engine_rows import AXES, BUGS, LINES, REFUSED, ROWS, Row, assert_same, read_row
from tests.support.machines import run_machines
from torchround.engine.errors import EngineUsageError

REFUSALS = {
    frozenset([(axis, value), (other, its)]): word
    for axis, values, other, others, word in REFUSED
    for value in values.split()
    for its in others.split()
}
SLOW = {"compiled": pytest.mark.compiles}


def params(rows):
    return [pytest.param(row, id=name) for name, row in rows.items()]


@pytest.mark.filterwarnings("ignore::torchround.optim.SlowerOptimizerWarning")
@pytest.mark.parametrize("row", params({n: row for n, row in (ROWS | BUGS).items() if row.compiled == "no"}))
def test_each_row_has_the_bits_of_the_reference(row):
    expected = row.reference()
    assert_same(row.run_all(), expected)
    assert expected.skipped == [row.dtype == "fp16"] * 2 + [False] * 2
    assert len(set(expected.norms[2:])) == 2
