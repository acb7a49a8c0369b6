"""What may watch a run: the race checker's log does, production runs have none."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class Observer(Protocol):
    """Sees host hand-overs and host accesses to shared memory, in an order consistent with causality."""

    def posted(self, token: object) -> None: ...

    def waited(self, token: object) -> None: ...

    def touched(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None: ...


class Unobserved:
    """The observer of production runs: sees nothing."""

    def posted(self, token: object) -> None:
        pass

    def waited(self, token: object) -> None:
        pass

    def touched(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        pass
