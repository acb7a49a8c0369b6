"""Loads of tensors that are stored in another form than the wanted one: piece by piece, in any order of the files."""

import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.machines import run_machines
from torchround.checkpoint import (
    Checkpointer,
    Conversion,
    DamagedCheckpointError,
    ForeignCheckpointError,
    Layout,
    Loaded,
    MachineTeam,
    Receiver,
    load_checkpoint,
    step_folder,
    tensor_file,
)
from torchround.checkpoint.conversion import ReadingPlan, TensorSink, layout_of
from torchround.machines.group import MachineGroup

# 5000 elements are several pieces of 4096 bytes in 16 bits, and their bytes are no whole blocks of a disk.
NAMES = ("a", "b")
NUMEL = 5000


def whole_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"weights/{name}": torch.randn(10, NUMEL // 10, generator=generator) for name in NAMES}


def halves(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the upper and the lower 16 bits of fp32 values as tensors of their own."""
    found = {}
    for name, tensor in whole.items():
        bits = tensor.view(torch.int32)
        path = name.partition("/")[2]
        found[f"upper/{path}"] = (bits >> 16).to(torch.int16)
        found[f"lower/{path}"] = (bits & 0xFFFF).sub(0x8000).to(torch.int16)
    return found


class HalvesConverter:
    """A stand-in converter between fp32 values and their two halves."""

    def conversions(self, stored: Layout, wanted: Layout) -> Sequence[Conversion]:
        found = []
        for name in NAMES:
            whole: Layout = {f"weights/{name}": (torch.float32, (10, NUMEL // 10))}
            parts: Layout = {f"{kind}/{name}": (torch.int16, (10, NUMEL // 10)) for kind in ("upper", "lower")}
            if whole.items() <= stored.items() and parts.items() <= wanted.items():
                found.append(Conversion(whole, parts, self._split))
            elif parts.items() <= stored.items() and whole.items() <= wanted.items():
                found.append(Conversion(parts, whole, self._joined))
        return found

    def _split(self, wanted: Mapping[str, Tensor]) -> Mapping[str, Receiver]:
        upper, lower = (wanted[name].view(-1) for name in sorted(wanted, reverse=True))
        [name] = {f"weights/{name.partition('/')[2]}" for name in wanted}

        def take(start: int, elements: Tensor) -> None:
            found = halves({"weights/": elements})
            upper[start : start + len(elements)] = found["upper/"]
            lower[start : start + len(elements)] = found["lower/"]

        return {name: take}

    def _joined(self, wanted: Mapping[str, Tensor]) -> Mapping[str, Receiver]:
        [(name, tensor)] = wanted.items()
        bits, path = tensor.view(-1).view(torch.int32), name.partition("/")[2]
        bits.zero_()

        def taker(change: Callable[[Tensor], Tensor]) -> Receiver:
            def take(start: int, elements: Tensor) -> None:
                bits[start : start + len(elements)] |= change(elements.int())

            return take

        return {f"upper/{path}": taker(lambda part: part << 16), f"lower/{path}": taker(lambda part: part + 0x8000)}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Read pieces of 4096 bytes. Returns the sizes of the buffers that pieces were read into."""
    sizes: list[int] = []
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 4096)
    read = tensor_file._read_into

    def counting(file, one_pass, memory):
        sizes.append(len(memory))
        read(file, one_pass, memory)

    monkeypatch.setattr(tensor_file, "_read_into", counting)
    return sizes


def room_for(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 77) for name, tensor in tensors.items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def in_order(tensors: Mapping[str, Tensor], order: Iterable[str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in order}


@pytest.mark.parametrize("file_bytes", [1, 2**30], ids=["a file each", "one file"])
@pytest.mark.parametrize(
    "order", [sorted, lambda names: sorted(names, reverse=True)], ids=["lower first", "upper first"]
)
def test_two_stored_tensors_become_one_in_any_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_pieces: list[int],
    order: Callable[[Iterable[str]], list[str]],
    file_bytes: int,
) -> None:
    monkeypatch.setattr(tensor_file, "FILE_BYTES", file_bytes)
    stored = halves(whole_values())
    path = Checkpointer(tmp_path).save(3, in_order(stored, order(stored)), {})
    target = room_for(whole_values())
    loaded = load_checkpoint(path, target, converter=HalvesConverter())
    assert_equal(target, whole_values())
    assert loaded.filled == loaded.converted == target.keys()
    assert max(small_pieces) <= 4096, "a piece was larger, so a tensor had a second copy"


def test_one_stored_tensor_becomes_two(tmp_path: Path, small_pieces: list[int]) -> None:
    path = Checkpointer(tmp_path).save(3, whole_values(), {})
    target = room_for(halves(whole_values()))
    loaded = load_checkpoint(path, target, converter=HalvesConverter())
    assert_equal(target, halves(whole_values()))
    assert loaded.filled == loaded.converted == target.keys()
    assert max(small_pieces) <= 4096


def test_a_tensor_that_is_stored_as_it_is_wanted_is_read_in_place_beside_others(tmp_path: Path) -> None:
    frozen = {"weights/frozen": torch.arange(7.0)}
    path = Checkpointer(tmp_path).save(3, {**halves(whole_values()), **frozen}, {})
    target = room_for({**whole_values(), **frozen})
    loaded = load_checkpoint(path, target, converter=HalvesConverter())
    assert_equal(target, {**whole_values(), **frozen})
    assert loaded.filled == target.keys() and loaded.converted == whole_values().keys()


def test_a_missing_half_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    stored = halves(whole_values())
    del stored["lower/b"]
    path = Checkpointer(tmp_path).save(3, stored, {})
    target = room_for(whole_values())
    words = re.escape("2 tensors are not this model's: weights/b is missing; upper/b is not part of it")
    with pytest.raises(ForeignCheckpointError, match=words):
        load_checkpoint(path, target, converter=HalvesConverter())
    assert_equal(target, room_for(target))


def test_a_wrong_byte_of_a_converted_tensor_is_damage_and_the_checkpoint_before_is_read(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(3, halves(whole_values()), {})
    newest = checkpointer.save(4, halves({name: -tensor for name, tensor in whole_values().items()}), {})
    file = newest / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="has checksum"):
        load_checkpoint(newest, room_for(whole_values()), converter=HalvesConverter())
    target = room_for(whole_values())
    loaded = checkpointer.load_latest(target, converter=HalvesConverter())
    assert loaded is not None and loaded.step == 3
    assert_equal(target, whole_values())


def test_a_file_that_changes_after_its_header_was_checked_is_damage_and_overflows_no_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Checkpointer(tmp_path / "run").save(3, halves(whole_values()), {})
    longer = {name: tensor.repeat(1, 3) for name, tensor in halves(whole_values()).items()}
    other = Checkpointer(tmp_path / "other").save(3, longer, {})
    read = step_folder.read_tensor_file

    def read_another(file: Path, tensors: Mapping[str, Tensor | TensorSink]) -> str:
        return read(other / file.name, tensors)

    monkeypatch.setattr(step_folder, "read_tensor_file", read_another)
    with pytest.raises(DamagedCheckpointError, match="has checksum"):
        load_checkpoint(path, room_for(whole_values()), converter=HalvesConverter())


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
def test_machines_read_halves_that_others_saved(tmp_path: Path, shared: bool) -> None:
    """Three machines load what two saved, and the files lie on the disks of two."""

    def folder_of(rank: int) -> Path:
        return tmp_path / ("run" if shared else f"disk{rank}")

    def save(group: MachineGroup) -> None:
        name = NAMES[group.rank]
        own = {key: tensor for key, tensor in halves(whole_values()).items() if key.endswith(f"/{name}")}
        Checkpointer(folder_of(group.rank), team=MachineTeam.of(group, shared)).save(3, own, {})

    def load(group: MachineGroup) -> tuple[Loaded | None, bool]:
        # Machine 2 has b, machine 1 nothing, machine 0 a.
        own = {0: ["weights/a"], 1: [], 2: ["weights/b"]}[group.rank]
        target = room_for({name: whole_values()[name] for name in own})
        checkpointer = Checkpointer(folder_of(group.rank), team=MachineTeam.of(group, shared))
        loaded = checkpointer.load_latest(target, converter=HalvesConverter())
        return loaded, all(torch.equal(tensor, whole_values()[name]) for name, tensor in target.items())

    run_machines(2, save)
    for loaded, is_equal in run_machines(3, load):
        assert loaded is not None and loaded.step == 3 and is_equal
        assert loaded.converted == whole_values().keys()


def test_a_machine_needs_the_stored_halves_of_its_own_tensors_alone() -> None:
    frozen = {"weights/frozen": torch.arange(7.0)}
    stored, wanted = (layout_of({**tensors, **frozen}) for tensors in (halves(whole_values()), whole_values()))
    plan = ReadingPlan(stored, HalvesConverter().conversions(stored, wanted))
    own = {name: wanted[name] for name in ("weights/b", "weights/frozen")}
    assert plan.needed(own) == {"upper/b", "lower/b", "weights/frozen"}
    assert plan.needed({}) == frozenset()


def test_a_save_writes_tensors_of_the_new_formats_in_place(tmp_path: Path) -> None:
    """Codes, scales and residuals go to the file from their own memory, as weights do."""
    tensors = {
        "weights/a": torch.randn(64, 512).bfloat16(),
        "residual/a": torch.arange(64 * 512).view(64, 512).to(torch.int16),
        "exp_avg/a": torch.arange(64 * 512).view(64, 512).to(torch.int8),
        "exp_avg_scale/a": torch.rand(256).bfloat16(),
        "exp_avg_sq/a": torch.arange(64 * 512).view(64, 512).to(torch.uint8),
    }
    [file] = tensor_file.plan_files(tensors)
    assert list(file.tensors) == list(tensors), "whole blocks keep their order"
    assert all(file.tensors[name] is tensor for name, tensor in tensors.items()), "a tensor was copied"
    path = Checkpointer(tmp_path / "run").save(1, tensors, {})
    shutil.copytree(path, tmp_path / "moved" / "step-1")
    target = room_for(tensors)
    load_checkpoint(tmp_path / "moved" / "step-1", target)
    assert_equal(target, tensors)
