"""Each row of the table of engine runs has the losses, norms and state of the reference loop, bit for bit."""

import itertools
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.support.engine_rows import AXES, BUGS, LINES, REFUSED, ROWS, STEPS, Row, assert_same, read_row
from tests.support.rounding import FP32, assert_states_close
from tests.support.toy import planted_model, toy_batches
from torchround.engine.errors import EngineUsageError
from torchround.optim import stability

# A compiler may add up the terms of each sum in another order. Longest path: forward and backward through all blocks, whose
# sums have the widths of the model, its feed-forward and its sequences; then four updates.
TERMS = 4 * 3 * 6 * 64


def rows_of(*compiled):
    rows = {name: row for name, row in (ROWS | BUGS).items() if row.compiled in compiled}
    # To trace a family's layers anew for each engine takes minutes.
    slow = [name for name, row in rows.items() if row.compiled == "layers" and (row.experts or row.adapters)]
    return [pytest.param(row, id=name, marks=[pytest.mark.nightly] * (name in slow)) for name, row in rows.items()]


@pytest.mark.parametrize("row", rows_of("no"))
def test_a_row_has_the_bits_of_the_reference(row):
    expected = row.reference()
    assert_same(row.run_all(), expected)
    assert (0 < sum(expected.skipped) < len(STEPS)) == (row.dtype == "fp16"), "the loss scale is too high or too low"


@pytest.mark.parametrize("row", [Row(cut="forward"), Row(3, cut="forward", update="async")], ids=["sync", "async"])
def test_a_loss_scale_that_grows_and_falls_is_that_of_a_plain_loop_after_a_resume_too(monkeypatch, row):
    monkeypatch.setattr(stability, "GROWTH_INTERVAL_STEPS", 2)
    row = replace(row, dtype="fp16", stopped=True, batches=toy_batches(12, micro_batches=3))
    expected = row.reference(growth=2)
    assert_same(row.run_all(), expected)
    assert 2 <= sum(expected.skipped) < 8 and any(after > before for before, after in pairwise(expected.scales))


def breaking(hidden, micro_batch):
    passed = hidden * 1.0
    if passed.requires_grad and torch.equal(micro_batch.tokens, STEPS[1][0].tokens):
        passed.register_hook(lambda gradient: gradient * math.inf)
    return passed


@pytest.mark.parametrize(("update", "optimizer"), [("async", "adamw8"), ("sync", "muon"), ("sync", "torch")])
def test_a_step_whose_gradient_is_not_finite_touches_no_state(update, optimizer):
    row = Row(3, 1, "each", update, optimizer, "bf16", build=lambda: planted_model(breaking))
    expected = row.reference()
    assert_same(row.run_all(), expected)
    assert expected.skipped == [False, True, False]


@pytest.mark.compiles
@pytest.mark.parametrize("row", rows_of("update"))
def test_a_compiled_update_has_the_bits_of_the_reference(row):
    assert_same(row.run_all(), row.reference())


@pytest.mark.compiles
@pytest.mark.parametrize("row", rows_of("layers"))
def test_compiled_layers_have_the_bits_of_any_other_cut_and_come_close_to_the_reference(row):
    found = row.run_all()
    assert_same(replace(row.elsewhere(), recompute="layer", link="none").run_all(), found)
    if row.dtype == "fp32" and row.optimizer == "adamw":  # otherwise a rounding may choose another code or direction
        expected = row.reference()
        assert found.losses == pytest.approx(expected.losses, rel=TERMS * FP32)
        assert_states_close(found.state, expected.state, TERMS)


# The table itself.

REFUSALS = {
    frozenset([(axis, value), (other, its)]): word
    for axis, values, other, others, word in REFUSED
    for value in values.split()
    for its in others.split()
}


def pairs_of(row):
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def legal_pairs(axes):
    each = (((a, v), (b, w)) for a, b in itertools.combinations(axes, 2) for v in axes[a] for w in axes[b])
    return {frozenset(pair) for pair in each} - REFUSALS.keys()


def cover(axes, missing, drawn):
    """Return legal rows that meet the missing pairs, each the best of forty: a pair, then values that meet most others."""
    rows, missing = [], set(missing)
    while missing:
        best = max((_row_around(axes, missing, drawn) for _ in range(40)), key=lambda row: len(pairs_of(row) & missing))
        rows.append(best)
        missing -= pairs_of(best)
    return rows


def _row_around(axes, missing, drawn):
    row = dict(drawn.choice(sorted(map(sorted, missing))))
    for axis in drawn.sample([axis for axis in axes if axis not in row], len(axes) - 2):
        new = {value: {frozenset([(axis, value), held]) for held in row.items()} for value in axes[axis]}
        legal = [value for value, pairs in new.items() if not pairs & REFUSALS.keys()]
        row[axis] = max(legal, key=lambda value: (len(new[value] & missing), drawn.random()))
    return row


def test_rows_meet_every_pair_of_values_that_the_engine_takes():
    """Without compiled rows too, which the default tier leaves out."""
    rows = [
        {axis: AXES[axis][0] if word == "." else word for axis, word in zip(AXES, line, strict=True)}
        for line in LINES[1:]
    ]
    usual = {axis: values for axis, values in AXES.items() if axis != "compiled"}
    for axes, of_rows in ((AXES, rows), (usual, [row for row in rows if row["compiled"] == "no"])):
        met = set().union(*map(pairs_of, of_rows))
        missing = legal_pairs(axes) - met
        assert not missing, f"rows to add: {cover(axes, missing, random.Random(0))}"
        assert not met & REFUSALS.keys()


@pytest.mark.parametrize(
    ("pair", "word"),
    REFUSALS.items(),
    ids=lambda value: "-".join(sorted(v for _, v in value)) if isinstance(value, frozenset) else "",
)
def test_the_engine_refuses_the_pairs_that_are_not_in_the_table(pair, word):
    others = {axis: value for axis, value in (("cut", "forward"), ("clip", "layer")) if axis not in dict(pair)}
    row = read_row([(dict(pair) | others).get(axis, ".") for axis in AXES])
    with pytest.raises(EngineUsageError, match=word):
        row.run_all()
