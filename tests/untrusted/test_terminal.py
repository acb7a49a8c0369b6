"""What is printed: quoted text of untrusted files cannot command a terminal or fill it, and progress is said now and then."""

import contextlib
import io
import unicodedata
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.untrusted import terminal
from torchround.untrusted.terminal import EVERY_S, MOST_CHARACTERS, Progress, escape_unprintable, terminal_safe


@settings(max_examples=80, deadline=None)
@given(text=st.text())
def test_control_characters_are_escaped_and_everything_else_is_kept(text):
    """Checked against the Unicode categories of control, format, surrogate and unassigned characters."""
    result = escape_unprintable(text)
    assert all(letter == "\n" or unicodedata.category(letter)[0] != "C" for letter in result)
    result.encode()
    if text.isprintable():
        assert result == text


def test_control_characters_become_python_escapes():
    assert terminal_safe("a\x1b]0;x\x07\x9b2J\u202e\ud800") == r"a\x1b]0;x\x07\x9b2J\u202e\ud800"


def test_each_line_of_a_message_that_is_too_long_loses_its_middle():
    message = terminal_safe("first", "a" * 5000 + "z" * 5000, "last")
    half = MOST_CHARACTERS // 2
    assert message == f"first\n  {'a' * half} .. {'z' * half}\n  last"


@pytest.fixture
def now(monkeypatch):
    """Set the time of progress in its first element."""
    now = [100.0]
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def advanced(progress, now, times, step_s):
    for _ in range(times):
        now[0] += step_s
        progress.advance(2)


@pytest.fixture
def saving(now):
    return partial(advanced, Progress("saving", 40, "{} MiB".format), now)


def test_long_work_prints_a_line_now_and_then_and_quick_work_nothing(saving, capsys):
    saving(times=4, step_s=EVERY_S / 5)
    assert capsys.readouterr() == ("", "")
    saving(times=16, step_s=EVERY_S / 5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"saving: {done} MiB of 40 MiB ({done * 5 // 2} %)" for done in (10, 20, 30, 40)]


def test_work_of_unknown_size_is_counted_and_a_hostile_name_is_escaped(now, capsys):
    progress = Progress("reading \x1b[2J.jsonl")
    now[0] += EVERY_S
    progress.advance(12345)
    assert capsys.readouterr().err == "reading \\x1b[2J.jsonl: 12,345\n"


def test_a_closed_console_does_not_end_the_work(saving):
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stderr(closed):
        saving(times=3, step_s=EVERY_S)
