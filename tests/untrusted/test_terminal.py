"""Quoted text of untrusted files can neither command a terminal nor fill it, and is otherwise unchanged."""

import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.untrusted.terminal import MOST_CHARACTERS, escape_unprintable, terminal_safe


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
