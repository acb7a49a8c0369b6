"""Checkpoints of several machines: saved together, loaded on any number of machines."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support.disks import files_limited_to
from tests.support.joint_teams import together
from tests.support.small_run import flip_last_bit
from torchround.checkpoint import (
    Checkpointer,
    CheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    load_checkpoint,
    verify_checkpoint,
)
from torchround.checkpoint.folders import REPLACED, checkpoint_name

STATE = {"tokens": 12_345_678_901, "loss_scale": 0.1, "config": {"run": {"name": "é"}}}
NAMES = [f"{kind}/block.{layer}.w" for layer in range(6) for kind in ("weights", "exp_avg", "exp_avg_sq")]


def whole_state(seed):
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(5, 300, generator=generator) for name in NAMES}
    return {**state, "weights/frozen": torch.randn(64, generator=generator).bfloat16()}


def owned_by(rank, size, seed):
    state = whole_state(seed)
    names = [name for index, name in enumerate(NAMES) if index // 3 % size == rank]
    return {name: state[name] for name in [*names, *(["weights/frozen"] if rank == 0 else [])]}


def wanted_by(rank, size):
    frozen = whole_state(0)["weights/frozen"]
    return {name: torch.zeros_like(t) for name, t in {**owned_by(rank, size, 0), "weights/frozen": frozen}.items()}


def equal(found, expected):
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def save(root, num_machines, *steps, **keep):
    def work(team):
        checkpointer = Checkpointer(root / "run", **keep, team=team)
        for step in steps:
            own_state = {**STATE, "rank": team.rank, "step": step}
            checkpointer.save(step, owned_by(team.rank, team.size, step), own_state)

    together(num_machines, work)


def load(root, num_machines, **options):
    def work(team):
        tensors = wanted_by(team.rank, team.size)
        try:
            loaded = Checkpointer(root / "run", team=team).load_latest(tensors)
        except CheckpointError as error:
            return str(error)
        if loaded is not None:
            assert tensors.keys() == loaded.filled and equal(tensors, whole_state(loaded.step))
        return loaded

    return together(num_machines, work, **options)


def loaded_steps(*arguments):
    return {loaded.step for loaded in load(*arguments)}


def test_what_three_machines_save_together_any_number_loads_bit_for_bit(tmp_path):
    save(tmp_path, 3, 3)
    path = tmp_path / "run" / checkpoint_name(3)
    tensor_files = [f"tensors-{number:05d}.safetensors" for number in (0, 100_000, 200_000)]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.json", *tensor_files]
    assert json.loads((path / "state.json").read_text()) == {**STATE, "rank": 0, "step": 3}
    assert verify_checkpoint(path) == 3
    # One machine reads it like any other.
    alone = {name: torch.zeros_like(tensor) for name, tensor in whole_state(3).items()}
    assert load_checkpoint(path, alone).state == {**STATE, "rank": 0, "step": 3} and equal(alone, whole_state(3))
    for num_machines in (2, 4):
        assert {(loaded.step, loaded.path) for loaded in load(tmp_path, num_machines)} == {(3, path)}
    # What one machine saved, several load, also if a kill left it while it was replaced.
    Checkpointer(tmp_path / "run").save(5, whole_state(5), STATE)
    (tmp_path / "run" / checkpoint_name(5)).rename(tmp_path / "run" / checkpoint_name(5, REPLACED))
    assert all(loaded.step == 5 and loaded.state == STATE for loaded in load(tmp_path, 2))


def reads_its_files(folder):
    """Be a process of its own: a hook of its file system stays until its end."""
    folder, opened = Path(folder), []
    save(folder, 3, 3)

    def note(event, details):
        if event == "open" and str(details[0]).startswith(f"{folder}/run/{checkpoint_name(3)}/tensors"):
            opened.append(Path(details[0]).name)  # threads that count at once may lose one

    sys.addaudithook(note)
    load(folder, 3)
    # Each reads every header. Then each reads its own file, and that of the frozen tensor.
    assert [opened.count(f"tensors-{rank}00000.safetensors") for rank in (1, 2)] == [3 + 1, 3 + 1]
    assert opened.count("tensors-00000.safetensors") == 3 + 3


def test_a_machine_reads_only_the_files_that_hold_its_tensors(processes, tmp_path):
    child = processes.run("tests.checkpoint.test_joint_checkpoints:reads_its_files", str(tmp_path), folder=tmp_path)
    assert child.returncode == 0, child.text()


def test_damage_that_one_machine_finds_makes_all_take_the_step_before(tmp_path, caplog):
    save(tmp_path, 2, 1, 2)
    flip_last_bit(tmp_path / "run" / checkpoint_name(2) / "tensors-100000.safetensors")
    assert loaded_steps(tmp_path, 2) == {1}
    assert "machine 1: tensors-100000.safetensors has checksum" in caplog.text


def test_a_file_that_vanishes_at_any_moment_of_a_load_fails_it_on_all_or_on_none(tmp_path):
    found = []
    for number in itertools.count(1):
        root, left = tmp_path / str(number), [number]
        save(root, 2, 1)

        def vanish(rank, root=root, left=left):
            if rank != 0:
                return
            left[0] -= 1
            if left[0] == 0:
                (root / "run" / checkpoint_name(1) / "tensors-00000.safetensors").unlink(missing_ok=True)

        outcomes = load(root, 2, before_exchange=vanish)
        assert len({isinstance(outcome, str) for outcome in outcomes}) == 1, outcomes
        found.append(outcomes[0])
        if left[0] > 0:
            break
    assert any("tensors-00000.safetensors cannot be read" in str(outcome) for outcome in found)
    assert found[-1].step == 1


def test_tensors_of_another_model_are_refused_with_the_same_message_on_all(tmp_path):
    save(tmp_path, 2, 1, 2)

    def load(team):
        tensors = wanted_by(team.rank, team.size)
        if team.rank == 1:
            tensors["weights/block.9.w"] = torch.zeros(2)
        with pytest.raises(ForeignCheckpointError) as caught:
            Checkpointer(tmp_path / "run", team=team).load_latest(tensors)
        assert caught.value.state["step"] == 2
        return str(caught.value)

    [message] = set(together(2, load))
    assert f"{checkpoint_name(2)}: machine 1: 1 tensors are not this model's: weights/block.9.w" in message


def test_a_given_checkpoint_is_loaded_together_and_one_that_is_nowhere_is_named(tmp_path):
    save(tmp_path, 2, 1)

    def load(team):
        tensors, folder = wanted_by(team.rank, team.size), tmp_path / "run"
        loaded = load_checkpoint(folder / checkpoint_name(1), tensors, team=team)
        with pytest.raises(NoCheckpointError, match=f"legal: one checkpoint, such as .*{checkpoint_name(1)}"):
            load_checkpoint(folder, tensors, team=team)
        with pytest.raises(NoCheckpointError, match=checkpoint_name(7)):
            load_checkpoint(folder / checkpoint_name(7), tensors, team=team)
        return loaded.step == 1 and equal(tensors, whole_state(1))

    assert together(2, load) == [True, True]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_fails_on_one_machine_fails_the_save_on_all_and_the_next_succeeds(tmp_path, failing):
    save(tmp_path, 2, 1)

    def fail(team):
        tensors = owned_by(team.rank, team.size, 2)
        if team.rank == failing:  # only its file is too large
            tensors["weights/large"] = torch.zeros(2**20)
        with pytest.raises(CheckpointError, match=f"step 2 could not be written(.|\n)*machine {failing}: "):
            Checkpointer(tmp_path / "run", keep_latest_k=1, team=team).save(2, tensors, STATE)

    with files_limited_to(2**20):
        together(2, fail)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [checkpoint_name(1)]
    save(tmp_path, 2, 2, keep_latest_k=1)
    assert loaded_steps(tmp_path, 2) == {2}
