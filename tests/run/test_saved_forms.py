"""Conversions between the forms that checkpoints hold: bit for bit for weights, and as the format rounds for values."""

import pytest
import torch

from torchround.checkpoint import Checkpointer, ForeignCheckpointError, load_checkpoint
from torchround.optim.formats import COMPACT, EXACT, StateValue
from torchround.optim.split_weights import split
from torchround.run import saved_forms
from torchround.run.saved_forms import SavedForms, value_layout

VALUES = (StateValue("exp_avg"), StateValue("exp_avg_sq", is_signed=False))
# Whole blocks of 128 and of a disk; several pieces; a block that is not full; one element; none.
SHAPES = {"block.0.w": (64, 512), "block.0.b": (5_000,), "block.0.n": (3, 43), "head.one": (1,), "head.none": (0, 7)}


def exact_state():
    generator = torch.Generator().manual_seed(5)
    state = {}
    for name, shape in SHAPES.items():
        state[f"weights/{name}"] = torch.randn(shape, generator=generator)
        spread = torch.exp2(torch.randint(-20, 4, shape, generator=generator).float())
        state[f"exp_avg/{name}"] = torch.randn(shape, generator=generator) * spread
        state[f"exp_avg_sq/{name}"] = torch.rand(shape, generator=generator) * spread
    # A tie, whose upper half is rounded up; a block of zeros; the largest and the smallest numbers of a block.
    state["weights/block.0.b"][:2] = torch.tensor([0x3F808000, 0x3F818000]).int().view(torch.float32)
    state["exp_avg/block.0.w"][3].zero_()
    state["exp_avg/block.0.w"][4, :2] = torch.tensor([3e38, -1e-45])
    return state


def as_split(state):
    """Return the state with split weights."""
    found = {}
    for name, tensor in state.items():
        kind, _, parameter = name.partition("/")
        found[name] = tensor
        if kind == "weights":
            found[name], found[f"residual/{parameter}"] = split(tensor)
    return found


def kept_as(state, form, decodes=False):
    """Return the state with each value as a whole in `form`, which the conversion by pieces must equal.

    If it `decodes`, the state has the values in `form`, and gets the fp32 numbers that they stand for.
    """
    found = {name: tensor for name, tensor in state.items() if not name.startswith("exp_avg")}
    for value in VALUES:
        for parameter, shape in SHAPES.items():
            layout, exact = value_layout(value, form, parameter, shape), f"{value.name}/{parameter}"
            if decodes:
                found[exact] = form.decode(value, tuple(state[name].view(-1) for name in layout)).view(shape)
            else:
                kept = form.encode(value, state[exact].reshape(-1))
                found |= {name: tensor.view(layout[name][1]) for name, tensor in zip(layout, kept, strict=True)}
    return found


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def assert_loads(folder, stored, expected, own):
    """Save, load in the form of `expected`, and compare every bit."""
    path = Checkpointer(folder).save(1, stored, {})
    # What was there before must not matter.
    target = {name: torch.full_like(tensor, 99) for name, tensor in expected.items()}
    forms = SavedForms(VALUES, own)
    loaded = load_checkpoint(path, target, converter=forms)
    assert loaded.filled == expected.keys()
    changed = {name for name in expected if name not in stored or stored[name].dtype != expected[name].dtype}
    assert changed <= loaded.converted
    for name, tensor in expected.items():
        assert torch.equal(bits(target[name]), bits(tensor)), name
    return forms


def backwards(state):
    return dict(sorted(state.items(), reverse=True))


@pytest.fixture
def pieces(monkeypatch):
    """Convert a few blocks at once."""
    monkeypatch.setattr(saved_forms, "_CHUNK_ELEMENTS", 1024)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("order", [dict, backwards], ids=["weights first", "weights last"])
def test_split_and_fp32_weights_become_each_other_bit_for_bit(tmp_path, order):
    whole, halves = exact_state(), as_split(exact_state())
    assert_loads(tmp_path / "split", order(whole), halves, EXACT)
    forms = assert_loads(tmp_path / "whole", order(halves), whole, EXACT)
    assert forms.rounding_text([name for name in whole if name.startswith("weights")]) is None


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("order", [dict, backwards], ids=["codes first", "scales first"])
def test_exact_and_compact_values_become_each_other_as_the_format_rounds(tmp_path, order):
    exact = exact_state()
    compact = kept_as(exact, COMPACT)
    forms = assert_loads(tmp_path / "compact", order(exact), compact, COMPACT)
    assert "(exp_avg, exp_avg_sq) is rounded to 8 bits" in forms.rounding_text(compact)
    forms = assert_loads(tmp_path / "exact", order(compact), kept_as(compact, COMPACT, decodes=True), EXACT)
    assert "(exp_avg, exp_avg_sq) continues in float32" in forms.rounding_text(exact)


def test_both_conversions_at_once_and_none_where_forms_are_equal(tmp_path):
    exact = exact_state()
    compact = as_split(kept_as(exact, COMPACT))
    assert_loads(tmp_path / "to compact", exact, compact, COMPACT)
    assert_loads(tmp_path / "to exact", compact, kept_as(kept_as(exact, COMPACT), COMPACT, decodes=True), EXACT)
    path = Checkpointer(tmp_path / "same").save(1, compact, {})
    loaded = load_checkpoint(path, compact, converter=SavedForms(VALUES, COMPACT))
    assert loaded.converted == frozenset() and SavedForms(VALUES, COMPACT).rounding_text(loaded.converted) is None


@pytest.mark.parametrize(
    ("left_out", "own", "words"),
    [
        ("exp_avg_scale/block.0.w", EXACT, "exp_avg/block.0.w is int8 .* instead of float32"),
        ("exp_avg_scale/block.0.w", COMPACT, "exp_avg_scale/block.0.w is missing"),
        ("residual/block.0.b", EXACT, "weights/block.0.b is bfloat16 .* instead of float32"),
        ("exp_avg_sq/head.one", EXACT, "exp_avg_sq/head.one is missing"),
    ],
)
def test_a_part_that_is_missing_is_named_and_nothing_is_written(tmp_path, left_out, own, words):
    stored = as_split(kept_as(exact_state(), COMPACT))
    del stored[left_out]
    path = Checkpointer(tmp_path).save(1, stored, {})
    wanted = exact_state() if own is EXACT else kept_as(exact_state(), COMPACT)
    target = {name: torch.full_like(tensor, 99) for name, tensor in wanted.items()}
    with pytest.raises(ForeignCheckpointError, match=words):
        load_checkpoint(path, target, converter=SavedForms(VALUES, own))
    assert all((tensor == 99).all() for tensor in target.values())


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_older_device_weights_are_cast_to_the_run_s_dtype(tmp_path, dtypes):
    was, is_now = dtypes
    stored = {f"master_1_old/{name}": torch.rand(shape).to(was) for name, shape in SHAPES.items()}
    forms = assert_loads(tmp_path, stored, {name: tensor.to(is_now) for name, tensor in stored.items()}, EXACT)
    assert forms.rounding_text(stored) is None
    other_shape = {"master_1_old/head.one": torch.zeros(2, dtype=is_now)}
    with pytest.raises(ForeignCheckpointError, match=r"master_1_old/head\.one is .* \[1\] instead of .* \[2\]"):
        load_checkpoint(tmp_path / "step-1", other_shape, lambda name: True, converter=forms)


def test_a_scale_of_another_length_is_refused(tmp_path):
    """A forged header must not decide how much a conversion reads or writes."""
    stored = kept_as(exact_state(), COMPACT)
    stored["exp_avg_scale/block.0.b"] = torch.ones(10_000).bfloat16()
    path = Checkpointer(tmp_path).save(1, stored, {})
    with pytest.raises(ForeignCheckpointError, match=r"exp_avg/block\.0\.b is int8"):
        load_checkpoint(path, exact_state(), converter=SavedForms(VALUES, EXACT))
