"""Channels between all machines: each carries small values, for one thread of every machine.

A channel has a gloo group of its own. Threads that gather at the same time therefore never mix their values, and no
order between them has to be agreed.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from torchround.machines.errors import MachineError

CHANNELS = ("start", "batches", "steps", "validation", "saves", "metrics")
"""Names of the channels, one for each thread that agrees with its like on the other machines."""

# A value this short travels in one exchange; a longer one needs a second, whose length the first has told.
SHORT_BYTES = 4096
LENGTH_BYTES = 8

Explain = Callable[[Exception, int | None, str], MachineError]


class Channel:
    """One thread's way to learn a value of each machine. All machines must gather the same number of times."""

    def __init__(self, group: ProcessGroup, explain: Explain) -> None:
        self._group, self._explain = group, explain

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return each machine's value, in the order of ranks. Block until every machine has given its own.

        `value` is anything that JSON can write. Floats arrive exactly, infinities included. `what` names the value in
        messages: "the losses of step 12". Raises MachineError if a machine is lost meanwhile.
        """
        text = json.dumps(value).encode()
        try:
            heads = self._exchange(len(text).to_bytes(LENGTH_BYTES, "little") + text[:SHORT_BYTES], 0)
            longest = max(int.from_bytes(head[:LENGTH_BYTES], "little") for head in heads)
            rests = (
                self._exchange(text[SHORT_BYTES:], longest - SHORT_BYTES) if longest > SHORT_BYTES else None
            )
        except RuntimeError as error:
            raise self._explain(error, None, what) from error
        values = []
        for rank, head in enumerate(heads):
            num_bytes = int.from_bytes(head[:LENGTH_BYTES], "little")
            whole = head[LENGTH_BYTES:] + (rests[rank] if rests is not None else b"")
            values.append(json.loads(whole[:num_bytes]))
        return values

    def _exchange(self, part: bytes, num_bytes: int) -> list[bytes]:
        """Return the bytes of all machines, each padded to `num_bytes`; 0 means the size of a first exchange."""
        num_bytes = num_bytes or LENGTH_BYTES + SHORT_BYTES
        own = torch.frombuffer(bytearray(part.ljust(num_bytes, b"\0")), dtype=torch.uint8)
        all_values = [torch.empty_like(own) for _ in range(self._group.size())]
        self._group.allgather([all_values], [own]).wait()
        return [values.numpy().tobytes() for values in all_values]
