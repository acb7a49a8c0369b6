"""The cells of the study of staleness: which runs there are, how one is made, and what is run next."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.byte_model import draw_batch, held_out_batches, model_config
from benchmarks.delayed_loop import DelayedLoop, DelayRule
from benchmarks.installed_text import documentation_of
from benchmarks.study import TUNING_SEED, Cell, CellResult, Results, best_rate, tuning_cells
from torchround.config import AdamWTable, LRScheduleTable
from torchround.engine.store.host_store import HostStore
from torchround.models import FAMILIES
from torchround.optim.lr_schedule import LRSchedule

MAX_NORM = 1.0
# The models' own initial matrices (standard deviation 0.02) suit a width of 1600. At 64 they would be too small for
# their products, and an update of 2e-3 would change a tenth of a weight.
INITIAL_FACTOR = 5.0
PRETRAINING, FINE_TUNING = "pre-training", "fine-tuning"


@dataclass(frozen=True)
class StudySize:
    """What all cells share: the model, the batches, the lengths of runs, and the packages whose text is learnt."""

    pretraining_package: str = "torch"
    fine_tuning_package: str = "networkx"
    blocks: int = 4
    width: int = 64
    heads: int = 2
    ffn_size: int = 192
    sequences: int = 8
    tokens: int = 128
    pretraining_steps: int = 300
    fine_tuning_steps: int = 100
    evaluations: int = 5
    held_out_sequences: int = 64
    seeds: tuple[int, ...] = (1, 2, 3)
    most_rates: int = 7

    @property
    def num_layers(self) -> int:
        """Layers of the model as the engine counts them: embedding, blocks, head."""
        return self.blocks + 2

    def steps(self, task: str) -> int:
        """Return the steps of a run of this task."""
        return self.pretraining_steps if task == PRETRAINING else self.fine_tuning_steps

    def package(self, task: str) -> str:
        """Return the package whose text a task learns; both of the full study are installed wherever torch is."""
        return self.pretraining_package if task == PRETRAINING else self.fine_tuning_package

    def rules(self) -> dict[str, DelayRule]:
        """Return the modes by name. K is 0, half of the layers, and all but the head, which is the largest K."""
        stale = sorted({0, self.num_layers // 2, self.num_layers - 1})
        return {
            "sync": DelayRule("sync"),
            **{f"bounded K={count}": DelayRule("bounded", count, clip="layer") for count in stale},
            "async": DelayRule("async"),
            "async predict": DelayRule("async", correction="predict"),
        }


# The rates that tuning tries first. Further ones are a factor of two beyond the better end.
FIRST_RATES: Mapping[str, tuple[float, ...]] = {
    PRETRAINING: (2e-3, 4e-3, 8e-3),
    FINE_TUNING: (1e-3, 2e-3, 4e-3),
}


def wanted_cells(size: StudySize, results: Results) -> list[Cell]:
    """Return the cells that can be run now and are not among the results; empty once the study is complete.

    Every mode of a task is tuned first, then repeated with the other seeds at its best rate. Fine-tuning begins once
    the rate of the base model is known.
    """
    wanted: list[Cell] = []
    for task in FIRST_RATES:
        if task == FINE_TUNING and tuned_rate(size, results, PRETRAINING, "sync") is None:
            continue
        tuning = [cell for mode in size.rules() for cell in _tuning_cells(size, results, task, mode)]
        repeats = [
            Cell(task, mode, rate, seed)
            for seed in size.seeds
            for mode in size.rules()
            if (rate := tuned_rate(size, results, task, mode)) is not None
        ]
        wanted += [cell for cell in tuning + repeats if cell not in results]
    return wanted


def _tuning_cells(size: StudySize, results: Results, task: str, mode: str) -> list[Cell]:
    return tuning_cells(task, mode, FIRST_RATES[task], size.most_rates, results)


def tuned_rate(size: StudySize, results: Results, task: str, mode: str) -> float | None:
    """Return the rate with the lowest loss in a mode's tuning, or None while the tuning is incomplete."""
    return best_rate(_tuning_cells(size, results, task, mode), results)


# One run.


def run_cell(size: StudySize, folder: Path, cell: Cell, results: Results) -> CellResult:
    """Train the cell's run. `folder` keeps the weights of the base model, which is trained if it is missing."""
    loop, store = _new_loop(size, size.rules()[cell.mode], cell.seed)
    if cell.task == FINE_TUNING:
        base_lr = tuned_rate(size, results, PRETRAINING, "sync")
        assert base_lr is not None, "fine-tuning needs the rate of the base model"
        store.write_weights(_base_weights(size, folder, base_lr))
        loop.start_anew()
    return _train(size, cell, loop)


def _train(size: StudySize, cell: Cell, loop: DelayedLoop) -> CellResult:
    text, steps = documentation_of(size.package(cell.task)), size.steps(cell.task)
    held_out = held_out_batches(text.held_out, size)
    schedule = LRSchedule(
        LRScheduleTable(warmup_steps=max(steps // 20, 1), decay="cosine", min_lr_factor=0.1), cell.lr, steps
    )
    generator = torch.Generator().manual_seed(cell.seed)
    evaluated = tuple(sorted({round(steps * (i + 1) / size.evaluations) for i in range(size.evaluations)}))
    losses: list[float | None] = []
    for step in range(steps):
        starts = torch.randint(len(text.train) - size.tokens, (size.sequences,), generator=generator)
        batch = draw_batch(text.train, starts, size)
        if not math.isfinite(loop.step([batch], schedule(step))):
            losses.append(None)
            break
        if step + 1 in evaluated:
            loss = loop.evaluate(held_out)
            losses.append(loss if math.isfinite(loss) else None)
    return CellResult(cell, evaluated[: len(losses)], tuple(losses))


def _base_weights(size: StudySize, folder: Path, lr: float) -> dict[str, Tensor]:
    """Return the fp32 weights of the base model: the pre-training run of `sync` with the tuning seed."""
    path = folder / "base.pt"
    if not path.exists():
        loop, store = _new_loop(size, DelayRule("sync"), TUNING_SEED)
        _train(size, Cell(PRETRAINING, "sync", lr, TUNING_SEED), loop)
        folder.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".new")
        torch.save({name: values.clone() for name, values in store.weights().items()}, written)
        written.replace(path)
    loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
    return loaded


def _new_loop(size: StudySize, rule: DelayRule, seed: int) -> tuple[DelayedLoop, HostStore]:
    model = FAMILIES["llama3"].build(model_config(size))
    store = HostStore(model)
    store.initialize(model, seed=seed)
    for name, weight in store.weights().items():
        store.write_weights({name: weight * (INITIAL_FACTOR if weight.ndim == 2 else 1.0)})
    return DelayedLoop(model, store, AdamWTable(), rule, MAX_NORM), store
