"""Saving and loading: restored values, kept checkpoints, and the state after a failing disk."""

import logging
import mmap
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from torchround.checkpoint import Checkpointer, CheckpointError, load_checkpoint, verify_checkpoint
from torchround.checkpoint.folders import DELETED, REPLACED, UNFINISHED, checkpoint_name

STATE = {
    "tokens": 12_345_678_901,
    "data": {"file": 3, "buffer": [1, 2, 3], "epoch": 0},
    "rng": "q83v",
    "loss_scale": 0.1,
    "wandb_run_id": None,
    "config": {"run": {"name": "é"}, "optimizer": {"betas": [0.9, 0.95]}},
}


def flat_state(value=0.0):
    """Make views into flat buffers, as the host store has them, and a few other dtypes."""
    views = {}
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        parts = torch.full((680,), value).split((400, 64, 8, 192, 8, 8))
        views |= {f"{kind}/p{index}": part.view(-1, 8) for index, part in enumerate(parts)}
    views["master/p5"] = torch.full((8,), value, dtype=torch.bfloat16)
    views["count"] = torch.tensor(int(value))
    return views


def random_state(seed):
    generator = torch.Generator().manual_seed(seed)
    state = flat_state()
    for tensor in state.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 100)
    return state


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_tensors_and_state_come_back_bit_for_bit_in_place(tmp_path):
    saved = random_state(1)
    saved["weights/p5"][0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    path = Checkpointer(tmp_path / "run" / "checkpoints").save(7, saved, STATE)
    assert path == tmp_path / "run" / "checkpoints" / checkpoint_name(7)
    moved = path.rename(tmp_path / "the best one")
    target = flat_state()
    addresses = [tensor.data_ptr() for tensor in target.values()]
    loaded = load_checkpoint(moved, target)
    assert loaded.step == 7 and loaded.state == STATE and loaded.path == moved
    assert [tensor.data_ptr() for tensor in target.values()] == addresses
    for name, tensor in saved.items():
        assert torch.equal(target[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


def test_a_folder_without_checkpoints_loads_nothing(tmp_path):
    target = random_state(3)
    assert Checkpointer(tmp_path / "nowhere").load_latest(target) is None
    assert Checkpointer(tmp_path).latest_step() is None
    (tmp_path / checkpoint_name(4, UNFINISHED)).mkdir()
    (tmp_path / checkpoint_name(5)).write_text("a file, not a folder")
    (tmp_path / "notes").mkdir()
    assert Checkpointer(tmp_path).load_latest(target) is None
    assert equal(target, random_state(3))


def test_the_newest_checkpoint_is_the_one_of_the_highest_step_not_the_last_by_name(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for step in (9, 100, 20):
        checkpointer.save(step, random_state(step), {"step": step})
    assert checkpointer.complete_steps() == [9, 20, 100] and checkpointer.latest_step() == 100
    target = flat_state()
    loaded = checkpointer.load_latest(target)
    assert loaded is not None and loaded.state == {"step": 100} and equal(target, random_state(100))


@pytest.mark.parametrize(
    ("latest", "every", "left"),
    [(0, 0, range(1, 9)), (1, 0, [8]), (2, 0, [7, 8]), (1, 3, [3, 6, 8]), (2, 4, [4, 7, 8]), (0, 3, range(1, 9))],
)
def test_the_newest_are_kept_and_every_nth_step_besides(tmp_path, latest, every, left):
    checkpointer = Checkpointer(tmp_path, keep_latest_k=latest, keep_every_n_steps=every)
    for step in range(1, 9):
        checkpointer.save(step, {"w": torch.zeros(1)}, {})
    assert names_in(tmp_path) == {checkpoint_name(step) for step in left}


def test_keep_latest_k_counts_complete_ones_only(tmp_path):
    for step in (1, 2, 3):
        Checkpointer(tmp_path).save(step, random_state(step), STATE)
    (tmp_path / checkpoint_name(3) / "state.json").unlink()
    assert Checkpointer(tmp_path).complete_steps() == [1, 2]
    Checkpointer(tmp_path, keep_latest_k=2).save(4, random_state(4), STATE)
    assert Checkpointer(tmp_path).complete_steps() == [2, 4]


def test_the_checkpoint_just_saved_is_never_deleted_in_favour_of_a_higher_step(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_latest_k=1)
    checkpointer.save(50, random_state(50), STATE)
    checkpointer.save(10, random_state(10), STATE)
    assert 10 in checkpointer.complete_steps()


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, random_state(1), {"try": 1})
    (tmp_path / checkpoint_name(5) / "manifest.json").write_bytes(b"damaged")
    checkpointer.save(5, random_state(2), {"try": 2})
    target = flat_state()
    loaded = checkpointer.load_latest(target)
    assert loaded is not None and loaded.state == {"try": 2} and equal(target, random_state(2))
    assert names_in(tmp_path) == {checkpoint_name(5)}


def test_a_step_saved_again_that_cannot_be_renamed_leaves_the_former_one(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(5, random_state(1), {"try": 1})

    rename, refusals = Path.rename, [1]

    def refuse_once(path, target):
        if refusals:
            refusals.clear()
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="earlier checkpoints are untouched"):
        patch.setattr(Path, "rename", refuse_once)
        checkpointer.save(5, random_state(2), {"try": 2})
    loaded = checkpointer.load_latest(flat_state())
    assert loaded is not None and loaded.state == {"try": 1} and names_in(tmp_path) == {checkpoint_name(5)}


def test_the_next_save_removes_the_leftovers_of_killed_saves_and_nothing_else(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, random_state(1), STATE)
    leftovers = (checkpoint_name(2, UNFINISHED), checkpoint_name(0, DELETED), checkpoint_name(1, REPLACED))
    for name in (*leftovers, "best", "step-x.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors-00000.safetensors").write_bytes(b"half")
    (tmp_path / checkpoint_name(3, UNFINISHED)).write_text("a file")
    assert checkpointer.complete_steps() == [1]
    checkpointer.save(2, random_state(2), STATE)
    others = {"best", "step-x.tmp", checkpoint_name(3, UNFINISHED)}
    assert names_in(tmp_path) == {checkpoint_name(1), checkpoint_name(2)} | others


def test_a_checkpoint_whose_replacement_was_killed_still_counts(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep_latest_k=2)
    checkpointer.save(5, random_state(5), STATE)
    (tmp_path / checkpoint_name(5)).rename(tmp_path / checkpoint_name(5, REPLACED))
    (tmp_path / checkpoint_name(5, UNFINISHED)).mkdir()
    target = flat_state()
    loaded = checkpointer.load_latest(target)
    assert loaded is not None and loaded.step == 5 and equal(target, random_state(5))
    assert checkpointer.complete_steps() == [5]
    checkpointer.save(6, random_state(6), STATE)
    assert names_in(tmp_path) == {checkpoint_name(5), checkpoint_name(6)}


def test_a_checkpoint_larger_than_the_free_space_is_refused_before_anything_is_written(tmp_path):
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    # A mapping that is only read takes addresses and no memory.
    mapping = mmap.mmap(-1, free_bytes + 2**30, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that is not writable
        huge = {"weights": torch.frombuffer(mapping, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="GiB are free"):
        Checkpointer(tmp_path).save(1, huge, {})
    assert names_in(tmp_path) == set()


def test_a_folder_that_cannot_be_made_is_an_error_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/checkpoints"):
        Checkpointer(tmp_path / "file" / "checkpoints").save(1, flat_state(), {})


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, caplog, monkeypatch):
    checkpointer = Checkpointer(tmp_path / "run", keep_latest_k=1)
    checkpointer.save(1, random_state(1), STATE)

    def refuse(path, ignore_errors=False):
        raise PermissionError(13, "Permission denied", str(path))

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        checkpointer.save(2, random_state(2), STATE)
    assert "could not delete" in caplog.text and checkpoint_name(1) in caplog.text
    assert checkpointer.latest_step() == 2
    checkpointer.save(3, random_state(3), STATE)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [checkpoint_name(3)], "the next save deletes it"


def moved_to_another_disk(checkpoint, disk):
    checkpoint.rename(disk)
    checkpoint.symlink_to(disk)
    return checkpoint


def test_a_checkpoint_behind_a_link_is_loaded_and_only_its_link_is_ever_deleted(tmp_path):
    checkpointer, disk = Checkpointer(tmp_path / "run", keep_latest_k=1), tmp_path / "disk"
    checkpointer.save(1, random_state(1), STATE)
    moved_to_another_disk(tmp_path / "run" / checkpoint_name(1), disk)
    views = {name: torch.zeros_like(tensor) for name, tensor in random_state(1).items()}
    loaded = checkpointer.load_latest(views)
    assert loaded is not None and loaded.step == 1 and equal(views, random_state(1))
    checkpointer.save(2, random_state(2), STATE)
    assert verify_checkpoint(disk) == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == [checkpoint_name(2)]


def test_saving_a_step_again_replaces_a_link_and_not_what_it_points_to(tmp_path):
    for disk_is_there in (True, False):
        folder, disk = tmp_path / f"run-{disk_is_there}", tmp_path / f"disk-{disk_is_there}"
        checkpointer = Checkpointer(folder)
        checkpointer.save(1, random_state(1), STATE)
        link = moved_to_another_disk(folder / checkpoint_name(1), disk)
        if not disk_is_there:
            shutil.rmtree(disk)
        checkpointer.save(1, random_state(2), STATE)
        assert not link.is_symlink() and verify_checkpoint(link) == 1 and disk.exists() == disk_is_there
        assert [path.name for path in folder.iterdir()] == [checkpoint_name(1)]


def test_a_link_to_a_disk_that_is_not_there_is_named_and_not_passed_over(tmp_path, caplog):
    checkpointer = Checkpointer(tmp_path / "run")
    for step in (1, 2):
        checkpointer.save(step, random_state(step), STATE)
    shutil.rmtree(moved_to_another_disk(tmp_path / "run" / checkpoint_name(2), tmp_path / "disk").resolve())
    views = {name: torch.zeros_like(tensor) for name, tensor in random_state(1).items()}
    loaded = checkpointer.load_latest(views)
    assert loaded is not None and loaded.step == 1
    assert re.search(rf"{checkpoint_name(2)}: manifest.json cannot be read.*trying the checkpoint before", caplog.text)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("turned", torch.zeros(4, 6).t()),
        ("strided", torch.zeros(10)[::2]),
        ("complex", torch.zeros(3, dtype=torch.complex64)),
        ("elsewhere", torch.zeros(3, device="meta")),
    ],
)
def test_a_tensor_that_cannot_be_written_in_place_is_refused_by_name(tmp_path, name, tensor):
    with pytest.raises(ValueError, match=f"{name} cannot be stored"):
        Checkpointer(tmp_path).save(1, {"fine": torch.zeros(2), name: tensor}, {})
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("state", [{"rng": torch.zeros(2)}, {"path": [Path("x")]}])
def test_a_state_that_json_cannot_give_back_is_refused(tmp_path, state):
    with pytest.raises(ValueError, match="cannot be stored as JSON"):
        Checkpointer(tmp_path).save(1, flat_state(), state)
    assert names_in(tmp_path) == set()


def test_every_byte_is_synced_before_the_rename_and_the_rename_after(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync

    def recording_sync(descriptor):
        # The kernel's name for the file at this moment: still unfinished unless the rename came first.
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((path.removeprefix(f"{tmp_path}/"), (tmp_path / checkpoint_name(1)).exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", recording_sync)
    Checkpointer(tmp_path).save(1, flat_state(), STATE)
    written = {f"{checkpoint_name(1, UNFINISHED)}/{path.name}" for path in (tmp_path / checkpoint_name(1)).iterdir()}
    before = [path for path, renamed in synced if not renamed]
    assert written <= set(before) and before[-1] == checkpoint_name(1, UNFINISHED)
    assert synced[-1] == (str(tmp_path), True)
