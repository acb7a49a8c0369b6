"""The loss on batches that are not trained on, under the newest weights, by forward-only passes."""

import logging
from collections.abc import Iterable

from torchround.data import cut
from torchround.engine.engine import Engine
from torchround.layer import MicroBatch

logger = logging.getLogger(__name__)


class Validation:
    """`batches` gives the same ones each time it is iterated over, each cut into micro-batches of `micro_batch_size`."""

    def __init__(self, batches: Iterable[MicroBatch], micro_batch_size: int) -> None:
        self._batches = batches
        self._micro_batch_size = micro_batch_size
        self._has_warned = False

    def loss(self, engine: Engine) -> float | None:
        """Mean loss per label over all batches; None, with one warning, where no token is learnt in any of them."""
        results = [engine.evaluate(cut(batch, self._micro_batch_size)) for batch in self._batches]
        loss_sum = sum(result.loss() * result.num_labels for result in results)
        num_labels = sum(result.num_labels for result in results)
        if num_labels:
            return loss_sum / num_labels
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "validation: its %d batches hold no label, so there is no loss to log; scripts/inspect_data.py shows "
                "which tokens are learnt",
                len(results),
            )
        return None
