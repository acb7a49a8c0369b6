"""The first exchange of a run: the owners' device weights to all machines, before any step.

Every machine has filled what it owns, from a checkpoint, from pretrained weights or from a seed. Frozen weights are on
every machine already, each by its own means. Those that differ from their owner's are sent too: unlike processors may
draw unlike initial weights from one seed.
"""

import threading
from collections.abc import Callable, Iterator

import torch
import xxhash
from torch import Tensor

from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.machines.group import MachineGroup
from torchround.machines.links import Purpose

Advance = Callable[[int], object]


def share_weights(store: HostStore, group: MachineGroup, advance: Advance = lambda num_bytes: None) -> None:
    """Give every machine all versions of all device weights, bit for bit. All machines call this alike, between steps.

    `advance` receives the bytes of each tensor that this machine has received, from one thread at a time.
    Raises `MachineError`.
    """
    unlike = _unlike_frozen(store, group)
    failures: list[Exception] = []
    advancing = threading.Lock()

    def run(talk: Callable[[int], None], peer: int) -> None:
        try:
            talk(peer)
        except Exception as error:  # noqa: BLE001  (raised below, on the caller's thread)
            failures.append(error)

    def send(peer: int) -> None:
        link = group.links.sender(peer, Purpose.WEIGHTS)
        for what, weights in _messages(store, group.rank, unlike[peer]):
            link.send(weights, what)

    def receive(peer: int) -> None:
        link = group.links.receiver(peer, Purpose.WEIGHTS)
        for what, weights in _messages(store, peer, unlike[group.rank]):
            link.receive(weights, what)
            with advancing:
                advance(weights.nbytes)

    peers = [machine.rank for machine in group.machines if machine.rank != group.rank]
    threads = [
        threading.Thread(target=run, args=(talk, peer), name=f"first weights {peer}", daemon=True)
        for peer in peers
        for talk in (send, receive)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def received_bytes(store: HostStore) -> int:
    """Return the bytes of trained weights that `share_weights` brings to this machine."""
    return sum(
        weights.nbytes for bundle in store.trained if bundle.is_remote for weights in bundle.device_weights
    )


def _messages(store: HostStore, owner: int, unlike: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield what `owner` sends to a machine whose frozen bundles `unlike` differ, in the order of the next forward."""
    for bundle in store.bundles:
        if bundle.owner != owner or not (bundle.trainable or bundle.index in unlike):
            continue
        for age in range(len(bundle.device_weights)):
            yield f"the first weights of {_layers(store, bundle)}", bundle.version(store.step - age)


def _unlike_frozen(store: HostStore, group: MachineGroup) -> list[set[int]]:
    """Return, for each machine, the frozen bundles in memory that differ from their owner's."""
    ours = {
        str(bundle.index): xxhash.xxh3_128_hexdigest(bundle.device_weights[0].view(torch.uint8).numpy().data)
        for bundle in store.bundles
        if not (bundle.trainable or bundle.mapped)
    }
    each = group.channel("start").gather(ours, "checksums of the frozen weights")
    return [
        {
            int(index)
            for index, checksum in found.items()
            if checksum != each[store.bundles[int(index)].owner][index]
        }
        for found in each
    ]


def _layers(store: HostStore, bundle: Bundle) -> str:
    return ", ".join(store.layer_names[layer] for layer in bundle.layers)
