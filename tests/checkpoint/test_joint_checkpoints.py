"""Checkpoints of several machines: saved together, loaded on any number of machines, in one folder or on disks of their own."""

import json
import shutil

import pytest
import torch

from tests.support.disks import files_limited_to
from tests.support.machines import run_machines
from torchround.checkpoint import (
    Checkpointer,
    CheckpointError,
    ForeignCheckpointError,
    MachineTeam,
    NoCheckpointError,
    load_checkpoint,
    verify_checkpoint,
)
from torchround.checkpoint.step_folder import read_file
from torchround.machines.errors import MachineError

STATE = {"tokens": 12_345_678_901, "loss_scale": 0.1, "config": {"run": {"name": "é"}}}
NAMES = [f"{kind}/block.{layer}.w" for layer in range(6) for kind in ("weights", "exp_avg", "exp_avg_sq")]


def whole_state(seed):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(5, 300, generator=generator) for name in NAMES}
    return {**state, "weights/frozen": torch.randn(64, generator=generator).bfloat16()}


def owned_by(rank, size, seed):
    """Return the tensors that a machine saves: layers in turn, and machine 0 the frozen one."""
    state = whole_state(seed)
    names = [name for index, name in enumerate(NAMES) if index // 3 % size == rank]
    return {name: state[name] for name in [*names, *(["weights/frozen"] if rank == 0 else [])]}


def wanted_by(rank, size):
    """Return room for the tensors that a machine loads: its own ones, and the frozen one on every machine."""
    frozen = whole_state(0)["weights/frozen"]
    return {name: torch.zeros_like(t) for name, t in {**owned_by(rank, size, 0), "weights/frozen": frozen}.items()}


def equal(found, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def folder_of(root, rank, shared):
    return root / ("run" if shared else f"disk{rank}/run")


def saves(root, shared, *steps, **keep):
    def save(group):
        team = MachineTeam.of(group, shared)
        checkpointer = Checkpointer(folder_of(root, group.rank, shared), **keep, team=team)
        for step in steps:
            own_state = {**STATE, "rank": group.rank, "step": step}
            checkpointer.save(step, owned_by(group.rank, group.size, step), own_state)

    return save


def loads(root, shared, **keep):
    def load(group):
        team = MachineTeam.of(group, shared)
        checkpointer = Checkpointer(folder_of(root, group.rank, shared), **keep, team=team)
        tensors = wanted_by(group.rank, group.size)
        loaded = checkpointer.load_latest(tensors)
        return loaded, loaded is not None and equal(tensors, whole_state(loaded.step))

    return load


def errors_of(function, num_machines=2):
    """Return the message of the `CheckpointError` that `function` raises on each machine."""

    def message(group):
        with pytest.raises(CheckpointError) as caught:
            function(group)
        return str(caught.value)

    return run_machines(num_machines, message)


def test_what_three_machines_save_together_any_number_loads_bit_for_bit(tmp_path):
    run_machines(3, saves(tmp_path, True, 3))
    path = tmp_path / "run" / "step-3"
    names = sorted(file.name for file in path.iterdir())
    assert names == [
        "manifest.json",
        "state.json",
        *(f"tensors-{number:05d}.safetensors" for number in (0, 100_000, 200_000)),
    ]
    assert json.loads((path / "state.json").read_text()) == {**STATE, "rank": 0, "step": 3}
    assert verify_checkpoint(path) == 3
    # One machine reads it like any other.
    alone = {name: torch.zeros_like(tensor) for name, tensor in whole_state(3).items()}
    assert load_checkpoint(path, alone).state == {**STATE, "rank": 0, "step": 3} and equal(alone, whole_state(3))
    for num_machines in (2, 4):
        for loaded, is_equal in run_machines(num_machines, loads(tmp_path, True)):
            assert loaded is not None and loaded.step == 3 and loaded.path == path and is_equal
    # What one machine saved, several load.
    Checkpointer(tmp_path / "run").save(5, whole_state(5), STATE)
    for loaded, is_equal in run_machines(2, loads(tmp_path, True)):
        assert loaded is not None and loaded.step == 5 and loaded.state == STATE and is_equal


def test_a_machine_reads_only_the_files_that_hold_its_tensors(tmp_path, monkeypatch):
    run_machines(3, saves(tmp_path, True, 3))
    read = []

    def noting(path, name, manifest, tensors):
        read.append((name, "weights/block.0.w" in tensors))
        read_file(path, name, manifest, tensors)

    monkeypatch.setattr("torchround.checkpoint.joint_load.read_file", noting)
    run_machines(3, loads(tmp_path, True))
    # Three machines as before: each reads its own file, and the frozen tensor's.
    assert sorted(read) == sorted(
        [("tensors-00000.safetensors", first) for first in (True, False, False)]
        + [(f"tensors-{rank}00000.safetensors", False) for rank in (1, 2)]
    )


def test_on_disks_of_their_own_each_machine_has_its_files_and_what_is_elsewhere_travels(tmp_path):
    run_machines(3, saves(tmp_path, False, 1, 2, keep_latest_k=1))
    for rank in range(3):
        names = {file.name for file in (tmp_path / f"disk{rank}/run/step-2").iterdir()}
        assert names == {"manifest.json", "state.json", f"tensors-{rank * 100_000:05d}.safetensors"}
        assert not (tmp_path / f"disk{rank}/run/step-1").exists()
    manifests = {(tmp_path / f"disk{rank}/run/step-2/manifest.json").read_bytes() for rank in range(3)}
    assert len(manifests) == 1
    # The same machines in another order: every file comes from another machine.
    for rank in range(3):
        (tmp_path / f"disk{rank}").rename(tmp_path / f"moved{(rank + 1) % 3}")
    for rank in range(3):
        (tmp_path / f"moved{rank}").rename(tmp_path / f"disk{rank}")
    for loaded, is_equal in run_machines(3, loads(tmp_path, False)):
        assert loaded is not None and loaded.state["rank"] == 0 and is_equal
    # More machines than before: the new one has nothing.
    for loaded, is_equal in run_machines(4, loads(tmp_path, False)):
        assert loaded is not None and loaded.step == 2 and is_equal
    # The files of all put together are one whole checkpoint.
    for rank in range(1, 3):
        shutil.copytree(tmp_path / f"disk{rank}/run", tmp_path / "disk0/run", dirs_exist_ok=True)
    assert verify_checkpoint(tmp_path / "disk0/run/step-2") == 2


def test_a_file_that_no_machine_has_is_named_with_the_machines_asked_and_an_older_step_is_taken(tmp_path, caplog):
    run_machines(3, saves(tmp_path, False, 1, 2))
    shutil.rmtree(tmp_path / "disk1/run/step-2")
    for loaded, is_equal in run_machines(3, loads(tmp_path, False)):
        assert loaded is not None and loaded.step == 1 and is_equal
    missing = "tensors-100000.safetensors is on none of machine 0 (node0), machine 1 (node1), machine 2 (node2)"
    assert f"step-2: {missing}; trying the checkpoint before step 2" in caplog.text
    # Two machines without the third: neither step is whole.
    messages = errors_of(loads(tmp_path, False), 2)
    assert len(set(messages)) == 2, "each names its own folder"
    assert all("none of the checkpoints" in text and text.count("on none of machine 0") == 2 for text in messages)


@pytest.mark.parametrize("shared", [True, False])
def test_damage_that_one_machine_finds_makes_all_take_the_step_before(tmp_path, shared, caplog):
    run_machines(2, saves(tmp_path, shared, 1, 2))
    damaged = folder_of(tmp_path, 1, shared) / "step-2" / "tensors-100000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    for loaded, is_equal in run_machines(2, loads(tmp_path, shared)):
        assert loaded is not None and loaded.step == 1 and is_equal
    assert "machine 1 (node1): tensors-100000.safetensors has checksum" in caplog.text


def test_a_sender_that_cannot_read_its_file_fails_the_load_on_all(tmp_path, monkeypatch):
    run_machines(2, saves(tmp_path, False, 1))

    def refuse(file, memory):
        return OSError("the disk says no")

    monkeypatch.setattr("torchround.checkpoint.joint_load._fill", refuse)
    messages = errors_of(loads(tmp_path, False))
    assert all("machine 0 (node0): tensors-00000.safetensors cannot be read: the disk says no" in m for m in messages)


def test_tensors_of_another_model_are_refused_with_the_same_message_on_all(tmp_path):
    run_machines(2, saves(tmp_path, True, 1, 2))

    def load(group):
        tensors = wanted_by(group.rank, group.size)
        if group.rank == 1:
            tensors["weights/block.9.w"] = torch.zeros(2)
        with pytest.raises(ForeignCheckpointError) as caught:
            Checkpointer(tmp_path / "run", team=MachineTeam.of(group)).load_latest(tensors)
        assert caught.value.state["step"] == 2
        return str(caught.value)

    messages = run_machines(2, load)
    assert len(set(messages)) == 1 and "step-2: 1 tensors are not this model's: weights/block.9.w" in messages[0]


def test_a_given_checkpoint_is_loaded_together_and_one_that_is_nowhere_is_named(tmp_path):
    run_machines(2, saves(tmp_path, False, 1))

    def load(group):
        tensors = wanted_by(group.rank, group.size)
        folder = folder_of(tmp_path, group.rank, shared=False)
        team = MachineTeam.of(group, shares_folder=False)
        loaded = load_checkpoint(folder / "step-1", tensors, team=team)
        with pytest.raises(NoCheckpointError, match="legal: one checkpoint, such as .*step-1"):
            load_checkpoint(folder, tensors, team=team)
        with pytest.raises(NoCheckpointError, match="step-7"):
            load_checkpoint(folder / "step-7", tensors, team=team)
        return loaded.step == 1 and equal(tensors, whole_state(1))

    assert run_machines(2, load) == [True, True]


@pytest.mark.parametrize(("shared", "failing"), [(True, 0), (True, 1), (False, 1)])
def test_a_disk_that_fails_on_one_machine_fails_the_save_on_all_and_the_next_succeeds(tmp_path, shared, failing):
    run_machines(2, saves(tmp_path, shared, 1))

    def save(group):
        team = MachineTeam.of(group, shared)
        checkpointer = Checkpointer(folder_of(tmp_path, group.rank, shared), keep_latest_k=1, team=team)
        tensors = owned_by(group.rank, group.size, 2)
        if group.rank == failing:  # only its file is too large
            tensors["weights/large"] = torch.zeros(2**20)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(2, tensors, STATE)
        return str(caught.value)

    with files_limited_to(2**20):
        messages = run_machines(2, save)
    for rank in range(2):
        assert [path.name for path in folder_of(tmp_path, rank, shared).iterdir()] == ["step-1"]
    assert all("step 2 could not be written" in text and f"(node{failing}): " in text for text in messages)
    run_machines(2, saves(tmp_path, shared, 2, keep_latest_k=1))
    for loaded, is_equal in run_machines(2, loads(tmp_path, shared)):
        assert loaded is not None and loaded.step == 2 and is_equal


def test_a_machine_that_dies_in_a_save_wakes_the_others_and_leaves_the_checkpoint_before(tmp_path):
    run_machines(2, saves(tmp_path, True, 1))

    def save(group):
        if group.rank == 1:
            group.fail("planted")
            return
        with pytest.raises(MachineError, match=r"machine 1 \(node1\).*planted"):
            saves(tmp_path, True, 2)(group)

    run_machines(2, save)
    assert Checkpointer(tmp_path / "run").complete_steps() == [1]
    run_machines(2, saves(tmp_path, True, 3, keep_latest_k=1))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-3"]
