"""A step of the engine on one CPU device, beside a plain PyTorch loop."""

import argparse
import statistics
from collections.abc import Callable

import torch

from benchmarks.frame import Benchmark, Option, Report, in_turns, median_ratio, timed
from benchmarks.plain_loops import LR, MAX_NORM, SameArithmeticLoop, random_step
from torchround.config import AdamWTable, Config, EngineTable, TrainingTable
from torchround.models import FAMILIES, OWN_FAMILIES
from torchround.planning.plan_report import plan_for
from torchround.run.hardware import find_hardware
from torchround.run.numbers import num_parameters, run_question
from torchround.trainer import build_engine, build_store

LEAST_SPEED_RATIO = 0.9


def beside_plain_loop(options: argparse.Namespace) -> Report:
    """Train the engine and the plain loop on the same tokens, step by step in turns."""
    # A virtual device computes with one thread, so the loop has one too: the same cores, and the same bits.
    torch.set_num_threads(1)
    training = TrainingTable(
        seq_len=options.seq_len,
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size,
        dtype="float32",
        max_norm=MAX_NORM,
    )
    table = EngineTable(devices="cpu", num_devices=1)
    run, hardware = Config.model_construct(training=training, engine=table), find_hardware(table)
    family = FAMILIES[options.family]
    config = family.config_from_flavor(options.flavor)
    model = family.build(config)
    plan = plan_for(run_question(model, run, hardware))
    store = build_store(model, run, hardware)
    store.initialize(model, seed=0)
    generator = torch.Generator().manual_seed(0)
    # One step more than is measured: the first step of each side allocates.
    drawn = [random_step(training, config.vocab_size, generator) for _ in range(options.steps + 1)]
    plain = SameArithmeticLoop(family.build(config), store, AdamWTable())
    with build_engine(model, store, hardware.make_devices(), plan, run) as engine:

        def engine_loss(index: int) -> float:
            result = engine.forward_backward(drawn[index])
            engine.step(LR)
            engine.drain()  # so that two sides never run at the same time
            return result.loss()

        losses: dict[str, list[float]] = {"plain": [], "engine": []}

        def one_step(side: str, step: Callable[[int], float]) -> float:
            return timed(lambda: losses[side].append(step(len(losses[side]))))

        seconds = in_turns(
            {
                "plain": lambda: one_step("plain", lambda index: plain.step(drawn[index])),
                "engine": lambda: one_step("engine", engine_loss),
            },
            options.steps,
            warm_up_turns=1,
        )
    return {
        "model": f"{options.family} {options.flavor}",
        "tokens_per_step": training.global_batch_size * training.seq_len,
        "parameters": num_parameters(model)[0],
        "plain_step_s": statistics.median(seconds["plain"]),
        "engine_step_s": statistics.median(seconds["engine"]),
        "engine_over_plain_tokens_per_s": median_ratio(seconds["plain"], seconds["engine"]),
        "steps_with_another_loss": sum(a != b for a, b in zip(*losses.values(), strict=True)),
    }


def missed_bounds(figures: Report) -> list[str]:
    """List the bounds of the comparison that were missed."""
    ratio, differing = figures["engine_over_plain_tokens_per_s"], figures["steps_with_another_loss"]
    missed = [f"{differing} steps have another loss"] if differing else []
    return missed + ([f"{ratio:.2f} times the tokens/s"] if ratio < LEAST_SPEED_RATIO else [])


PLAIN_LOOP = Benchmark(
    """A step of the engine beside a plain PyTorch loop with the same model, data and optimizer arithmetic.

Both train in fp32 with one thread. --check asks for equal losses and 0.9 times the loop's tokens/s.""",
    {
        "--family": Option("llama3", "model family", sorted(OWN_FAMILIES)),
        "--flavor": Option("debug_25m", "size of the model"),
        "--steps": Option(8, "measured steps of each"),
        "--seq-len": Option(256, "tokens per sequence"),
        "--global-batch-size": Option(8, "sequences per step"),
        "--micro-batch-size": Option(2, "sequences per micro-batch"),
    },
    beside_plain_loop,
    lambda figures: (
        f"engine {figures['engine_step_s']:.3f} s per step, {figures['steps_with_another_loss']} losses differ",
        f"plain loop {figures['plain_step_s']:.3f} s: {figures['engine_over_plain_tokens_per_s']:.2f} times its tokens/s",
    ),
    "--flavor debug --seq-len 16 --global-batch-size 2 --micro-batch-size 1 --steps 1",
    missed_bounds,
)
