"""Links that carry tensors between two machines."""

from collections.abc import Callable, Sequence

from torch.distributed import ProcessGroup


class PeerLinks:
    """All links of one machine to its peers."""

    def __init__(
        self,
        rank: int,
        size: int,
        groups: Sequence[ProcessGroup],
        explain: Callable[[Exception, int | None, str], Exception],
        bytes_per_s: float | None = None,
    ) -> None:
        self.rank, self.size, self.groups = rank, size, tuple(groups)
        self.explain, self.bytes_per_s = explain, bytes_per_s
