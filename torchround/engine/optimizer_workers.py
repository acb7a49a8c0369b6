"""The choice of an engine's optimizer worker, what it demands of the store, and its threads."""

import os
from collections.abc import Callable

import torch

from torchround.config import OptimizerTable
from torchround.engine.board import Board
from torchround.engine.bounded_updates import BoundedOptimizerWorker
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.exchange.step_exchange import StepExchange
from torchround.engine.host_updates import HYPERPARAMETERS, HostOptimizerWorker
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.ordering import Ordering
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import BOUNDED
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.update_report import LEARNING_RATE
from torchround.layer import LayeredModel
from torchround.optim import HostOptimizer, HostOptimizerError
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
                "bounded updates update layer by layer; a HostOptimizer needs sync or async"
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


def _check_policy(store: HostStore, optimizer: OptimizerTable) -> None:
    """Raise `EngineUsageError` if the optimizer cannot update as the store's policy asks."""
    if store.policy is BOUNDED and not optimizer.updates_by_layer:
        raise EngineUsageError(
            f"bounded updates update layer by layer, and the steps of {optimizer.name} wait for the devices; use sync or async"
        )
    if store.policy.predicts and not optimizer.can_predict:
        raise EngineUsageError(
            f"predicted device weights need a state that tells the next step, and {optimizer.name} has none; use async "
            "without prediction"
        )


def make_optimizer_worker(
    store: HostStore,
    board: Board,
    ordering: Ordering,
    pool: HostPool,
    on_failure: Callable[[PipelineError], None],
    optimizer: OptimizerTable | HostOptimizer,
    settings: EngineSettings,
    num_devices: int,
    exchange: StepExchange,
) -> OptimizerWorker:
    """Return the optimizer worker of the store's policy, for an engine with these settings."""
    is_foreign = isinstance(optimizer, HostOptimizer)
    usual = BoundedOptimizerWorker if store.policy is BOUNDED else OptimizerWorker
    worker = (HostOptimizerWorker if is_foreign else usual)(
        store,
        board,
        ordering,
        pool,
        settings.max_norm,
        settings.clip,
        on_failure,
        num_threads=update_threads(num_devices),
        compiles=settings.compile_update and not is_foreign,
        accumulates=settings.accumulates,
        exchange=exchange,
    )
    if isinstance(worker, HostOptimizerWorker) and isinstance(optimizer, HostOptimizer):
        try:
            worker.optimize_with(optimizer)
        except HostOptimizerError as error:
            raise EngineUsageError(str(error)) from error
    return worker


def post_hyperparameters(
    board: Board, optimizer: OptimizerTable | HostOptimizer, step: int, lr: float | None
) -> None:
    """Hand the step's learning rate, or all hyperparameters as they are now, to the optimizer worker.

    Raises `EngineUsageError` for AdamW without a learning rate, and if the optimizer's groups have changed.
    """
    if isinstance(optimizer, HostOptimizer):
        try:
            board.post(HYPERPARAMETERS(step), optimizer.hyperparameters(lr))
        except HostOptimizerError as error:
            raise EngineUsageError(str(error)) from error
    elif lr is None:
        raise EngineUsageError("step() needs a learning rate; only a HostOptimizer has one of its own")
    board.post(LEARNING_RATE(step), 0.0 if lr is None else lr)


def update_threads(num_devices: int) -> int:
    """Return the number of threads for the optimizer's operations.

    Leaves a core for each device's thread, but keeps at least half of the cores, and never takes more threads
    than PyTorch has (`engine.cpu_threads`). Kernel launches that wait for a core cost a device far more than
    the update loses by one core, because memory bandwidth bounds the update.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), max(available - num_devices, available // 2)))
