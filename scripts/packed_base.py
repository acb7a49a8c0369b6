"""LoRA on a packed base against LoRA on its 16 bits, with small models trained here first (docs/packed_weights.md).

    python scripts/packed_base.py FOLDER [--formats bf16 nf4]     train, print the table, draw FOLDER/packed_base.svg
    python scripts/packed_base.py . --rates                       print how fast this machine packs, and train nothing

For each seed a model is trained on Python's standard library and exported. Adapters are then trained on the pages of `docs/`,
once for each format of the frozen weights: the same batches and the same first adapters. A run that is complete stays.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure

from torchround.checkpoint.folders import checkpoint_name
from torchround.packed_formats import FORMATS

ROOT = Path(__file__).parents[1]
LAST = 20  # steps whose mean is the final loss
ALL_LINEAR = '["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]'
COMMON = {
    "config": "debug.toml",
    "training.seq_len": 128,
    "training.global_batch_size": 8,
    "training.micro_batch_size": 8,
    "engine.num_devices": 1,
    "checkpoint.interval_steps": 1000,
}


def train(folder: Path, name: str, **settings: object) -> list[float]:
    """Train a run unless it is complete. Return its losses by step."""
    steps = settings["training.steps"]
    metrics = folder / name / "metrics.jsonl"
    if not metrics.is_file() or len(metrics.read_text().splitlines()) < int(str(steps)):
        options = COMMON | {"run.folder": folder, "run.name": name} | settings
        command = [f"--{key}={value}" for key, value in options.items()]
        subprocess.run([sys.executable, str(ROOT / "train.py"), *command], cwd=ROOT, check=True)
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def compare(
    folder: Path, seed: int, formats: Sequence[str], steps: tuple[int, int]
) -> dict[str, list[float]]:
    """Train a model and adapters on each format of it. Return the adapters' losses."""
    base, adapters = {"run.seed": seed, "training.steps": steps[0]}, {"training.steps": steps[1]}
    train(folder, f"base-{seed}", **base, **{"checkpoint.export": "weights"})
    adapters |= {
        "model.flavor": "none",
        "model.hf_path": folder / f"base-{seed}" / "export" / checkpoint_name(steps[0]),
    }
    adapters |= {"data.sources": '[{ path = "docs/*.md" }]', "lora.rank": 8, "lora.targets": ALL_LINEAR}
    adapters |= {"optimizer.lr": 3e-3, "run.seed": seed + 100, "training.dtype": "bfloat16"}
    return {form: train(folder, f"{form}-{seed}", **adapters, **{"lora.base": form}) for form in formats}


def draw(path: Path, losses: Sequence[dict[str, list[float]]]) -> None:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
    for seed, (panel, found) in enumerate(zip(panels, losses, strict=True)):
        for (form, values), style in zip(found.items(), ("-", "--", ":", "-."), strict=False):
            smooth = [sum(values[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(values))]
            panel.plot(range(1, len(values) + 1), smooth, style, label=form, linewidth=1.2)
        panel.set_title(f"seed {seed}", fontsize=9)
        panel.set_xlabel("step", fontsize=8)
    panels[0].set_ylabel("loss, mean of ten steps", fontsize=8)
    panels[-1].legend(fontsize=8)
    figure.savefig(path)


def print_rates(numel: int = 2**26, passes: int = 5) -> None:
    """Print the numbers that are packed in a second, by wall time: the median of some passes, by all of PyTorch's threads."""
    numbers = torch.randn(numel).bfloat16()
    for name, packed in FORMATS.items():
        memory, seconds = torch.empty(packed.nbytes(numel), dtype=torch.uint8), []
        packed.pack(numbers, memory)  # compiles the loops
        for _ in range(passes):
            start_s = time.perf_counter()
            packed.pack(numbers, memory)
            seconds.append(time.perf_counter() - start_s)
        print(f"| `{name}` | {numel / median(seconds) / 1e9:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--formats", nargs="+", default=["bf16", "nf4"])
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=2, default=(250, 60), metavar=("BASE", "LORA"))
    given = parser.parse_args()
    if given.rates:
        print_rates()
        return
    folder = given.folder.absolute()
    losses = [compare(folder, seed, given.formats, tuple(given.steps)) for seed in range(given.seeds)]
    print(
        "| seed | format | first loss | final loss | of " + given.formats[0] + " |\n|---|---|---:|---:|---:|"
    )
    for seed, found in enumerate(losses):
        final = {form: sum(values[-LAST:]) / LAST for form, values in found.items()}
        for form, values in found.items():
            ratio = final[form] / final[given.formats[0]]
            print(f"| {seed} | {form} | {values[0]:.4f} | {final[form]:.4f} | {ratio:.4f} |")
    draw(folder / "packed_base.svg", losses)


if __name__ == "__main__":
    main()
