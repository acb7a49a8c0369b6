"""Lines of progress: none for quick work, one now and then for long work, and no harm from a closed console."""

import contextlib
import io
from functools import partial

import pytest

from torchround.untrusted.progress import EVERY_S, Progress


def advanced(progress, now, times, step_s):
    for _ in range(times):
        now[0] += step_s
        progress.advance(2)


@pytest.fixture
def saving():
    now = [100.0]
    return partial(advanced, Progress("saving step-5", 40, "{} MiB".format, clock=lambda: now[0]), now)


def test_quick_work_prints_nothing(saving, capsys):
    saving(times=19, step_s=EVERY_S / 20)
    assert capsys.readouterr() == ("", "")


def test_long_work_prints_a_line_now_and_then(saving, capsys):
    saving(times=20, step_s=EVERY_S / 5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"saving step-5: {done} MiB of 40 MiB ({done * 5 // 2} %)" for done in (10, 20, 30, 40)]


def test_work_of_unknown_size_is_counted_and_a_hostile_name_is_escaped(capsys):
    now = [0.0]
    progress = Progress("reading \x1b[2J.jsonl", clock=lambda: now[0])
    now[0] = EVERY_S
    progress.advance(12345)
    assert capsys.readouterr().err == "reading \\x1b[2J.jsonl: 12,345\n"


def test_a_closed_console_does_not_end_the_work(saving):
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stderr(closed):
        saving(times=3, step_s=EVERY_S)
