"""Updates by any optimizer of PyTorch: all fp32 weights in one call of its step, then the device weights.

The optimizer knows no bundles. So its step runs once all gradients are there and every save has read the weights.
After that the device weights are written bundle by bundle, as after an update of ours. The step cannot be taken back,
and a second try would apply a part of it twice. A fault inside it therefore leaves a store that is marked.
"""

import itertools
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from torchround.engine.board import LAYER_GATE, HandOver
from torchround.engine.errors import FaultLocation, PipelineError
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.optim import HostOptimizer
from torchround.optim.host_optimizer import Hyperparameters

HYPERPARAMETERS = HandOver[Hyperparameters]("the hyperparameters of step {0}")


class HostOptimizerWorker(OptimizerWorker):
    """The optimizer worker of a `HostOptimizer`, which `optimize_with` gives it before its thread starts."""

    _why_mixed = "a part of the weights may be updated"

    def optimize_with(self, optimizer: HostOptimizer) -> None:
        """Make the optimizer for the weights of the store. Raises `HostOptimizerError`."""
        self._optimizer = optimizer
        optimizer.bind(trained_weights(self._store))

    def _update(self, step: int, lr: float) -> None:
        key = HYPERPARAMETERS(step)
        self._hyperparameters = self._board.wait(key)
        self._board.forget(key)
        super()._update(step, lr)

    def _apply(self, step: int, lr: float, norm: float, loss_scale: float) -> PipelineError | None:
        """Update all fp32 weights, then the device weights, in forward order. Returns a fault that was overcome."""
        with ExitStack() as gate:
            try:
                gradients = self._gradients(step, norm, loss_scale)
                # PyTorch's optimizers compute in another way while a compiler is at work in the process.
                gate.enter_context(LAYER_GATE.entered(self._board))
            except BaseException:
                self._store.is_consistent = True  # nothing is written yet
                raise
            self._location = FaultLocation("optimizer worker")
            self._optimizer.step(self._hyperparameters, gradients)
        self.moves += 1
        return super()._apply(step, lr, norm, loss_scale)

    def _gradients(self, step: int, norm: float, loss_scale: float) -> dict[str, Tensor]:
        """Return the clipped gradients without loss scale, by name. Waits until all weights may be written."""
        gradients: dict[str, Tensor] = {}
        for bundle in self._store.owned:
            self._location = self._location_of(bundle)
            gradient, weight = bundle.gradient, bundle.fp32_weight
            assert gradient is not None, "a trained bundle lacks its gradient"
            self._before_update(bundle, step)
            self._board.observer.touched(reads=(), writes=[gradient, weight])
            factor = self._clipping.factor(bundle, norm, self._squares[bundle.index], loss_scale)
            if factor != 1.0:
                gradient.mul_(factor)
            gradients |= {parameter.name: parameter.view(gradient) for parameter in bundle.parameters}
        return gradients

    def _update_bundle(self, bundle: Bundle, step: int, *_: Any) -> None:
        """Write a bundle's device weights from the fp32 weights. Can be repeated."""
        device_weights = self._written_weights(bundle, step)
        self._board.observer.touched(reads=[bundle.fp32_weight], writes=[device_weights])
        device_weights.copy_(bundle.fp32_weight)


def trained_weights(store: HostStore) -> list[tuple[str, Tensor]]:
    """Return names and fp32 views of the trained weights, as a `HostOptimizer` is bound to them."""
    # In the order of the model's own parameters, by which PyTorch numbers them in a saved state.
    weights: dict[str, Tensor] = {}
    for location in itertools.chain.from_iterable(store.locations):
        bundle, parameter = store.bundles[location.bundle], location.parameter
        if bundle.trainable:
            weights.setdefault(parameter.name, parameter.view(bundle.fp32_weight))
    return list(weights.items())
