"""Single bytes flipped and files cut short anywhere in a real run's newest checkpoint: named, and the one before used."""

import logging
import random
import re

import pytest
import torch

from tests.support.small_run import ASYNC, STEPS, small_runs
from torchround.checkpoint import Checkpointer, DamagedCheckpointError, verify_checkpoint

__all__ = ["small_runs"]

HEADER_BYTES = 3000  # of a tensor file: length, names and offsets


def damage(path, moment):
    """Flip one byte of the file or cut off its end. Returns a text that says what was done, and the whole content."""
    whole = path.read_bytes()
    in_header = path.suffix == ".safetensors" and moment.random() < 0.5
    place = moment.randrange(min(len(whole), HEADER_BYTES) if in_header else len(whole))
    if moment.random() < 0.3:
        path.write_bytes(whole[:place])
        return f"{path.name} cut at byte {place}", whole
    flipped = whole[place] ^ moment.randint(1, 255)
    path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
    return f"{path.name}, byte {place}: {whole[place]} -> {flipped}", whole


@pytest.mark.parametrize("places", [24, pytest.param(200, marks=pytest.mark.nightly)])
def test_every_flipped_byte_and_every_cut_is_named_and_the_checkpoint_before_is_used(small_runs, caplog, places):
    assert small_runs("run", ASYNC, "--checkpoint.interval_steps=4") == 0
    checkpointer, expected = Checkpointer(small_runs.path("run") / "checkpoints"), small_runs.state("run", 4)
    newest = checkpointer.folder / f"step-{STEPS}"
    files, moment = sorted(newest.iterdir()), random.Random(11)
    tensors = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    for place in range(places):
        path = files[place % len(files)]
        what, whole = damage(path, moment)
        caplog.clear()
        for tensor in tensors.values():
            tensor.zero_()
        loaded = checkpointer.load_latest(tensors)
        assert loaded is not None and loaded.step == 4, what
        assert all(torch.equal(tensors[name], expected[name]) for name in expected), what
        [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert f"checkpoint {newest}: " in warning.getMessage() and path.name in warning.getMessage(), what
        with pytest.raises(DamagedCheckpointError, match=re.escape(path.name)):
            verify_checkpoint(newest)
        path.write_bytes(whole)
    assert verify_checkpoint(newest) == STEPS


def test_a_complete_run_whose_last_checkpoint_is_damaged_trains_its_last_steps_again(small_runs, caplog, capsys):
    """All sizes stay the same, so a check of sizes alone would call the run complete."""
    every_second = ["--checkpoint.interval_steps=2", "--checkpoint.keep_latest_k=0"]
    assert small_runs("whole") == 0 and small_runs("run", *every_second) == 0
    path = small_runs.path("run") / "checkpoints" / f"step-{STEPS}" / "tensors-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert small_runs("run", *every_second) == 0
    assert f"step-{STEPS}: {path.name} has checksum" in caplog.text
    assert "resuming after step 4 " in capsys.readouterr().out
    small_runs.assert_same("run", "whole")
    assert small_runs("run", *every_second) == 0 and "nothing to do" in capsys.readouterr().out
