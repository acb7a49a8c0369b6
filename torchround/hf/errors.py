"""The one error of this room: a Hugging Face folder that cannot be used as it is."""


class HFError(Exception):
    """Something is missing, damaged, or of another model; the message holds the path and the names."""
