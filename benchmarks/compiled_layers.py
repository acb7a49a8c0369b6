"""A step with compiled layers (`engine.compile = true`) beside one with layers as they are, one CPU device each.

    python benchmarks/compiled_layers.py --flavor debug_25m --steps 5

The two take turns, step by step, so that a noisy machine disturbs both alike. The optimizer's pass is the plain one
in both. Prints JSON with median seconds per step, their ratio, what compiling took, and how far the losses differ.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.step import LR, MAX_NORM, random_step
from torchround.config import EngineTable, OptimizerTable, TrainingTable
from torchround.engine.compiled import LayerCompiler
from torchround.engine.engine import Engine
from torchround.layer import MicroBatch
from torchround.models import FAMILIES
from torchround.pipeline.plan_report import plan_for
from torchround.run.engine_parts import build_engine, build_store
from torchround.run.hardware import find_hardware
from torchround.run.numbers import RunNumbers, run_question


def step_s(engine: Engine, micro_batches: list[MicroBatch]) -> tuple[float, float]:
    """Seconds of one step with its update, and its loss."""
    start_s = time.perf_counter()
    result = engine.forward_backward(micro_batches)
    engine.step(LR)
    engine.drain()
    return time.perf_counter() - start_s, result.loss()


def main() -> None:
    """Run both and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="llama3", help="model family")
    parser.add_argument("--flavor", default="debug_25m", help="size of the model")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--global-batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="sequences per micro-batch")
    options = parser.parse_args()
    training = TrainingTable(
        seq_len=options.seq_len,
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size,
        dtype="float32",
        max_norm=MAX_NORM,
    )
    table = EngineTable(devices="cpu", num_devices=1, compile=False)
    config = FAMILIES[options.family].config_from_flavor(options.flavor)
    model, hardware = FAMILIES[options.family].build(config), find_hardware(table)
    numbers = RunNumbers(training, table)
    plan = plan_for(run_question(model, numbers, hardware))
    engines = []
    for compiler in (None, LayerCompiler(model)):
        store = build_store(model, numbers, hardware)
        store.initialize(model, seed=0)
        engines.append(
            build_engine(model, store, hardware.make_devices(), plan, numbers, OptimizerTable(), compiler)
        )
    generator = torch.Generator().manual_seed(0)
    measured: list[list[tuple[float, float]]] = []
    for _ in range(options.steps + 1):
        micro_batches = random_step(training, config.vocab_size, generator)
        measured.append([step_s(engine, micro_batches) for engine in engines])
    for engine in engines:
        engine.close()
    plain, compiled = ([step[which] for step in measured] for which in (0, 1))
    plain_s, compiled_s = (statistics.median(s for s, _ in each[1:]) for each in (plain, compiled))
    report = {
        "model": f"{options.family} {options.flavor}",
        "tokens_per_step": training.global_batch_size * training.seq_len,
        "uncompiled_step_s": plain_s,
        "compiled_step_s": compiled_s,
        "speedup": statistics.median(a[0] / b[0] for a, b in zip(plain[1:], compiled[1:], strict=True)),
        "first_compiled_step_s": compiled[0][0],
        "largest_relative_difference_of_losses": max(
            abs(a[1] - b[1]) / a[1] for a, b in zip(plain, compiled, strict=True)
        ),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
