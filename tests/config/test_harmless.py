"""What is quoted of others' files can neither command a terminal nor fill it, and is otherwise as it was."""

import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.untrusted.terminal import MOST_CHARACTERS, escape_unprintable, terminal_safe


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_nothing_that_a_terminal_would_obey_is_left_and_everything_else_is(text: str) -> None:
    """By what Unicode calls a control, a format or no letter at all."""
    result = escape_unprintable(text)
    assert all(letter == "\n" or unicodedata.category(letter)[0] != "C" for letter in result)
    result.encode()
    if text.isprintable():
        assert result == text


def test_bytes_of_commands_are_written_as_python_writes_them() -> None:
    assert terminal_safe("a\x1b]0;x\x07\x9b2J\u202e\ud800") == r"a\x1b]0;x\x07\x9b2J\u202e\ud800"


def test_a_message_is_cut_in_its_middle_line_by_line() -> None:
    message = terminal_safe("first", "a" * 5000 + "z" * 5000, "last")
    half = MOST_CHARACTERS // 2
    assert message == f"first\n  {'a' * half} .. {'z' * half}\n  last"
