"""Damaged checkpoints are found, named and skipped, before a tensor is touched if possible."""

import json
import logging
import os
import re
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hostile_cases import forge_file, forge_manifest
from tests.support.small_run import flip_last_bit
from torchround.checkpoint import (
    Checkpointer,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    load_checkpoint,
    verify_checkpoint,
)
from torchround.checkpoint.folders import checkpoint_name

TENSORS = "tensors-00000.safetensors"


def state_of(step):
    return {"weights/block.0.w": torch.full((30, 7), float(step)), "exp_avg/block.0.w": torch.full((30, 7), -1.0)}


def holds(tensors, step):
    return all(torch.equal(tensors[name], tensor) for name, tensor in state_of(step).items())


def two_checkpoints(folder):
    checkpointer = Checkpointer(folder)
    for step in (1, 2):
        checkpointer.save(step, state_of(step), {"step": step})
    return checkpointer


# What damages the checkpoint at a path.
def without(name):
    return lambda path: (path / name).unlink()


def cut(name):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-1])


def flipped(name):
    return lambda path: flip_last_bit(path / name)


def linked(name):
    return lambda path: (path / name).symlink_to((path / name).rename(path.parent / "elsewhere"))


def pipe(name):
    return lambda path: ((path / name).unlink(), os.mkfifo(path / name))


def manifest(change):
    return lambda path: forge_manifest(path, change)


def tensors(content):
    return lambda path: forge_file(path / TENSORS, content)


def header(entries):
    text = json.dumps(entries).encode()
    return tensors(len(text).to_bytes(8, "little") + text + bytes(8))


def one_tensor(shape, offsets, dtype="F32"):
    return header({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


def newer_but_altered(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"format": 3', '"format": 4'))


def in_two_files(path):
    shutil.copy(path / TENSORS, path / "tensors-00001.safetensors")
    forge_manifest(path, lambda m: m["files"].update({"tensors-00001.safetensors": dict(m["files"][TENSORS])}))


CHECKSUM = {"size_bytes": 0, "xxh3_128": "0" * 32}
DAMAGES = {
    "no manifest": (without("manifest.json"), "manifest.json cannot"),
    "no tensors": (without(TENSORS), f"{TENSORS} is missing"),
    "no state": (without("state.json"), "state.json is missing"),
    "tensors cut short": (cut(TENSORS), f"{TENSORS} is .* long"),
    "state cut short": (cut("state.json"), "state.json is .* long"),
    "manifest cut short": (cut("manifest.json"), "manifest.json is not JSON"),
    "manifest a list": (lambda path: (path / "manifest.json").write_text("[1]"), "manifest.json is not a JSON object"),
    "state altered": (flipped("state.json"), "state.json has checksum"),
    "tensor altered": (flipped(TENSORS), f"{TENSORS} has checksum"),
    "newer format, not whole": (newer_but_altered, "manifest.json was altered"),
    "a link in place of a file": (linked(TENSORS), f"{TENSORS} is not an ordinary"),
    "a pipe in place of a file": (pipe("state.json"), "state.json is not an ordinary"),
    "a manifest that is a pipe": (pipe("manifest.json"), "manifest.json cannot"),
    "a huge manifest": (lambda path: os.truncate(path / "manifest.json", 2**40), "16777216"),
    "negative size": (manifest(lambda m: m["files"][TENSORS].update(size_bytes=-1)), "was altered"),
    "size that is no number": (manifest(lambda m: m["files"][TENSORS].update(size_bytes=1e9)), "was altered"),
    "another step": (manifest(lambda m: m.update(step=9)), "is of step 9"),
    "a path out of the folder": (manifest(lambda m: m["files"].update({"../x": CHECKSUM})), "strange file '../x'"),
    "a record of something else": (manifest(lambda m: m["files"].update({TENSORS: {"a": 1}})), "was altered"),
    "no state in the manifest": (manifest(lambda m: m["files"].pop("state.json")), "was altered"),
    "empty tensor file": (tensors(b""), f"header of {TENSORS}"),
    "header longer than the file": (tensors((2**60).to_bytes(8, "little") + b"{}"), "header would take"),
    "offsets outside": (one_tensor([2], [0, 800]), "w takes 800 bytes"),
    "more data than tensors": (one_tensor([1], [0, 4]), "take 4 of 8 bytes"),
    "a gap before a tensor": (one_tensor([1], [4, 8]), "begins at byte 4"),
    "a tensor in two files": (in_two_files, "is in tensors-00001.safetensors and in a file before"),
    "a type that no version writes": (one_tensor([2], [0, 8], "F4"), "type F4"),
}
WHEN_READ = ("tensor altered", "another step")  # the one is found as the bytes are read, the other by a run's folder


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_before_a_tensor_is_touched_and_the_one_before_it_is_used(tmp_path, kind, caplog):
    damage, words = DAMAGES[kind]
    checkpointer = two_checkpoints(tmp_path)
    damage(tmp_path / checkpoint_name(2))
    if kind not in WHEN_READ:
        target = state_of(7)
        with pytest.raises(DamagedCheckpointError, match=words):
            load_checkpoint(tmp_path / checkpoint_name(2), target)
        assert holds(target, 7)
    target = state_of(0)
    with caplog.at_level(logging.WARNING):
        loaded = checkpointer.load_latest(target)
    assert loaded is not None and loaded.step == 1 and loaded.state == {"step": 1} and holds(target, 1)
    assert len(caplog.records) == 1 and f"checkpoint {tmp_path}/{checkpoint_name(2)}: " in caplog.text
    assert re.search(words, caplog.text)


FOREIGN = {
    "of a newer version": (manifest(lambda m: m.update(format=4, ranks=[1])), "format 4"),
    "of an earlier version": (manifest(lambda m: m.update(format=2)), "format 2 is not read, only format 3"),
    "of another model": (one_tensor([2], [0, 8]), "3 tensors are not this model's"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_an_intact_checkpoint_of_another_model_or_version_is_refused_and_not_skipped(tmp_path, kind):
    change, words = FOREIGN[kind]
    checkpointer, target = two_checkpoints(tmp_path), state_of(7)
    change(tmp_path / checkpoint_name(2))
    with pytest.raises(ForeignCheckpointError, match=f"{tmp_path}/{checkpoint_name(2)}: .*{words}"):
        checkpointer.load_latest(target)
    assert holds(target, 7)
    assert checkpointer.latest_step() == 2  # it counts, so nothing older is taken for the newest


def test_optional_tensors_may_be_missing_on_either_side_and_all_others_are_filled(tmp_path):
    old = {"master/w": torch.full((5,), 3.0).bfloat16(), **state_of(4), "master/v": torch.ones(3)}
    path = Checkpointer(tmp_path).save(4, old, {})
    target = {**state_of(0), "other/w": torch.full((2,), 9.0)}
    loaded = load_checkpoint(path, target, lambda name: name.startswith(("master/", "other/")))
    assert loaded.filled == state_of(0).keys() and holds(target, 4) and target["other/w"].eq(9.0).all()
    flipped(TENSORS)(path)  # a byte of a tensor that is not read into anything
    with pytest.raises(DamagedCheckpointError, match=f"{TENSORS} has checksum"):
        load_checkpoint(path, target, lambda name: name.startswith(("master/", "other/")))


def test_a_path_without_a_checkpoint_is_an_error_that_proposes_the_newest_intact_one(tmp_path):
    (tmp_path / "file").touch()
    for name in ("nothing", "file", checkpoint_name(1)):
        with pytest.raises(NoCheckpointError, match=f"given {tmp_path}/{name}; legal: one checkpoint, a folder"):
            load_checkpoint(tmp_path / name, state_of(0))
    two_checkpoints(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / checkpoint_name(3)).mkdir()
    for given_path in ("", "checkpoints", f"checkpoints/{checkpoint_name(9)}"):
        with pytest.raises(NoCheckpointError, match=f"such as {tmp_path}/checkpoints/{checkpoint_name(2)}$"):
            verify_checkpoint(tmp_path / given_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"more": torch.zeros(1)}, "more is missing"),
        ({"weights/block.0.w": torch.zeros(7, 30)}, r"is float32 \[30, 7\] instead of float32 \[7, 30\]"),
        ({"weights/block.0.w": torch.zeros(30, 7).bfloat16()}, r"instead of bfloat16 \[30, 7\]"),
        ({"weights/block.0.w": None}, "weights/block.0.w is not part of it"),
    ],
)
def test_another_models_checkpoint_is_refused_with_the_tensors_that_differ(tmp_path, change, words):
    path = Checkpointer(tmp_path).save(1, state_of(1), {"step": 1})
    target = {name: tensor for name, tensor in {**state_of(0), **change}.items() if tensor is not None}
    with pytest.raises(ForeignCheckpointError, match=words) as error:
        load_checkpoint(path, target)
    assert error.value.state == {"step": 1}
    assert all(not tensor.any() for name, tensor in target.items() if name != "exp_avg/block.0.w")


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory):
    return Checkpointer(tmp_path_factory.mktemp("whole")).save(4, state_of(4), {"tokens": 99, "text": "abc"})


@settings(max_examples=50, deadline=None)
@given(file=st.integers(0, 2), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), is_cut=st.booleans())
def test_any_altered_bit_and_any_cut_is_detected_and_the_file_named(whole_checkpoint, file, place, bit, is_cut):
    path = sorted(whole_checkpoint.iterdir())[file]
    content = path.read_bytes()
    position = int(place * len(content))
    altered = bytes([content[position] ^ (1 << bit)])
    path.write_bytes(content[:position] + (b"" if is_cut else altered + content[position + 1 :]))
    try:
        with pytest.raises(DamagedCheckpointError, match=path.name):
            load_checkpoint(whole_checkpoint, state_of(0))
        with pytest.raises(DamagedCheckpointError):
            verify_checkpoint(whole_checkpoint)
    finally:
        path.write_bytes(content)
    assert verify_checkpoint(whole_checkpoint) == load_checkpoint(whole_checkpoint, state_of(0)).step == 4
