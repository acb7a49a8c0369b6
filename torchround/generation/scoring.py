"""The loss of documents under a model that an engine holds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchround.engine.engine import Engine
from torchround.engine.passes import StepResult
from torchround.layer import MicroBatch


@dataclass(frozen=True)
class Score:
    """The sum of the losses of `num_labels` tokens, in nats."""

    loss_sum: float
    num_labels: int

    @property
    def loss(self) -> float:
        """The mean loss of a token, in nats."""
        return self.loss_sum / max(self.num_labels, 1)

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss; infinite if it is too large for a number."""
        return math.exp(self.loss) if self.loss < 709.0 else math.inf


def score(engine: Engine, batches: Iterable[Sequence[MicroBatch]]) -> Score:
    """Add up the token losses of batches of micro-batches, in fp64 and in their order.

    The next batch is under way while the losses of one are read.
    """
    loss_sum, num_labels = 0.0, 0
    before: StepResult | None = None
    for batch in batches:
        result = engine.evaluate(batch)
        if before is not None:
            loss_sum = sum(before.loss_sums(), start=loss_sum)
        num_labels += result.num_labels
        before = result
    if before is not None:
        loss_sum = sum(before.loss_sums(), start=loss_sum)
    return Score(loss_sum, num_labels)
