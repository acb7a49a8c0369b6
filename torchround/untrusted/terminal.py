"""Text from files of others, made fit for a terminal: errors that quote such files pass their messages through here."""

MOST_CHARACTERS = 2000  # of a part of a message


def terminal_safe(message: object, *lines: object) -> str:
    """`message`, and `lines` indented below it, which can neither command a terminal nor fill it.

    Each of them is cut in its middle to `MOST_CHARACTERS`.
    """
    return "\n  ".join(escape_unprintable(_cut(str(part))) for part in (message, *lines))


def escape_unprintable(text: str) -> str:
    """What is not printable as Python writes it in a string, but for line breaks."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS // 2]} .. {text[-MOST_CHARACTERS // 2 :]}"
