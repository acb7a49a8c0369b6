"""A run says which devices take turns on a link, and its losses do not depend on that."""

from tests.support.small_run import small_runs

__all__ = ["small_runs"]


def test_a_run_in_turns_says_so_and_has_the_same_losses(small_runs, capsys):
    assert small_runs("apart", "--engine.num_devices=3") == 0
    assert "links " not in capsys.readouterr().out, "virtual devices have no link to measure"
    assert small_runs("turns", "--engine.num_devices=3", "--engine.share_links=true") == 0
    assert "links    devices 0 to 2 take turns (engine.share_links)" in capsys.readouterr().out
    assert small_runs.losses("turns") == small_runs.losses("apart")
