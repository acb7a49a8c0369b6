"""The cells of the study of staleness: which runs there are, how one is made, and what is run next.

A cell is one training run. Its result is one line of JSON and a function of the cell and the text alone, so a study
that was interrupted continues where it was.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.delayed_loop import DelayedLoop, DelayRule
from benchmarks.installed_text import documentation_of
from torchround.config import LRScheduleTable, OptimizerTable
from torchround.engine.store.host_store import HostStore
from torchround.layer import MicroBatch
from torchround.models import FAMILIES
from torchround.models.common.config import TransformerConfig
from torchround.models.common.rope import Rope
from torchround.optim.lr_schedule import LRSchedule

MAX_NORM = 1.0
# The models' own initial matrices (standard deviation 0.02) suit a width of 1600. At 64 they would be too small for
# their products, and an update of 2e-3 would change a tenth of a weight.
INITIAL_FACTOR = 5.0
TUNING_SEED = 0
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


@dataclass(frozen=True)
class Cell:
    """One training run: a mode on a task, with a peak learning rate and a seed."""

    task: str
    mode: str
    lr: float
    seed: int


@dataclass(frozen=True)
class CellResult:
    """What a run leaves: held-out losses after `evaluated` steps. A run that diverged has a null among them."""

    cell: Cell
    evaluated: tuple[int, ...]
    losses: tuple[float | None, ...]

    @property
    def final_loss(self) -> float:
        """The held-out loss at the end, infinite if the run diverged."""
        last = self.losses[-1]
        return math.inf if last is None else last

    def to_json(self) -> str:
        """Return the result as one line."""
        return json.dumps({**asdict(self.cell), "evaluated": self.evaluated, "losses": self.losses})

    @classmethod
    def from_json(cls, line: str) -> "CellResult":
        """Read a line that `to_json` wrote."""
        content = json.loads(line)
        cell = Cell(*(content[key] for key in ("task", "mode", "lr", "seed")))
        return cls(cell, tuple(content["evaluated"]), tuple(content["losses"]))


Results = Mapping[Cell, CellResult]


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
    """Return the cells of a mode's tuning as far as they are known: the first rates, then beyond the better end."""
    rates = sorted(FIRST_RATES[task])
    while len(rates) < size.most_rates:
        cells = [Cell(task, mode, lr, TUNING_SEED) for lr in rates]
        if any(cell not in results for cell in cells):
            break
        losses = [results[cell].final_loss for cell in cells]
        best = losses.index(min(losses))
        if 0 < best < len(rates) - 1:
            break
        rates = [rates[0] / 2, *rates] if best == 0 else [*rates, rates[-1] * 2]
    return [Cell(task, mode, lr, TUNING_SEED) for lr in rates]


def tuned_rate(size: StudySize, results: Results, task: str, mode: str) -> float | None:
    """Return the rate with the lowest loss in a mode's tuning, or None while the tuning is incomplete."""
    cells = _tuning_cells(size, results, task, mode)
    if any(cell not in results for cell in cells):
        return None
    return min(cells, key=lambda cell: results[cell].final_loss).lr


# One run.


def run_cell(size: StudySize, cell: Cell, folder: Path, base_lr: float | None) -> CellResult:
    """Train the cell's run. `folder` keeps the weights of the base model, which is trained if it is missing."""
    loop, store = _new_loop(size, size.rules()[cell.mode], cell.seed)
    if cell.task == FINE_TUNING:
        assert base_lr is not None, "fine-tuning needs the rate of the base model"
        for name, values in _base_weights(size, folder, base_lr).items():
            store.weights()[name].copy_(values)
        store.refresh_device_weights()
        loop.start_anew()
    return _train(size, cell, loop)


def _train(size: StudySize, cell: Cell, loop: DelayedLoop) -> CellResult:
    text, steps = documentation_of(size.package(cell.task)), size.steps(cell.task)
    held_out = _held_out(text.held_out, size)
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
    for weight in store.weights().values():
        weight.mul_(INITIAL_FACTOR if weight.ndim == 2 else 1.0)
    store.refresh_device_weights()
    return DelayedLoop(model, store, OptimizerTable(), rule, MAX_NORM), store


def model_config(size: StudySize) -> TransformerConfig:
    """Return the shape of the model: one token for each byte."""
    return TransformerConfig(
        num_layers=size.blocks,
        hidden_size=size.width,
        num_heads=size.heads,
        num_kv_heads=size.heads,
        head_dim=size.width // size.heads,
        ffn_size=size.ffn_size,
        vocab_size=256,
        rope=Rope(10000.0),
        max_positions=8192,
    )


def _held_out(text: Tensor, size: StudySize) -> list[MicroBatch]:
    """Cut the held-out text at even distances into micro-batches of the size of training."""
    last = len(text) - size.tokens - 1
    starts = torch.linspace(0, last, size.held_out_sequences, dtype=torch.float64).long()
    return [draw_batch(text, part, size) for part in starts.split(size.sequences)]


def draw_batch(text: Tensor, starts: Tensor, size: StudySize) -> MicroBatch:
    """Make a micro-batch of the sequences that begin at `starts` (`[B]`) in `text` (`[bytes]` uint8)."""
    drawn = torch.stack([text[start : start + size.tokens + 1] for start in starts.tolist()]).long()
    positions = torch.arange(size.tokens).expand(len(starts), -1).contiguous()
    return MicroBatch(
        drawn[:, :-1].contiguous(),
        drawn[:, 1:].contiguous(),
        positions,
        torch.zeros_like(positions),
        max_documents=1,
    )
