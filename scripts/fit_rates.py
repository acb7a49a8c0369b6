"""The fit of `torchround/planning/rates.py` on RoundPipe's layer times and throughputs (docs/planning.md): for maintainers.

    python scripts/fit_rates.py            print the constants, and each model's prediction from a fit without it
    python scripts/fit_rates.py --check    exit code 1 if a prediction is off, or rates.py has other constants

The published runs differ from ours: their partition recomputes all blocks, their `sync` updates after the step, in passes of
their own, and the 235B model's weights are taken not to be page-locked.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.pipeline_tables import (
    BATCHES,
    CONFIGS,
    DISPATCHED,
    MEASURED,
    MODELS,
    ROOT,
    TOKENS,
    markdown,
    published_costs,
)
from torchround.commands.configured_model import build_model
from torchround.config import parse_command_line
from torchround.engine.store.bundles import collect_bundles
from torchround.layer import LayeredModel, LayerWork
from torchround.optim.optimizer import NO_STATE
from torchround.planning.cards import DEVICES
from torchround.planning.costs import Costs
from torchround.planning.partition import Partition
from torchround.planning.planner import evaluate_plan
from torchround.planning.rates import RATES, CardRates, Rates, costs_from_work
from torchround.run.numbers import layer_numels

CARD = next(device for device in DEVICES if device.name == "rtx4090")
LIMITS = 0.8, 1.25  # of predicted over measured tokens/s
MICRO_BATCHES, LAYER_BATCH = 16, 4  # of a published step; sequences of a published layer time
# An update with separate casts around it moves 40 bytes per parameter.
UPDATE_BYTES = 40.0
# RoundPipe's program for LoRA can leave the weights in memory that is not page-locked. Copies from there hold up the thread
# that launches kernels. They are taken to run one at a time at the rate of one link, while nothing computes: a guess.
UNLOCKED = "Qwen3-235B LoRA"
KINDS = ("grouped", "head", "passes")  # fitted on layer times; `dense` alone would come out above the peak


@dataclass(frozen=True)
class Published:
    """One of the paper's models: its layers, and its published layer times."""

    index: int
    model: LayeredModel
    numels: tuple[tuple[int, int], ...]

    def costs(self, sequences: int, rates: Rates) -> Costs:
        """Count the costs of its layers but the embedding, which has no published time."""
        card = CardRates.of(CARD, "float16", fp16_accumulation=True, rates=rates)
        return costs_from_work(self.model.names[1:], _works(self.index, sequences), self.numels[1:], card)

    @property
    def times(self) -> list[float]:
        """Forward and backward of a block, then of the head, as measured."""
        return _times(published_costs(CONFIGS[self.index]))

    @property
    def update_bytes(self) -> float:
        return UPDATE_BYTES * sum(trained for trained, _ in self.numels)

    def step_s(self, costs: Costs, update: str, devices: int) -> float:
        """Simulate a step of the paper's partition without its update."""
        forward, backward = DISPATCHED[self.index]
        partition = Partition.from_lists(forward, 1, backward)
        return evaluate_plan(partition, 1, costs, devices, MICRO_BATCHES, update).step_s

    def measured_s(self, update: str, devices: int) -> float:
        return BATCHES[self.index] * TOKENS / MEASURED[update, devices][self.index]


@cache
def _works(index: int, sequences: int) -> list[LayerWork]:
    layers = list(published_models().values())[index].model.layers
    return [layer.work(sequences, TOKENS, 2) for layer in layers[1:]]  # type: ignore[operator]


@cache
def published_models() -> dict[str, Published]:
    """Build the five models."""
    models = {}
    for index, (name, config) in enumerate(zip(MODELS, CONFIGS, strict=True)):
        options = parse_command_line(["--config", str(ROOT / "configs" / f"{config}.toml")])
        model = build_model(options, warns=False)
        bundles, _ = collect_bundles(model, (), NO_STATE, element_bytes=2)
        models[name] = Published(index, model, tuple(layer_numels(bundles, len(model.layers))))
    return models


def fitted(names: Sequence[str]) -> Rates:
    """Fit the rates on these models, by least squares of relative errors."""
    models = [published_models()[name] for name in names]
    times = np.concatenate([one.times for one in models])
    never = Rates(np.inf, np.inf, np.inf, 0.0)
    # Seconds are linear in `passes` and in one over each share.
    columns = [
        np.concatenate([_times(one.costs(LAYER_BATCH, replace(never, **{kind: 1.0}))) for one in models])
        for kind in ("dense", *KINDS)
    ]
    rest = times - columns[0] / RATES.dense
    grouped, head, passes = np.linalg.lstsq(
        np.stack(columns[1:], axis=1) / times[:, None], rest / times, rcond=None
    )[0]
    # The update is the part of a `sync` step that measured layer times do not explain.
    sync_s = np.array([one.measured_s("sync", 8) for one in models])
    left_s = sync_s - [one.step_s(_as_measured(one), "sync", 8) for one in models]
    moved = np.array([one.update_bytes * (name != UNLOCKED) for name, one in zip(names, models, strict=True)])
    update_rate = (moved**2 / sync_s**2).sum() / (moved * left_s / sync_s**2).sum()
    return replace(RATES, grouped=1 / grouped, head=1 / head, passes=passes, update_bytes_per_s=update_rate)


def predicted_s(name: str, rates: Rates, update: str, devices: int) -> float:
    """Predict a published step, with what RoundPipe does otherwise than a plan of ours."""
    model = published_models()[name]
    costs = model.costs(BATCHES[model.index] // MICRO_BATCHES, rates)
    step_s, update_s = model.step_s(costs, update, devices), model.update_bytes / rates.update_bytes_per_s
    step_s = step_s + update_s if update == "sync" else max(step_s, update_s)
    if name == UNLOCKED:  # each layer goes up for the forward and for the backward
        uploaded = 2 * sum(layer.weight_bytes for layer in costs.layers)
        step_s += CARD.hop_s(uploaded)
    return step_s


def rows(names: Sequence[str] = tuple(MODELS)) -> list[tuple[str, Rates, list[float], list[float]]]:
    """Fit for each model the rates without it, its layers' seconds over measured, and its tokens/s over measured."""
    found = []
    for name in names:
        model, rates = published_models()[name], fitted([other for other in MODELS if other != name])
        layers = [
            ours / theirs
            for ours, theirs in zip(_times(model.costs(LAYER_BATCH, rates)), model.times, strict=True)
        ]
        speeds = [model.measured_s(*run) / predicted_s(name, rates, *run) for run in MEASURED]
        found.append((name, rates, layers, speeds))
    return found


def _times(costs: Costs) -> list[float]:
    block, head = costs.layers[0], costs.layers[-1]
    return [block.forward_s, block.backward_s, head.forward_s, head.backward_s]


def _as_measured(model: Published) -> Costs:
    """Take the published times for micro-batches of a published step."""
    costs = published_costs(CONFIGS[model.index])
    scale = BATCHES[model.index] / MICRO_BATCHES / LAYER_BATCH
    layers = tuple(layer.timed(scale * layer.forward_s, scale * layer.backward_s) for layer in costs.layers)
    return replace(costs, layers=layers, hop_s=scale * costs.hop_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the fit, or check it. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a prediction is off")
    options = parser.parse_args(arguments)
    names = (*KINDS, "update_bytes_per_s")
    best, found = fitted(tuple(MODELS)), rows()
    cells = [
        [label, *(f"{getattr(rates, name):.3g}" for name in names), *(f"{ratio:.2f}" for ratio in ratios)]
        for label, rates, *both in [*found, ("none", best, [], [])]
        for ratios in [both[0] + both[1]]
    ]
    heads = "left out", *names, "block fwd", "bwd", "head fwd", "bwd", *(f"{u} {n}" for u, n in MEASURED)
    print(markdown(heads, cells))
    if not options.check:
        return 0
    wrong = [
        f"{label}: {run} {ratio:.2f}"
        for label, _, _, speeds in found
        for run, ratio in zip(MEASURED, speeds, strict=True)
        if not LIMITS[0] <= ratio <= LIMITS[1]
    ]
    wrong += [name for name in names if abs(getattr(best, name) / getattr(RATES, name) - 1) > 0.05]
    print("off: " + ", ".join(wrong) if wrong else "all within limits", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
