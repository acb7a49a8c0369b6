"""A damaged checkpoint of a real run: named, and the one before used. `tests/checkpoint/test_damage.py` damages any byte."""

from tests.support.small_run import STEPS, small_runs

__all__ = ["small_runs"]


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
