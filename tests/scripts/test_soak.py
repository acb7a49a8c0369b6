"""The soak: a few iterations, its report of a run whose result was altered, and its limit on time."""

import re

import pytest

from scripts.soak import main, newest
from tests.support.hostile_cases import forge_file
from torchround.checkpoint import verify_checkpoint
from torchround.checkpoint.folders import checkpoint_name


def alter_a_weight(run):
    """Flip the last bit of the last checkpoint and make its checksum fit, so that only the comparison can tell."""
    path = run / "checkpoints" / checkpoint_name(12)
    tensors = path / "tensors-00000.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-4] ^= 1
    forge_file(tensors, bytes(content))
    assert verify_checkpoint(path) == 12


def remove_the_metrics(run):
    (run / "metrics.jsonl").unlink()


def cut_the_metrics(run):
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.nightly
def test_an_iteration_ends_as_an_undisturbed_run_and_any_difference_is_reported_with_its_command(tmp_path, capfd):
    """One is left as it is, one bit of another is altered, the metrics of two are broken and missing."""
    tampering = iter([lambda run: None, alter_a_weight, cut_the_metrics, remove_the_metrics])
    arguments = ["--minutes=10", "--iterations=4", "--seed=1", f"--folder={tmp_path}"]
    assert main(arguments, tamper=lambda run: next(tampering)(run)) == 1
    printed = capfd.readouterr().out
    assert re.search(r"^iteration 0 \(.* s\): .*: the same$", printed, re.MULTILINE), printed
    assert "again: --seed 1 --only 1" in printed and "1 of " in printed and "tensors differ" in printed, printed
    assert "JSONDecodeError" in printed and "FileNotFoundError" in printed, printed
    assert re.search(r"^4 iterations in .* minutes, seed 1: .*\n3 failed: 1, 2, 3$", printed, re.MULTILINE), printed
    kept = {path.name: path for path in tmp_path.glob("*/iteration-*")}
    assert sorted(kept) == ["iteration-1", "iteration-2", "iteration-3"]
    assert newest(kept["iteration-1"] / "outputs" / "run" / "checkpoints", set()) == 12
