"""Makes text from untrusted files safe to print. Every error that quotes such a file passes its message through here."""

from contextlib import suppress

MOST_CHARACTERS = 2000  # of each part of a message


def terminal_safe(message: object, *lines: object) -> str:
    """Return `message`, with each of `lines` indented below it, safe to print in a terminal.

    Control characters are escaped, so they cannot command the terminal. Each part longer than `MOST_CHARACTERS`
    loses its middle, so it cannot fill the terminal.
    """
    return "\n  ".join(escape_unprintable(_shortened(str(part))) for part in (message, *lines))


def escape_unprintable(text: str) -> str:
    """Replace each unprintable character by its Python escape. Newlines stay. The length is not limited."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS // 2]} .. {text[-MOST_CHARACTERS // 2 :]}"


def say(line: str) -> None:
    """Print one line to standard output, safe for a terminal.

    A reader that has gone away, as after `| head`, does not end the run: the line is dropped.
    """
    with suppress(OSError):
        print(escape_unprintable(line), flush=True)
