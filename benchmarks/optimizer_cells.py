"""The cells of the study of optimizers: which runs there are, and how the engine trains one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.byte_model import draw_batch, held_out_batches, model_config
from benchmarks.installed_text import documentation_of
from benchmarks.study import Cell, CellResult, Results, best_rate, tuning_cells
from torchround.config import AdamWTable, LRScheduleTable, OptimizerTable
from torchround.config.optimizer_tables import MuonTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.store.host_store import HostStore
from torchround.layer import MicroBatch
from torchround.models import FAMILIES
from torchround.optim import make_optimizer
from torchround.optim.lr_schedule import LRSchedule
from torchround.planning.partition import Partition

TASK = "pre-training"
# The models' own initial matrices (standard deviation 0.02) suit a width of 1600. At 128 they would be too small for
# their products.
INITIAL_FACTOR = 4.0
EXACT, COMPACT = "adamw exact", "adamw compact"
MUON = "muon exact"
MODES: Mapping[str, OptimizerTable] = {
    EXACT: AdamWTable(),
    COMPACT: AdamWTable(state="compact"),
    MUON: MuonTable(),
}
# A mode without rates of its own trains at the tuned rate of the mode that it is compared with.
RATES: Mapping[str, tuple[float, ...]] = {
    EXACT: (1e-3, 2e-3, 4e-3, 8e-3),
    MUON: (1e-3, 2e-3, 4e-3, 8e-3),
}
SAME_RATE: Mapping[str, str] = {COMPACT: EXACT}


@dataclass(frozen=True)
class OptimizerStudySize:
    """What all cells share: the model, the batches, the length of runs, and the package whose text is learnt."""

    package: str = "torch"
    blocks: int = 4
    width: int = 128
    heads: int = 2
    ffn_size: int = 512
    sequences: int = 4
    tokens: int = 128
    steps: int = 500
    evaluations: int = 20
    held_out_sequences: int = 32
    seeds: tuple[int, ...] = (1, 2, 3)
    most_rates: int = 8


def wanted_cells(size: OptimizerStudySize, results: Results) -> list[Cell]:
    """Return the cells that can be run now and are not among the results: tuning first, then the other seeds."""
    tuning = [cell for mode in RATES for cell in _tuning_cells(size, results, mode)]
    repeats = [
        cell
        for seed in range(len(size.seeds))
        for mode in MODES
        for cell in final_cells(size, results, mode)[seed : seed + 1]
    ]
    return [cell for cell in tuning + repeats if cell not in results]


def final_cells(size: OptimizerStudySize, results: Results, mode: str) -> list[Cell]:
    """Return the runs of a mode that count, one for each seed; none while its rate is not known."""
    rate = tuned_rate(size, results, mode)
    return [] if rate is None else [Cell(TASK, mode, rate, seed) for seed in size.seeds]


def tuned_rate(size: OptimizerStudySize, results: Results, mode: str) -> float | None:
    """Return the rate that a mode trains with, or None while the tuning is incomplete."""
    return best_rate(_tuning_cells(size, results, SAME_RATE.get(mode, mode)), results)


def _tuning_cells(size: OptimizerStudySize, results: Results, mode: str) -> list[Cell]:
    return tuning_cells(TASK, mode, RATES[mode], size.most_rates, results)


# One run.


def run_cell(size: OptimizerStudySize, cell: Cell, results: Results) -> CellResult:
    """Train the cell's run with an engine of one virtual device, in bfloat16 and `sync`."""
    text = documentation_of(size.package)
    held_out = held_out_batches(text.held_out, size)
    schedule = LRSchedule(LRScheduleTable(warmup_steps=max(size.steps // 20, 1)), cell.lr, size.steps)
    generator = torch.Generator().manual_seed(cell.seed)
    evaluated = tuple(
        sorted({round(size.steps * (i + 1) / size.evaluations) for i in range(size.evaluations)})
    )
    losses: list[float | None] = []
    with new_engine(size, MODES[cell.mode], cell.seed) as engine:
        for step in range(size.steps):
            starts = torch.randint(len(text.train) - size.tokens, (size.sequences,), generator=generator)
            result = engine.forward_backward([draw_batch(text.train, starts, size)])
            engine.step(schedule(step))
            if not math.isfinite(result.loss()):
                losses.append(None)
                break
            if step + 1 in evaluated:
                loss = _held_out_loss(engine, held_out)
                losses.append(loss if math.isfinite(loss) else None)
    return CellResult(cell, evaluated[: len(losses)], tuple(losses))


def new_engine(size: OptimizerStudySize, optimizer: OptimizerTable, seed: int) -> Engine:
    """Build the model, its store and an engine that runs all layers in one stage."""
    model = FAMILIES["llama3"].build(model_config(size))
    store = HostStore(model, torch.bfloat16, optimizer=make_optimizer(optimizer))
    store.initialize(model, seed=seed)
    scaled = {name: weight * INITIAL_FACTOR for name, weight in store.weights().items() if weight.ndim == 2}
    store.write_weights(scaled)
    return Engine(model, store, [CpuDevice(0)], Partition((), len(model.layers), ()), optimizer=optimizer)


def _held_out_loss(engine: Engine, held_out: list[MicroBatch]) -> float:
    return engine.evaluate(held_out).loss()
