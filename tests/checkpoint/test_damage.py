"""Damaged checkpoints are found, named and skipped, before a tensor is touched if possible."""

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchround.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    load_checkpoint,
    verify_checkpoint,
)

TENSORS = "tensors-00000.safetensors"


def state_of(step: int) -> dict[str, Tensor]:
    return {"weights/block.0.w": torch.full((30, 7), float(step)), "exp_avg/block.0.w": torch.full((30, 7), -1.0)}


def two_checkpoints(folder: Path) -> Checkpointer:
    checkpointer = Checkpointer(folder)
    for step in (1, 2):
        checkpointer.save(step, state_of(step), {"step": step})
    return checkpointer


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def forge_manifest(folder: Path, change: Callable[[dict], None]) -> None:
    """Alter the manifest and make it consistent again, as a forger who knows the format would."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["xxh3_128"]
    change(content)
    content["xxh3_128"] = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    (folder / "manifest.json").write_text(json.dumps(content, indent=1))


def forge_tensors(folder: Path, content: bytes) -> None:
    (folder / TENSORS).write_bytes(content)
    record = {"size_bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    forge_manifest(folder, lambda manifest: manifest["files"].update({TENSORS: record}))


def replace_by_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere"))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def header(entries: object, data_bytes: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def one_tensor(shape: object, offsets: object, dtype: str = "F32") -> bytes:
    return header({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, data_bytes=8)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
    "no tensors": (lambda path: (path / TENSORS).unlink(), f"{TENSORS} is missing"),
    "no state": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
    "empty folder": (lambda path: [file.unlink() for file in path.iterdir()], "manifest.json cannot be read"),
    "tensors cut short": (lambda path: truncate(path / TENSORS), f"{TENSORS} is \\d+ bytes long instead of"),
    "state cut short": (lambda path: truncate(path / "state.json"), "state.json is 10 bytes long instead of 11"),
    "manifest cut short": (lambda path: truncate(path / "manifest.json"), "manifest.json is not JSON"),
    "manifest not JSON": (lambda path: (path / "manifest.json").write_text("oops"), "manifest.json is not JSON"),
    "manifest a list": (lambda path: (path / "manifest.json").write_text("[1]"), "manifest.json is not a JSON object"),
    "manifest nested": (lambda path: (path / "manifest.json").write_text("[" * 10**5), "manifest.json is not JSON"),
    "state altered": (lambda path: flip_last_byte(path / "state.json"), "state.json has checksum"),
    "tensor altered": (lambda path: flip_last_byte(path / TENSORS), f"{TENSORS} has checksum"),
    "unknown format": (
        lambda path: forge_manifest(path, lambda manifest: manifest.update(format=0)),
        "manifest.json was altered",
    ),
    "newer format, not whole": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"format": 3', '"format": 4')
        ),
        "manifest.json was altered",
    ),
    "a link in place of a file": (lambda path: replace_by_link(path / TENSORS), f"{TENSORS} is not an ordinary"),
    "a manifest that is a link": (lambda path: replace_by_link(path / "manifest.json"), "manifest.json cannot be read"),
    "a pipe in place of a file": (lambda path: replace_by_pipe(path / "state.json"), "state.json is not an ordinary"),
    "a manifest that is a pipe": (
        lambda path: replace_by_pipe(path / "manifest.json"),
        "manifest.json cannot be read: not an ordinary",
    ),
    "a huge manifest": (lambda path: os.truncate(path / "manifest.json", 2**40), "more than the 16777216 that it may"),
    "negative size": (
        lambda path: forge_manifest(path, lambda m: m["files"][TENSORS].update(size_bytes=-1)),
        "manifest.json was altered",
    ),
    "size that is no number": (
        lambda path: forge_manifest(path, lambda m: m["files"][TENSORS].update(size_bytes=1e9)),
        "manifest.json was altered",
    ),
    "another step": (
        lambda path: forge_manifest(path, lambda manifest: manifest.update(step=9)),
        "manifest.json is of step 9",
    ),
    "a path out of the folder": (
        lambda path: forge_manifest(
            path, lambda m: m["files"].update({"../x": {"size_bytes": 0, "xxh3_128": "0" * 32}})
        ),
        "strange file '../x'",
    ),
    "a record of something else": (
        lambda path: forge_manifest(path, lambda manifest: manifest["files"].update({TENSORS: {"a": 1}})),
        "manifest.json was altered",
    ),
    "no state in the manifest": (
        lambda path: forge_manifest(path, lambda manifest: manifest["files"].pop("state.json")),
        "manifest.json was altered",
    ),
    "header longer than the file": (
        lambda path: forge_tensors(path, (2**60).to_bytes(8, "little") + b"{}"),
        "header would take",
    ),
    "empty tensor file": (lambda path: forge_tensors(path, b""), f"header of {TENSORS} is damaged"),
    "header a list": (lambda path: forge_tensors(path, header([])), f"header of {TENSORS} is damaged"),
    "header nested": (
        lambda path: forge_tensors(path, (10**5).to_bytes(8, "little") + b"[" * 10**5),
        f"header of {TENSORS} is damaged",
    ),
    "offsets outside": (lambda path: forge_tensors(path, one_tensor([2], [0, 800])), "w takes 800 bytes"),
    "more data than tensors": (lambda path: forge_tensors(path, one_tensor([1], [0, 4])), "take 4 of 8 bytes"),
    "a gap before a tensor": (
        lambda path: forge_tensors(path, one_tensor([1], [4, 8])),
        "w begins at byte 4 instead of 0",
    ),
    "a type that no version writes": (
        lambda path: forge_tensors(path, one_tensor([2], [0, 8], "F4")),
        "w is of the unknown type F4",
    ),
    "absurd shape": (lambda path: forge_tensors(path, one_tensor([2**62, 2**62], [0, 8])), "w takes 8 bytes"),
    "sizes below zero": (
        lambda path: forge_tensors(path, one_tensor([-1, -2], [0, 8])),
        f"header of {TENSORS} is damaged",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, words = DAMAGES[kind]
    checkpointer = two_checkpoints(tmp_path)
    damage(tmp_path / "step-2")
    target = state_of(0)
    with caplog.at_level(logging.WARNING):
        loaded = checkpointer.load_latest(target)
    assert loaded is not None and loaded.step == 1 and loaded.state == {"step": 1}
    assert torch.equal(target["weights/block.0.w"], torch.full((30, 7), 1.0))
    assert len(caplog.records) == 1 and f"checkpoint {tmp_path}/step-2: " in caplog.text
    assert re.search(words, caplog.text)


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind not in ("tensor altered", "another step")])
def test_every_damage_except_to_tensor_bytes_is_found_before_a_tensor_is_touched(tmp_path: Path, kind: str) -> None:
    damage, words = DAMAGES[kind]
    two_checkpoints(tmp_path)
    damage(tmp_path / "step-2")
    target = state_of(7)
    with pytest.raises(DamagedCheckpointError, match=words):
        load_checkpoint(tmp_path / "step-2", target)
    assert all(torch.equal(target[name], tensor) for name, tensor in state_of(7).items())


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "of a newer version": (
        lambda path: forge_manifest(path, lambda manifest: manifest.update(format=4, ranks=[1])),
        "it has format 4, and this version reads up to format 3",
    ),
    "of another model": (
        lambda path: forge_tensors(path, one_tensor([2], [0, 8])),
        "3 tensors are not this model's: weights/block.0.w is missing",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_intact_checkpoint_of_another_model_or_version_is_refused_and_not_skipped(tmp_path: Path, kind: str) -> None:
    change, words = FOREIGN[kind]
    checkpointer = two_checkpoints(tmp_path)
    change(tmp_path / "step-2")
    target = state_of(7)
    with pytest.raises(ForeignCheckpointError, match=f"{tmp_path}/step-2: {words}"):
        checkpointer.load_latest(target)
    assert all(torch.equal(target[name], tensor) for name, tensor in state_of(7).items())
    assert checkpointer.latest_step() == 2  # it counts, so nothing older is taken for the newest


def in_format_1(path: Path) -> None:
    """Turn a checkpoint into one of format 1, which had CRC-32 in place of XXH3."""
    content = json.loads((path / "manifest.json").read_text())
    files = {
        name: {"size_bytes": record["size_bytes"], "crc32": zlib.crc32((path / name).read_bytes())}
        for name, record in content["files"].items()
    }
    old = {"format": 1, "step": content["step"], "files": files}
    old["crc32"] = zlib.crc32(json.dumps(old).encode())
    (path / "manifest.json").write_text(json.dumps(old, indent=1))


def test_a_checkpoint_of_format_1_is_refused_with_one_clear_message(tmp_path: Path) -> None:
    checkpointer = two_checkpoints(tmp_path)
    in_format_1(tmp_path / "step-2")
    words = "format 1, which only versions before the first release wrote; legal: formats 2 to 3"
    with pytest.raises(ForeignCheckpointError, match=words):
        verify_checkpoint(tmp_path / "step-2")
    with pytest.raises(ForeignCheckpointError, match=words):
        checkpointer.load_latest(state_of(0))


def test_optional_tensors_may_be_missing_on_either_side_and_all_others_are_filled(tmp_path: Path) -> None:
    old = {"master/w": torch.full((5,), 3.0).bfloat16(), **state_of(4), "master/v": torch.ones(3)}
    path = Checkpointer(tmp_path).save(4, old, {})
    target = {**state_of(0), "other/w": torch.full((2,), 9.0)}
    loaded = load_checkpoint(path, target, lambda name: name.startswith(("master/", "other/")))
    assert loaded.filled == state_of(0).keys()
    assert all(torch.equal(target[name], tensor) for name, tensor in state_of(4).items())
    assert target["other/w"].eq(9.0).all()
    flip_last_byte(path / TENSORS)  # a byte of a tensor that is not read into anything
    with pytest.raises(DamagedCheckpointError, match=f"{TENSORS} has checksum"):
        load_checkpoint(path, target, lambda name: name.startswith(("master/", "other/")))


def test_the_error_names_every_checkpoint_if_none_can_be_used(tmp_path: Path) -> None:
    checkpointer = two_checkpoints(tmp_path)
    (tmp_path / "step-1" / "state.json").unlink()
    truncate(tmp_path / "step-2" / TENSORS)
    with pytest.raises(CheckpointError) as error:
        checkpointer.load_latest(state_of(0))
    assert "step-1: state.json is missing" in str(error.value)
    assert f"step-2: {TENSORS} is" in str(error.value)


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nothing", "file", "step-1"):
        told = f"given {tmp_path}/{name}; legal: one checkpoint, a folder step-N of a run; there is no manifest.json"
        with pytest.raises(NoCheckpointError, match=told):
            load_checkpoint(tmp_path / name, state_of(0))
    (tmp_path / "step-1").mkdir()
    with pytest.raises(DamagedCheckpointError, match=f"{tmp_path}/step-1: manifest.json cannot be read"):
        load_checkpoint(tmp_path / "step-1", state_of(0))


@pytest.mark.parametrize("given", ["", "checkpoints", "checkpoints/step-9"])
def test_the_newest_intact_checkpoint_is_proposed_for_a_runs_folder_and_for_a_missing_step(
    tmp_path: Path, given: str
) -> None:
    two_checkpoints(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step-3").mkdir()
    with pytest.raises(NoCheckpointError, match=f"such as {tmp_path}/checkpoints/step-2$"):
        verify_checkpoint(tmp_path / given)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"more": torch.zeros(1)}, "more is missing"),
        ({"weights/block.0.w": torch.zeros(7, 30)}, r"is float32 \[30, 7\] instead of float32 \[7, 30\]"),
        ({"weights/block.0.w": torch.zeros(30, 7).bfloat16()}, r"instead of bfloat16 \[30, 7\]"),
        ({"weights/block.0.w": None}, "weights/block.0.w is not part of it"),
    ],
)
def test_another_models_checkpoint_is_refused_with_the_tensors_that_differ(
    tmp_path: Path, change: dict[str, Tensor | None], words: str
) -> None:
    path = Checkpointer(tmp_path).save(1, state_of(1), {"step": 1})
    target = {name: tensor for name, tensor in {**state_of(0), **change}.items() if tensor is not None}
    with pytest.raises(ForeignCheckpointError, match=words) as error:
        load_checkpoint(path, target)
    assert error.value.state == {"step": 1}
    assert all(not tensor.any() for name, tensor in target.items() if name != "exp_avg/block.0.w")


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Checkpointer(tmp_path_factory.mktemp("whole")).save(4, state_of(4), {"tokens": 99, "text": "abc"})


@settings(max_examples=150, deadline=None)
@given(file=st.integers(0, 2), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_any_altered_bit_and_any_cut_is_detected_and_the_file_named(
    whole_checkpoint: Path, file: int, place: float, bit: int, cut: bool
) -> None:
    path = sorted(whole_checkpoint.iterdir())[file]
    content = path.read_bytes()
    position = int(place * len(content))
    altered = bytes([content[position] ^ (1 << bit)])
    path.write_bytes(content[:position] + (b"" if cut else altered + content[position + 1 :]))
    try:
        with pytest.raises(DamagedCheckpointError, match=path.name):
            load_checkpoint(whole_checkpoint, state_of(0))
        with pytest.raises(DamagedCheckpointError):
            verify_checkpoint(whole_checkpoint)
    finally:
        path.write_bytes(content)
    assert verify_checkpoint(whole_checkpoint) == load_checkpoint(whole_checkpoint, state_of(0)).step == 4


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = Checkpointer(tmp_path).save(1, {"w": torch.zeros(2)}, {})
    shutil.copy(path / TENSORS, path / "tensors-00001.safetensors")
    forge_manifest(path, lambda m: m["files"].update({"tensors-00001.safetensors": dict(m["files"][TENSORS])}))
    with pytest.raises(DamagedCheckpointError, match="w is in tensors-00001.safetensors and in a file before"):
        load_checkpoint(path, {"w": torch.zeros(2)})
