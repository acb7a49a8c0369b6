"""Tensors between machines: a link to each peer for each purpose, over several connections, with a few chunks under way.

One TCP connection carries 15 to 19 Gb/s at most, so consecutive chunks take the data groups in turn. Messages of one link
keep their order, because gloo keeps the order of messages with one tag.

A header of 16 bytes precedes each message: its number and its bytes. Gloo itself would fill only a part of the memory
that a shorter message meets, and end the process at a longer one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from enum import Enum
from itertools import cycle

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

CHUNK_BYTES = 8 << 20
CHUNKS_UNDER_WAY = 8  # of one message: two for each of four connections keep a connection busy between chunks
STAGED_CHUNKS = 4


class MessageError(RuntimeError):
    """A message that this machine did not expect."""


class Purpose(Enum):
    """What a link carries. The value is gloo's tag, so purposes never mix."""

    GRADIENTS = 1
    WEIGHTS = 2
    TRIAL = 3


class Link:
    """Both directions to one peer for one purpose. One thread at a time sends, and one at a time receives.

    A chunk of a message that has begun may take `timeout`. An error leaves the link unusable, and so does a reader that stops
    in a message.
    """

    def __init__(
        self,
        peer: int,
        purpose: Purpose,
        groups: Sequence[ProcessGroup],
        explain: Callable[[Exception, int | None, str], Exception],
        timeout: timedelta,
    ) -> None:
        self.bytes_sent = 0
        self._peer = peer
        self._tag = purpose.value
        self._groups = groups
        self._explain = explain
        self._timeout = timeout
        self._messages_sent = self._messages_received = 0
        self._staging = torch.empty(0, dtype=torch.uint8)  # `chunks` allocates it when it needs it
        # Here and not in the method: gloo may still write to chunks that an error has left under way.
        self._arriving: deque[tuple[Work, Tensor]] = deque()

    def send(self, data: Tensor, what: str) -> None:
        """Send a flat contiguous CPU tensor, whose memory gloo reads. Returns once it may be overwritten."""
        header = torch.tensor([self._messages_sent, data.nbytes])
        try:
            under_way = deque([self._groups[0].send([header.view(torch.uint8)], self._peer, self._tag)])
            for index, chunk in enumerate(_cut(data)):
                if len(under_way) == CHUNKS_UNDER_WAY:
                    under_way.popleft().wait()
                group = self._group_of(self._messages_sent, index)
                under_way.append(group.send([chunk], self._peer, self._tag))
            while under_way:
                under_way.popleft().wait()
        except RuntimeError as error:
            raise self._explain(error, self._peer, f"sending {what}") from error
        self._messages_sent += 1
        self.bytes_sent += data.nbytes

    def receive(self, into: Tensor, what: str) -> None:
        """Let gloo fill a flat contiguous CPU tensor with the peer's next message, which must have as many bytes."""
        for _ in self._arrivals(into.nbytes, _cut(into), CHUNKS_UNDER_WAY, what):
            pass

    def chunks(self, numel: int, dtype: torch.dtype, what: str) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, values) of the next message in order; values are valid until the next, while more chunks arrive."""
        nbytes = numel * dtype.itemsize
        staged = min(nbytes, STAGED_CHUNKS * CHUNK_BYTES)
        if self._staging.numel() < staged:
            self._staging = torch.empty(staged, dtype=torch.uint8)
        staging = self._staging[:staged].split(CHUNK_BYTES)
        lengths = [min(CHUNK_BYTES, nbytes - start) for start in range(0, nbytes, CHUNK_BYTES)]
        places = (place[:length] for length, place in zip(lengths, cycle(staging), strict=False))
        start = 0
        for memory in self._arrivals(nbytes, places, len(staging), what):
            values = memory.view(dtype)
            yield start, values
            start += values.numel()

    def _arrivals(self, nbytes: int, places: Iterable[Tensor], most: int, what: str) -> Iterator[Tensor]:
        """Yield each chunk of the next message once it fills its place, with up to `most` of them under way."""
        arriving = self._arriving
        try:
            self._begin(nbytes)
            for index, place in enumerate(places):
                if len(arriving) == most:
                    yield self._finish()
                # Only now: the caller may have read the last chunk from this very place.
                group = self._group_of(self._messages_received, index)
                arriving.append((group.recv([place], self._peer, self._tag), place))
            self._messages_received += 1
            while arriving:
                yield self._finish()
        except RuntimeError as error:
            raise self._explain(error, self._peer, f"receiving {what}") from error

    def _begin(self, nbytes: int) -> None:
        """Wait for the header of the next message and compare it with what this machine expects."""
        header = torch.empty(2, dtype=torch.int64)
        self._groups[0].recv([header.view(torch.uint8)], self._peer, self._tag).wait()
        number, sent_bytes = header.tolist()
        expected = self._messages_received
        if (number, sent_bytes) != (expected, nbytes):
            raise MessageError(
                f"message {number} of {sent_bytes} bytes came instead of message {expected} of {nbytes} bytes"
            )

    def _finish(self) -> Tensor:
        # With a limit, because gloo wakes no thread for a message of which a part has arrived, whatever happens to the
        # connection.
        work, chunk = self._arriving[0]
        work.wait(self._timeout)
        self._arriving.popleft()
        return chunk

    def _group_of(self, message: int, chunk: int) -> ProcessGroup:
        return self._groups[(message + chunk) % len(self._groups)]


def _cut(data: Tensor) -> Iterator[Tensor]:
    assert data.device.type == "cpu", f"a link carries host memory, not {data.device}"
    assert data.dim() == 1 and data.is_contiguous(), f"a link carries flat tensors, not {tuple(data.shape)}"
    return iter(data.detach().view(torch.uint8).split(CHUNK_BYTES) if data.numel() else ())
