"""The choice of an engine's optimizer worker, and of its threads."""

import os
from collections.abc import Callable

import torch

from torchround.config import OptimizerTable
from torchround.engine.board import Board
from torchround.engine.bounded_updates import BoundedOptimizerWorker
from torchround.engine.errors import PipelineError
from torchround.engine.exchange.step_exchange import StepExchange
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.ordering import Ordering
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import BOUNDED
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore


def make_optimizer_worker(
    store: HostStore,
    board: Board,
    ordering: Ordering,
    pool: HostPool,
    on_failure: Callable[[PipelineError], None],
    optimizer: OptimizerTable,
    settings: EngineSettings,
    num_devices: int,
    exchange: StepExchange,
) -> OptimizerWorker:
    """Return the optimizer worker of the store's policy, for an engine with these settings."""
    worker_class = BoundedOptimizerWorker if store.policy is BOUNDED else OptimizerWorker
    return worker_class(
        store,
        board,
        ordering,
        pool,
        optimizer,
        settings.max_norm,
        settings.clip,
        on_failure,
        num_threads=update_threads(num_devices),
        compiles=settings.compile_update,
        accumulates=settings.accumulates,
        exchange=exchange,
    )


def update_threads(num_devices: int) -> int:
    """Return the number of threads for the optimizer's operations.

    Leaves a core for each device's thread, but keeps at least half of the cores, and never takes more threads
    than PyTorch has (`engine.cpu_threads`). Kernel launches that wait for a core cost a device far more than
    the update loses by one core, because memory bandwidth bounds the update.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), max(available - num_devices, available // 2)))
