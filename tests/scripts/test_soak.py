"""The soak: one iteration of it, and that it tells of a run whose result somebody altered."""

import json
import re
from pathlib import Path

import pytest
import xxhash

from scripts.soak import main, newest
from torchround.checkpoint import verify_checkpoint


def alter_a_weight(run: Path) -> None:
    """The last bit of the last checkpoint, with a checksum that fits: only the comparison can tell."""
    path = run / "checkpoints" / "step-12"
    tensors = path / "tensors-00000.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-4] ^= 1
    tensors.write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["xxh3_128"]
    manifest["files"][tensors.name]["xxh3_128"] = xxhash.xxh3_128_hexdigest(bytes(content))
    manifest["xxh3_128"] = xxhash.xxh3_128_hexdigest(json.dumps(manifest).encode())
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))
    assert verify_checkpoint(path) == 12


def test_an_iteration_ends_as_a_run_that_was_left_alone_and_one_altered_bit_is_told_with_how_to_see_it_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs: list[Path] = []

    def alter_the_second(run: Path) -> None:
        runs.append(run)
        if len(runs) == 2:
            alter_a_weight(run)

    arguments = ["--minutes=10", "--iterations=2", "--seed=1", f"--folder={tmp_path}"]
    assert main(arguments, tamper=alter_the_second) == 1
    told = capfd.readouterr().out
    assert re.search(r"^iteration 0 \(.* s\): .*: the same$", told, re.MULTILINE), told
    assert "again: --seed 1 --only 1" in told and "1 of " in told and "tensors differ" in told, told
    assert re.search(r"^2 iterations in .* minutes, seed 1: .*\n1 failed: 1$", told, re.MULTILINE), told
    [kept] = tmp_path.glob("*/iteration-*")
    assert kept.name == "iteration-1"
    assert newest(kept / "outputs" / "run" / "checkpoints", set()) == 12
