"""Channels between all machines: each carries small values, for one thread of every machine.

A channel has a gloo group of its own. Threads that gather at the same time therefore never mix their values, and no
order between them has to be agreed.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from torchround.machines.errors import MachineError

CHANNELS = ("start", "batches", "steps", "validation", "saves", "metrics")
"""Names of the channels, one for each thread that agrees with its like on the other machines."""

# A value this short travels in one exchange; a longer one needs a second, whose length the first has told. The first
# fits into one packet of the network: gloo wakes no thread for a message of which a part has arrived, whatever happens to
# the connection. The second can have a time-out, because all machines have come to it.
SHORT_BYTES = 1024
LENGTH_BYTES = 8
# A wait looks so often whether the group has ended, because gloo may never wake it (above).
LOOK_EVERY = timedelta(seconds=1)

Explain = Callable[[Exception, int | None, str], MachineError]


class Channel:
    """One thread's way to learn a value of each machine. All machines must gather the same number of times."""

    def __init__(
        self, group: ProcessGroup, explain: Explain, rest_timeout: timedelta, is_ended: Callable[[], bool]
    ) -> None:
        """Use `group` alone. `explain` names errors; `is_ended` tells whether the group was ended by a fault."""
        self._group, self._explain, self._is_ended = group, explain, is_ended
        self._first_options, self._rest_options = AllgatherOptions(), AllgatherOptions()
        self._first_options.timeout = timedelta(days=1)
        self._rest_options.timeout = rest_timeout

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return each machine's value, in the order of ranks. Block until every machine has given its own.

        `value` is anything that JSON can write. Floats arrive exactly, infinities included. `what` names the value in
        messages: "the losses of step 12". Raises MachineError if a machine is lost meanwhile.
        """
        text = json.dumps(value).encode()
        try:
            first = len(text).to_bytes(LENGTH_BYTES, "little") + text[:SHORT_BYTES]
            heads = self._exchange(first, LENGTH_BYTES + SHORT_BYTES, self._first_options)
            longest = max(int.from_bytes(head[:LENGTH_BYTES], "little") for head in heads)
            rests = [b""] * len(heads)
            if longest > SHORT_BYTES:
                rests = self._exchange(text[SHORT_BYTES:], longest - SHORT_BYTES, self._rest_options)
        except RuntimeError as error:
            raise self._explain(error, None, what) from error
        values = []
        for head, rest in zip(heads, rests, strict=True):
            num_bytes = int.from_bytes(head[:LENGTH_BYTES], "little")
            values.append(json.loads((head[LENGTH_BYTES:] + rest)[:num_bytes]))
        return values

    def _exchange(self, part: bytes, num_bytes: int, options: Any) -> list[bytes]:
        """Return the bytes of all machines, each padded to `num_bytes`."""
        own = torch.frombuffer(bytearray(part.ljust(num_bytes, b"\0")), dtype=torch.uint8)
        all_values = [torch.empty_like(own) for _ in range(self._group.size())]
        work = self._group.allgather([all_values], [own], options)
        while True:
            try:
                work.wait(LOOK_EVERY)
                break
            except RuntimeError:  # gloo's error, or only the end of this wait
                if self._is_ended():
                    raise
                if work.is_completed():  # perhaps since that wait ended, and then without an error
                    work.wait()
                    break
        return [values.numpy().tobytes() for values in all_values]
