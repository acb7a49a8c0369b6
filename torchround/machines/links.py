"""Bytes between machines: one link to each peer and purpose, over several connections, with a few chunks under way.

One TCP connection carries 15 to 19 Gb/s at most, so consecutive chunks take the data groups in turn. Both ends count
chunks alike, so each chunk meets its counterpart in the same group. Messages of one link keep their order, because
gloo keeps the order of messages with one tag.

A header of 16 bytes precedes each message: its number and its bytes. Gloo itself would fill only a part of the memory
that a shorter message meets, and end the process at a longer one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from torchround.machines.errors import MessageError

CHUNK_BYTES = 8 << 20
CHUNKS_UNDER_WAY = 8  # of one message: two for each of four connections keep a connection busy between chunks
STAGED_CHUNKS = 4

Explain = Callable[[Exception, int | None, str], Exception]


class Purpose(Enum):
    """What a link carries. The value is gloo's tag, so purposes never mix."""

    GRADIENTS = 1
    WEIGHTS = 2
    FILES = 3


class PeerLinks:
    """All links of one machine to its peers.

    `explain` turns gloo's error, the peer's rank and the message waited for into the error to raise. `bytes_per_s`
    slows a machine down to a network of that rate: all its senders share it, and all its receivers share it.
    `chunk_timeout` is the longest that a chunk of a message that has begun may take.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        groups: Sequence[dist.ProcessGroup],
        explain: Explain,
        bytes_per_s: float | None = None,
        chunk_timeout: timedelta = timedelta(days=1),
    ) -> None:
        assert groups, "links need at least one data group"
        self._rank = rank
        self._size = size
        self._groups = tuple(groups)
        self._explain = explain
        self._chunk_timeout = chunk_timeout
        self._outgoing = RateLimit(bytes_per_s)
        self._incoming = RateLimit(bytes_per_s)
        self._lock = threading.Lock()
        self._senders: dict[tuple[int, Purpose], Sender] = {}
        self._receivers: dict[tuple[int, Purpose], Receiver] = {}

    def sender(self, peer: int, purpose: Purpose) -> "Sender":
        """Return the outgoing link to this peer for this purpose; the same one at each call."""
        self._check(peer)
        with self._lock:
            link = self._senders.get((peer, purpose))
            if link is None:
                link = Sender(peer, purpose, self._groups, self._explain, self._outgoing)
                self._senders[peer, purpose] = link
            return link

    def receiver(self, peer: int, purpose: Purpose) -> "Receiver":
        """Return the incoming link from this peer for this purpose; the same one at each call."""
        self._check(peer)
        with self._lock:
            link = self._receivers.get((peer, purpose))
            if link is None:
                link = Receiver(
                    peer, purpose, self._groups, self._explain, self._incoming, self._chunk_timeout
                )
                self._receivers[peer, purpose] = link
            return link

    def _check(self, peer: int) -> None:
        assert 0 <= peer < self._size, f"there is no machine {peer} among {self._size}"
        assert peer != self._rank, f"machine {peer} has no link to itself"


class Sender:
    """The outgoing link to one peer for one purpose. One thread at a time uses it."""

    def __init__(
        self,
        peer: int,
        purpose: Purpose,
        groups: Sequence[dist.ProcessGroup],
        explain: Explain,
        limit: "RateLimit",
    ) -> None:
        self._peer = peer
        self._groups = groups
        self._tag = purpose.value
        self._explain = explain
        self._limit = limit
        self._messages = 0
        self._count = 0
        self.bytes_sent = 0

    def send(self, data: Tensor, what: str) -> None:
        """Send a flat contiguous CPU tensor. Returns once its memory may be overwritten.

        Gloo reads the tensor's own memory. Raises what `explain` makes of gloo's error.
        """
        under_way: deque[dist.Work] = deque()
        try:
            header = torch.tensor([self._messages, data.nbytes])
            under_way.append(self._groups[0].send([header.view(torch.uint8)], self._peer, self._tag))
            self._messages += 1
            for chunk in _chunks(data):
                if len(under_way) == CHUNKS_UNDER_WAY:
                    under_way.popleft().wait()
                self._limit.take(chunk.numel())
                group = self._groups[self._count % len(self._groups)]
                self._count += 1
                under_way.append(group.send([chunk], self._peer, self._tag))
            while under_way:
                under_way.popleft().wait()
        except RuntimeError as error:
            raise self._explain(error, self._peer, f"sending {what}") from error
        self.bytes_sent += data.nbytes


class Receiver:
    """The incoming link from one peer for one purpose. One thread at a time uses it.

    Its staging memory holds `STAGED_CHUNKS` chunks at most and is allocated by the first `chunks` that needs it.
    """

    def __init__(
        self,
        peer: int,
        purpose: Purpose,
        groups: Sequence[dist.ProcessGroup],
        explain: Explain,
        limit: "RateLimit",
        chunk_timeout: timedelta,
    ) -> None:
        self._peer = peer
        self._chunk_timeout = chunk_timeout
        self._groups = groups
        self._tag = purpose.value
        self._explain = explain
        self._limit = limit
        self._messages = 0
        self._count = 0
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._unread: list[_Arrival] = []
        self._stopped_in: str | None = None
        self.bytes_received = 0

    def receive(self, into: Tensor, what: str) -> None:
        """Fill a flat contiguous CPU tensor with the peer's next message, which must have the same number of bytes.

        Gloo writes to the tensor's own memory. Raises what `explain` makes of gloo's error.
        """
        under_way: deque[_Arrival] = deque()
        try:
            self._begin(into.nbytes, what)
            for chunk in _chunks(into):
                if len(under_way) == CHUNKS_UNDER_WAY:
                    self._finish(under_way.popleft())
                under_way.append(self._expect(chunk))
            while under_way:
                self._finish(under_way.popleft())
            self._stopped_in = None
        except RuntimeError as error:
            raise self._explain(error, self._peer, f"receiving {what}") from error

    def chunks(self, numel: int, dtype: torch.dtype, what: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the next message of `numel` elements as (index of the first, values), in order.

        Values are in staging memory and valid until the next ones are asked for. The next chunks arrive meanwhile.
        A caller that stops before the end makes the link unusable, since the rest of the message is still to come.
        """
        places = self._staging_for(numel * dtype.itemsize)
        lengths = _chunk_lengths(numel * dtype.itemsize)
        under_way: deque[_Arrival] = deque()
        posted = 0
        start = 0
        try:
            self._begin(numel * dtype.itemsize, what)
            if not numel:
                self._stopped_in = None
            for _ in lengths:
                # A chunk takes the place of the one that the caller has just finished with.
                while posted < len(lengths) and len(under_way) < len(places):
                    place = places[posted % len(places)]
                    under_way.append(self._expect(place[: lengths[posted]]))
                    posted += 1
                values = self._finish(under_way.popleft()).view(dtype)
                first = start
                start += values.numel()
                if start == numel:
                    self._stopped_in = None
                yield first, values
        except RuntimeError as error:
            raise self._explain(error, self._peer, f"receiving {what}") from error
        finally:
            # Gloo may still write to the chunks that a caller left under way, so they stay referenced.
            self._unread.extend(under_way)

    def _staging_for(self, nbytes: int) -> list[Tensor]:
        """Return the places of staged chunks, no larger than this message needs."""
        chunk_bytes = min(nbytes, CHUNK_BYTES)
        wanted = min(nbytes, STAGED_CHUNKS * CHUNK_BYTES)
        if self._staging.numel() < wanted:
            self._staging = torch.empty(wanted, dtype=torch.uint8)
        return list(self._staging[:wanted].split(chunk_bytes)) if nbytes else []

    def _expect(self, chunk: Tensor) -> "_Arrival":
        """Post the receive of one chunk."""
        group = self._groups[self._count % len(self._groups)]
        self._count += 1
        return _Arrival(group.recv([chunk], self._peer, self._tag), chunk, time.monotonic())

    def _begin(self, nbytes: int, what: str) -> None:
        """Wait for the header of the next message and compare it with what this machine expects."""
        if self._stopped_in is not None:
            # The next bytes would be the rest of that message.
            raise MessageError(f"the reader of {self._stopped_in} stopped before its end")
        header = torch.empty(2, dtype=torch.int64)
        self._stopped_in = what
        self._groups[0].recv([header.view(torch.uint8)], self._peer, self._tag).wait()
        number, sent_bytes = header.tolist()
        if (number, sent_bytes) != (self._messages, nbytes):
            raise MessageError(
                f"message {number} of {sent_bytes} bytes came instead of message {self._messages} of {nbytes} bytes"
            )
        self._messages += 1

    def _finish(self, arrival: "_Arrival") -> Tensor:
        """Wait for a chunk that is under way and return it.

        Its sender is at it, so the time has a limit. Gloo needs one: it wakes no thread for a message of which a part
        has arrived, whatever happens to the connection.
        """
        arrival.work.wait(self._chunk_timeout)
        nbytes = arrival.chunk.numel()
        self._limit.take(nbytes, wanted_since=arrival.posted_s)
        self.bytes_received += nbytes
        return arrival.chunk


class RateLimit:
    """A network card of a given rate in bytes/s, or of no limit: each chunk occupies it for its bytes over the rate."""

    def __init__(self, bytes_per_s: float | None) -> None:
        assert bytes_per_s is None or bytes_per_s > 0, f"a rate of {bytes_per_s} bytes/s"
        self._bytes_per_s, self._free_at_s = bytes_per_s, 0.0
        self.now, self.sleep = time.monotonic, time.sleep
        self._lock = threading.Lock()

    def take(self, nbytes: int, wanted_since: float | None = None) -> None:
        """Sleep until the card has carried these bytes.

        A receiver gives `wanted_since`, the time at which it was ready for them: they may have been carried since then,
        in the time just before they arrived.
        """
        if self._bytes_per_s is None:
            return
        now = self.now()
        seconds = nbytes / self._bytes_per_s
        earliest = now if wanted_since is None else max(wanted_since, now - seconds)
        with self._lock:
            self._free_at_s = max(self._free_at_s, earliest) + seconds
            until = self._free_at_s
        self.sleep(max(0.0, until - now))


@dataclass(frozen=True)
class _Arrival:
    """A chunk under way: gloo's work, the memory that it fills, and when it was asked for (monotonic seconds)."""

    work: dist.Work
    chunk: Tensor
    posted_s: float


def chunk_numel(dtype: torch.dtype) -> int:
    """Return the elements of each chunk of a message but the last."""
    return CHUNK_BYTES // dtype.itemsize


def _chunk_lengths(nbytes: int) -> list[int]:
    """Return the bytes of each chunk of a message. Both ends cut alike."""
    return [min(CHUNK_BYTES, nbytes - start) for start in range(0, nbytes, CHUNK_BYTES)]


def _chunks(data: Tensor) -> Iterator[Tensor]:
    """Yield a flat tensor's memory in chunks of bytes."""
    assert data.device.type == "cpu", f"a link carries host memory, not {data.device}"
    assert data.dim() == 1 and data.is_contiguous(), f"a link carries flat tensors, not {tuple(data.shape)}"
    memory = data.detach().view(torch.uint8)
    start = 0
    for length in _chunk_lengths(memory.numel()):
        yield memory[start : start + length]
        start += length
