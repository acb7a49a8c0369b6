"""What an engine's optimizer demands of the store, and the hyperparameters of its steps."""

import torch

from torchround.config import OptimizerTable
from torchround.engine.errors import EngineUsageError
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import BOUNDED
from torchround.engine.store.host_store import HostStore
from torchround.engine.update import trained_weights
from torchround.layer import LayeredModel
from torchround.optim import HostOptimizer, HostOptimizerError
from torchround.optim.host_optimizer import Hyperparameters
from torchround.optim.optimizer import make_optimizer


def allocate_gradients(
    store: HostStore, model: LayeredModel, optimizer: OptimizerTable | HostOptimizer, settings: EngineSettings
) -> None:
    """Let the optimizer's rules update the store, and give it the gradient buffers that they read.

    Raises `EngineUsageError` if the store and the optimizer do not fit.

    The rounds decide which gradients add up on the host, and so which pool buffers they need. PyTorch's optimizers
    take gradients in the dtype of their weights, which is fp32.
    """
    if isinstance(optimizer, HostOptimizer):
        if store.policy is BOUNDED:
            raise EngineUsageError(
                "bounded updates update layer by layer, and a HostOptimizer steps all at once; use sync or async"
            )
        if store.policy.predicts:
            raise EngineUsageError(
                "predicted device weights need AdamW's moments; with a HostOptimizer use async without prediction"
            )
        if store.ownership.num_machines > 1:
            raise EngineUsageError("a HostOptimizer works on one machine; on several use AdamW")
        if store.splits_weights:
            raise EngineUsageError(
                "a HostOptimizer needs fp32 weights, and the host store splits them; make it with optimizer=NO_STATE"
            )
    else:
        try:
            store.assign_rules(model, make_optimizer(optimizer))
        except ValueError as error:
            raise EngineUsageError(
                f"the host store is not of this optimizer: {error}; make it with optimizer=make_optimizer(table)"
            ) from error
        _check_policy(store, optimizer)
    needs_sum = isinstance(optimizer, HostOptimizer) and store.gradient_dtype != torch.float32
    store.allocate_gradients(settings.rounds, settings.accumulates or needs_sum)


def bind_host_optimizer(store: HostStore, optimizer: OptimizerTable | HostOptimizer) -> None:
    """Make a `HostOptimizer` for the weights of the store. Raises `EngineUsageError`."""
    if isinstance(optimizer, HostOptimizer):
        try:
            optimizer.bind(trained_weights(store))
        except HostOptimizerError as error:
            raise EngineUsageError(str(error)) from error


def _check_policy(store: HostStore, optimizer: OptimizerTable) -> None:
    """Raise `EngineUsageError` if the optimizer cannot update as the store's policy asks."""
    if store.policy is BOUNDED and not optimizer.updates_by_layer:
        raise EngineUsageError(
            f"bounded updates begin before a step's last gradient, and those of {optimizer.name} need the devices, which would "
            "wait for each gradient before the next forward; use sync or async"
        )
    if store.policy.predicts and not optimizer.can_predict:
        raise EngineUsageError(
            f"predicted device weights need a state that tells the next step, and {optimizer.name} has none; use async "
            "without prediction"
        )


def hyperparameters_of(
    optimizer: OptimizerTable | HostOptimizer, lr: float | None
) -> tuple[float, Hyperparameters | None]:
    """Return a step's learning rate, and the hyperparameters of a `HostOptimizer` as they are now.

    Raises `EngineUsageError` for AdamW without a learning rate, and if the optimizer's groups have changed.
    """
    if isinstance(optimizer, HostOptimizer):
        try:
            return 0.0, optimizer.hyperparameters(lr)
        except HostOptimizerError as error:
            raise EngineUsageError(str(error)) from error
    if lr is None:
        raise EngineUsageError("step() needs a learning rate; only a HostOptimizer has one of its own")
    return lr, None
