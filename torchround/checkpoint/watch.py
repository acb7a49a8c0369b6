"""What a save tells whoever else uses the memory it reads, so that training may go on beside it."""

from typing import Protocol

from torch import Tensor


class SaveWatch(Protocol):
    """Called by the saving thread, in this order, for every tensor and then once at the end."""

    def may_go_on(self) -> None:
        """Between pieces: raises to give the save up, which then leaves its unfinished folder as it is."""

    def reading(self, tensor: Tensor) -> None:
        """The tensor's bytes are about to be read."""

    def finished_reading(self, name: str) -> None:
        """The named tensor is not read again; it may not be on the disk yet."""

    def before_publishing(self) -> None:
        """Everything is on the disk: returns once the checkpoint may count as one. Raises to give it up."""


class Alone:
    """Nobody else uses the memory."""

    def may_go_on(self) -> None:
        pass

    def reading(self, tensor: Tensor) -> None:
        pass

    def finished_reading(self, name: str) -> None:
        pass

    def before_publishing(self) -> None:
        pass
