"""The newest device weights, made from the fp32 weights: rounded, or what a prediction makes of them.

Split weights need none of this: their newest device weights are a part of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torchround.engine.board import Observer
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.prediction import Prediction


@dataclass(frozen=True)
class NewestWeights:
    """The device weights after `step` steps, of which `applied_updates` applied an update."""

    step: int
    applied_updates: int
    observer: Observer

    def derive(self, bundles: Iterable[Bundle], prediction: Prediction | None) -> None:
        """Write them for the owned ones of the bundles: predicted ones, or the fp32 weights without a prediction."""
        for bundle in bundles:
            if not bundle.is_owned or bundle.residual is not None:
                continue
            device_weights = bundle.version(self.step)
            self.observer.touched(reads=bundle.state(), writes=[device_weights])
            if prediction is None:
                device_weights.copy_(bundle.fp32_weight)
            else:
                prediction.write(bundle, device_weights, self.step, self.applied_updates)

    @contextmanager
    def true_for_a_block(
        self,
        untrue: Sequence[Bundle],
        lagging: Iterable[Bundle],
        prediction: Prediction | None,
        share: Callable[[], None],
    ) -> Iterator[None]:
        """Let those of the `untrue` bundles be the fp32 weights for the block, afterwards what they were."""
        set_aside = [(bundle.device_weights[0], _spare(bundle)) for bundle in lagging]
        for device_weights, spare in set_aside:
            self.observer.touched(reads=[device_weights], writes=[spare])
            spare.copy_(device_weights)
        try:
            self.derive(untrue, None)
            share()
            yield
        finally:
            for device_weights, spare in set_aside:
                self.observer.touched(reads=[spare], writes=[device_weights])
                device_weights.copy_(spare)
            if prediction is not None:
                self.derive(untrue, prediction)
        # Not after an exception: the other machines may never come to the end of the block.
        if prediction is not None:
            share()


def _spare(bundle: Bundle) -> Tensor:
    """Return room for a copy of device weights: the gradient's, which nothing reads between steps, if it is enough."""
    weights = bundle.device_weights[0]
    if bundle.gradient is None or bundle.gradient.itemsize < weights.itemsize:
        return torch.empty_like(weights)
    return bundle.gradient.view(weights.dtype)[: bundle.numel]
