"""Single bytes flipped and files cut short anywhere in a real run's newest checkpoint: named, and the one before used."""

import logging
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.small_run import ASYNC, STEPS, SmallRuns, before_step, interrupt, small_runs
from torchround.checkpoint import Checkpointer, DamagedCheckpointError, verify_checkpoint

__all__ = ["small_runs"]

PLACES = 200
HEADER_BYTES = 3000  # of a tensor file: length, names and offsets


@contextmanager
def damaged(path: Path, moment: random.Random) -> Iterator[str]:
    """Flip one byte of the file or cut off its end. Returns a text that says what was done."""
    whole = path.read_bytes()
    in_header = path.suffix == ".safetensors" and moment.random() < 0.5
    place = moment.randrange(min(len(whole), HEADER_BYTES) if in_header else len(whole))
    if moment.random() < 0.3:
        what, content = f"{path.name} cut at byte {place}", whole[:place]
    else:
        flipped = whole[place] ^ moment.randint(1, 255)
        what = f"{path.name}, byte {place}: {whole[place]} -> {flipped}"
        content = whole[:place] + bytes([flipped]) + whole[place + 1 :]
    path.write_bytes(content)
    try:
        yield what
    finally:
        path.write_bytes(whole)


def test_every_flipped_byte_and_every_cut_is_named_and_the_checkpoint_before_is_used(
    small_runs: SmallRuns, caplog: pytest.LogCaptureFixture
) -> None:
    assert small_runs("run", ASYNC, "--checkpoint.interval_steps=4") == 0
    checkpointer, expected = Checkpointer(small_runs.path("run") / "checkpoints"), small_runs.state("run", 4)
    newest = checkpointer.folder / f"step-{STEPS}"
    files, moment = sorted(newest.iterdir()), random.Random(11)
    assert {re.sub(r"\d+", "N", path.name) for path in files} == {
        *("manifest.json", "state.json", "tensors-N.safetensors")
    }
    tensors = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    for place in range(PLACES):
        path = files[place % len(files)]
        with damaged(path, moment) as what:
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
    assert verify_checkpoint(newest) == STEPS


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors-00000.safetensors"])
def test_a_run_whose_newest_checkpoint_is_damaged_resumes_from_the_one_before_and_ends_the_same(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    assert small_runs("whole") == 0
    with monkeypatch.context() as patch:
        before_step(patch, 4, interrupt)
        assert small_runs("run", "--checkpoint.interval_steps=2") == 128 + signal.SIGTERM
    with damaged(small_runs.path("run") / "checkpoints" / "step-4" / name, random.Random(3)) as what:
        assert small_runs("run", "--checkpoint.keep_latest_k=0") == 0
        assert "step-4: " in caplog.text and name in caplog.text, what
    small_runs.assert_same("run", "whole")


def test_a_complete_run_whose_last_checkpoint_is_damaged_trains_its_last_steps_again(
    small_runs: SmallRuns, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
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
