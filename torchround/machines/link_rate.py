"""The rate of the network between the machines, measured before training."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from torchround.machines.group import MachineGroup
from torchround.machines.links import CHUNK_BYTES, Purpose

TRIAL_BYTES = 4 << 20  # to all peers together; takes 0.3 s on a network of 0.1 Gb/s, which is too slow anyway
MEASURED_S = 0.25
MOST_BYTES = 4 << 30
MESSAGE_BYTES = 8 * CHUNK_BYTES  # long enough that the gaps between messages do not count


def measure_rate(group: MachineGroup, trial_bytes: int = TRIAL_BYTES, seconds: float = MEASURED_S) -> float:
    """Return the bytes/s that each machine sends and receives at once, the least of all machines.

    Every machine calls this at the same time, and all get the same number. It takes about half a second. All pairs send
    at once, as they do in a step. The first exchange, of `trial_bytes`, only shows how many bytes the second one may have
    to take about `seconds`.
    Raises `MachineError`.
    """
    trial_rate = _exchange(group, trial_bytes)
    return _exchange(group, int(min(max(trial_rate * seconds, trial_bytes), MOST_BYTES)))


def _exchange(group: MachineGroup, num_bytes: int) -> float:
    """Send this many bytes from each machine, evenly to all others. Returns the least rate, the same on all machines."""
    peers = [peer for peer in range(group.size) if peer != group.rank]
    bytes_per_peer = max(num_bytes // len(peers), 1)
    data = torch.zeros(min(bytes_per_peer, MESSAGE_BYTES), dtype=torch.uint8)
    messages = -(-bytes_per_peer // data.numel())
    what = "bytes that measure the network"

    def send(peer: int) -> None:
        for _ in range(messages):
            group.links.sender(peer, Purpose.FILES).send(data, what)

    def receive(peer: int) -> None:
        receiver = group.links.receiver(peer, Purpose.FILES)
        for _ in range(messages):
            for _ in receiver.chunks(data.numel(), data.dtype, what):
                pass

    group.channel("start").gather(None, "the start of a measurement of the network")
    start_s = time.perf_counter()
    with ThreadPoolExecutor(2 * len(peers)) as pool:
        calls = [pool.submit(call, peer) for peer in peers for call in (send, receive)]
        for call in calls:
            call.result()
    seconds = time.perf_counter() - start_s
    rates = group.channel("start").gather(
        messages * data.numel() * len(peers) / seconds, "its measured rate of the network"
    )
    return float(min(rates))
