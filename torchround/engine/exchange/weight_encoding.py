"""Only the weights that an update changed: encoded once on threads of their own, and sent to every peer.

The optimizer's thread copies a bundle's device weights aside before it updates them. An encoder compares the copy with
the new ones, and writes what it makes of them over the copy. So an encoder needs room for one bundle, whichever comes.
The optimizer's thread waits if all encoders are busy: memory is bounded, and what is sent does not depend on timing.
"""

import itertools
import os
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchround.engine.board import Board, HandOver
from torchround.engine.errors import Stopped
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.machines.changed_weights import EncodedWeights, encode

MOST_ENCODERS = 4
# Above this share of a bundle's bytes the weights themselves are sent: what is encoded waits in memory of its own.
WORTH_SENDING = 0.5

# A bundle whose weights are in the encoder's space, and the version that follows them.
OLD_WEIGHTS = HandOver[tuple[Bundle, int]]("use {0} of encoder {1}")
SPACE_FREE = HandOver[None]("use {0} of encoder {1} to end")
# None if the weights themselves are to be sent.
ENCODED = HandOver[EncodedWeights | None]("the changes in version {0} of bundle {1}, for machine {2}")


class WeightEncoder:
    """The encoders of the weights that this machine owns. Each takes every so many-th bundle of an update."""

    def __init__(
        self,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        peers: Sequence[int],
        failed: Callable[[Exception], None],
    ) -> None:
        self._board = board
        self._ordering = ordering
        self._peers = peers
        self._failed = failed
        owned = store.owned
        count = min(MOST_ENCODERS, max((os.cpu_count() or 1) // 4, 1), len(owned))
        most_bytes = max((bundle.device_weights[0].nbytes for bundle in owned), default=0)
        self._spaces = [torch.empty(most_bytes, dtype=torch.uint8) for _ in range(count)]
        self._turn = {bundle.index: turn for turn, bundle in enumerate(owned)}
        self._taken = [0] * count
        self.threads = [
            threading.Thread(
                target=self._main, args=(index,), name=f"torchround encoder {index}", daemon=True
            )
            for index in range(count)
        ]

    def before_change(self, bundle: Bundle, version: int) -> None:
        """Copy the weights that `version` follows, once there is room. Only the optimizer's thread calls this.

        An update cannot stop half-way. After a stop this returns: the encoders have ended.
        """
        encoder = self._turn[bundle.index] % len(self._spaces)
        uses, self._taken[encoder] = self._taken[encoder], self._taken[encoder] + 1
        if uses:
            key = SPACE_FREE(uses - 1, encoder)
            try:
                self._board.wait(key)
            except Stopped:
                return
            self._board.forget(key)
        old, space = bundle.version(version - 1), self._space(encoder, bundle)
        self._board.observer.touched(reads=[old], writes=[space])
        space.copy_(old)
        self._board.post(OLD_WEIGHTS(uses, encoder), (bundle, version))

    def encoded(self, bundle: Bundle, version: int, peer: int) -> EncodedWeights | None:
        """Wait for the changes of a bundle, and return them; None if its weights are to be sent as they are."""
        key = ENCODED(version, bundle.index, peer)
        found = self._board.wait(key)
        self._board.forget(key)
        return found

    def _main(self, encoder: int) -> None:
        """Encode the bundles whose turn is this encoder's, in the order of the updates."""
        try:
            for use in itertools.count():
                key = OLD_WEIGHTS(use, encoder)
                bundle, version = self._board.wait(key)
                self._board.forget(key)
                self._ordering.before_upload(bundle.index, version)
                encoded = self._encode(bundle.version(version), self._space(encoder, bundle))
                for peer in self._peers:
                    self._board.post(ENCODED(version, bundle.index, peer), encoded)
                self._board.signal(SPACE_FREE(use, encoder))
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001  (any fault must reach the caller)
            self._failed(error)

    def _encode(self, new: Tensor, space: Tensor) -> EncodedWeights | None:
        """Encode weights against those in `space`, and write over these."""
        self._board.observer.touched(reads=[new], writes=[space])
        encoded = encode(space, new, space.view(torch.uint8))
        if encoded.payload.numel() > WORTH_SENDING * new.nbytes:
            return None
        return EncodedWeights(encoded.lengths, encoded.payload.clone())

    def _space(self, encoder: int, bundle: Bundle) -> Tensor:
        """Return an encoder's space, as room for the bundle's weights."""
        weights = bundle.device_weights[0]
        return self._spaces[encoder][: weights.nbytes].view(weights.dtype)
