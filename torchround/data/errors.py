"""What can be wrong with the data a user brings; every message names the file, and the line where there is one."""

MOST_LETTERS = 2000  # of a message: it may quote what a file says


class DataError(ValueError):
    """A source that is missing, empty or unreadable, or a saved position that belongs to other data.

    What it quotes cannot command a terminal, nor fill it.
    """

    def __init__(self, message: object) -> None:
        text = str(message)
        if len(text) > MOST_LETTERS:
            text = f"{text[: MOST_LETTERS // 2]} .. {text[-MOST_LETTERS // 2 :]}"
        super().__init__(
            "".join(
                letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
            )
        )


class TokenizerError(DataError):
    """No tokenizer is given, or its file is missing, damaged or of a kind that is not supported."""


class MissingTokenizerError(TokenizerError):
    """There is nothing at the path that `key` gives; key and message apart, for who knows where it was given."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message
