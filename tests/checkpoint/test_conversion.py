"""Loads of tensors that are stored in another form than the wanted one, in any order of the files."""

import shutil

import pytest
import torch

from tests.support.joint_teams import together
from tests.support.small_run import flip_last_bit
from torchround.checkpoint import (
    Checkpointer,
    Conversion,
    DamagedCheckpointError,
    ForeignCheckpointError,
    load_checkpoint,
)
from torchround.checkpoint.conversion import ReadingPlan, layout_of

NAMES = ("a", "b")
SHAPE = (10, 500)
FROZEN = {"weights/frozen": torch.arange(7.0)}


def whole_values():
    generator = torch.Generator().manual_seed(1)
    return {f"weights/{name}": torch.randn(SHAPE, generator=generator) for name in NAMES}


def halves(whole):
    """Return the upper and the lower 16 bits of fp32 values as tensors of their own."""
    found = {}
    for name, tensor in whole.items():
        bits, path = tensor.view(torch.int32), name.partition("/")[2]
        found[f"upper/{path}"] = (bits >> 16).to(torch.int16)
        found[f"lower/{path}"] = (bits & 0xFFFF).sub(0x8000).to(torch.int16)
    return found


class HalvesConverter:
    """A converter between fp32 values and their two halves."""

    def conversions(self, stored, wanted):
        found = []
        for name in NAMES:
            whole = {f"weights/{name}": (torch.float32, SHAPE)}
            parts = {f"{kind}/{name}": (torch.int16, SHAPE) for kind in ("upper", "lower")}
            if whole.items() <= stored.items() and parts.items() <= wanted.items():
                found.append(Conversion(whole, parts, self._split))
            elif parts.items() <= stored.items() and whole.items() <= wanted.items():
                found.append(Conversion(parts, whole, self._join))
        return found

    def _split(self, stored, wanted):
        for name, half in halves(stored).items():
            wanted[name].copy_(half)

    def _join(self, stored, wanted):
        [(name, tensor)] = wanted.items()
        upper, lower = (stored[f"{kind}/{name.partition('/')[2]}"].int() for kind in ("upper", "lower"))
        tensor.copy_(((upper << 16) | (lower + 0x8000)).view(torch.float32))


def room_for(tensors):
    return {name: torch.full_like(tensor, 77) for name, tensor in tensors.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (halves(whole_values()), whole_values()),
        (dict(sorted(halves(whole_values()).items())), whole_values()),
        (whole_values(), halves(whole_values())),
    ],
    ids=["two become one", "two become one, lower first", "one becomes two"],
)
def test_stored_tensors_become_others_in_any_order(tmp_path, stored, wanted):
    """A tensor that is stored as it is wanted is read in place beside them."""
    path, converter = Checkpointer(tmp_path).save(3, {**stored, **FROZEN}, {}), HalvesConverter()
    target = room_for({**wanted, **FROZEN})
    loaded = load_checkpoint(path, target, converter=converter)
    assert_equal(target, {**wanted, **FROZEN})
    assert loaded.filled == target.keys() and loaded.converted == wanted.keys()


def test_a_missing_half_is_named_and_nothing_is_written(tmp_path):
    stored = halves(whole_values())
    del stored["lower/b"]
    path, target = Checkpointer(tmp_path).save(3, stored, {}), room_for(whole_values())
    with pytest.raises(ForeignCheckpointError, match="2 tensors .*: weights/b is missing; upper/b is not part of it"):
        load_checkpoint(path, target, converter=HalvesConverter())
    assert_equal(target, room_for(target))


def test_a_wrong_byte_of_a_converted_tensor_is_damage_and_the_checkpoint_before_is_read(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, halves(whole_values()), {})
    newest = checkpointer.save(4, halves({name: -tensor for name, tensor in whole_values().items()}), {})
    flip_last_bit(newest / "tensors-00000.safetensors")
    with pytest.raises(DamagedCheckpointError, match="has checksum"):
        load_checkpoint(newest, room_for(whole_values()), converter=HalvesConverter())
    target = room_for(whole_values())
    loaded = checkpointer.load_latest(target, converter=HalvesConverter())
    assert loaded is not None and loaded.step == 3
    assert_equal(target, whole_values())


def test_a_file_that_changes_after_its_header_was_checked_is_damage_and_overflows_no_tensor(tmp_path):
    path = Checkpointer(tmp_path / "run").save(3, halves(whole_values()), {})
    longer = {name: tensor.repeat(1, 3) for name, tensor in halves(whole_values()).items()}
    other = Checkpointer(tmp_path / "other").save(3, longer, {})

    class Replaces(HalvesConverter):
        """A converter that changes the file, since it is asked once all headers are read."""

        def conversions(self, stored, wanted):
            shutil.copy(other / "tensors-00000.safetensors", path)
            return super().conversions(stored, wanted)

    with pytest.raises(DamagedCheckpointError, match="has checksum"):
        load_checkpoint(path, room_for(whole_values()), converter=Replaces())


def test_machines_read_halves_that_others_saved(tmp_path):
    """Three machines load what two saved. The two halves of a value are in two files."""

    def save(team):
        own = {key: t for key, t in halves(whole_values()).items() if key.startswith(("upper", "lower")[team.rank])}
        Checkpointer(tmp_path, team=team).save(3, own, {})

    def load(team):
        # Machine 2 has b, machine 1 nothing, machine 0 a.
        own = {0: ["weights/a"], 1: [], 2: ["weights/b"]}[team.rank]
        target = room_for({name: whole_values()[name] for name in own})
        loaded = Checkpointer(tmp_path, team=team).load_latest(target, converter=HalvesConverter())
        assert_equal(target, {name: whole_values()[name] for name in own})
        return loaded.step == 3 and loaded.converted == whole_values().keys()

    together(2, save)
    assert all(together(3, load))


def test_a_machine_needs_the_stored_halves_of_its_own_tensors_alone():
    stored, wanted = (layout_of({**tensors, **FROZEN}) for tensors in (halves(whole_values()), whole_values()))
    for own, needed in ((("weights/b", "weights/frozen"), {"upper/b", "lower/b", "weights/frozen"}), ((), frozenset())):
        wanted_here = {name: wanted[name] for name in own}
        plan = ReadingPlan(stored, wanted_here, HalvesConverter().conversions(stored, wanted_here))
        assert plan.needed == needed
