"""The table of what Muon's work on devices adds to a step (docs/simulated_results.md), from simulation: for maintainers.

python scripts/muon_table.py
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.pipeline_tables import (
    BATCHES,
    CONFIGS,
    DEVICE_GIB,
    DEVICES,
    MODELS,
    ROOT,
    SEQUENCES,
    counted,
    markdown,
    published_costs,
)
from torchround.commands.configured_model import build_model
from torchround.config import parse_command_line
from torchround.pipeline.cards import find_device
from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import GIB, MemoryLimits
from torchround.pipeline.plan_report import plan_for
from torchround.pipeline.planner import make_plan
from torchround.run.numbers import with_job


def muon_table() -> str:
    """Show what Muon's work on devices adds to a step: published layer times, then times counted in bfloat16."""
    rows = []
    for card, pair_of in (("published times", published_muon), ("counted, bf16", counted_muon)):
        for update in ("sync", "async"):
            pairs = [pair_of(model, update) for model in range(len(MODELS))]
            cells = [f"{before:.2f} s, {100 * (after / before - 1):+.1f} %" for before, after in pairs]
            rows.append([f"`{update}`, {card}", *cells])
    return markdown(["step with AdamW, change with Muon", *MODELS], rows)


def published_muon(model: int, update: str) -> tuple[float, float]:
    """Return the steps of a model's published layer times, with the paper's batch: without and with the work of Muon."""
    costs, jobs = published_costs(CONFIGS[model]), muon_costs(model).layers
    # Published times of some models lack the embedding, which has no matrix of Muon.
    jobs = jobs[len(jobs) - costs.num_layers :]
    layers = tuple(
        replace(layer, job_s=job.job_s, job_link_s=job.job_link_s)
        for layer, job in zip(costs.layers, jobs, strict=True)
    )
    limits = MemoryLimits(device_bytes=DEVICE_GIB * GIB)
    steps = [
        make_plan(each, DEVICES, BATCHES[model] // SEQUENCES, update, 1, limits).step_s
        for each in (costs, replace(costs, layers=layers))
    ]
    return steps[0], steps[1]


def counted_muon(model: int, update: str) -> tuple[float, float]:
    """Return the steps of one of the paper's configs on eight RTX 4090s: without and with the work of Muon."""
    question = replace(counted(model, "rtx4090"), update=update)
    with_jobs = replace(question, costs_for=lambda *sizes: muon_costs(model))
    return plan_for(question).step_s, plan_for(with_jobs).step_s


def muon_costs(model: int) -> Costs:
    """Return the counted costs of one of the paper's configs on RTX 4090s, with the work of Muon in its blocks."""
    options = parse_command_line(["--config", str(ROOT / "configs" / f"{CONFIGS[model]}.toml")])
    costs, card = counted(model, "rtx4090").costs(), find_device("rtx4090")
    assert card is not None, "the table of cards has it"
    blocks = build_model(options, warns=False).layers[1:-1]
    layers = list(costs.layers)
    for index, block in enumerate(blocks, start=1):
        matrices = [p.shape for p in block.parameters() if p.requires_grad and p.ndim > 1]
        layers[index] = with_job(layers[index], matrices, card, "bfloat16")
    return replace(costs, layers=tuple(layers))


if __name__ == "__main__":
    print(muon_table())
