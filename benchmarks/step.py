"""A step of the engine on one CPU device: beside a plain PyTorch loop, and compiled beside uncompiled."""

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.frame import Benchmark, Report, in_turns, median_ratio, timed
from benchmarks.plain_loops import LR, MAX_NORM, SameArithmeticLoop, random_step
from torchround.config import AdamWTable, EngineTable, TrainingTable
from torchround.engine.compiled import LayerCompiler
from torchround.engine.engine import Engine
from torchround.layer import LayeredModel, MicroBatch
from torchround.models import FAMILIES, OWN_FAMILIES
from torchround.planning.plan_report import plan_for
from torchround.run.engine_parts import build_engine, build_store
from torchround.run.hardware import find_hardware
from torchround.run.numbers import RunNumbers, run_question

LEAST_SPEED_RATIO = 0.9


class _Step(NamedTuple):
    """Seconds of a step with its update, and its loss."""

    seconds: float
    loss: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model and of its steps."""
    parser.add_argument("--family", default="llama3", choices=sorted(OWN_FAMILIES), help="model family")
    parser.add_argument("--flavor", default="debug_25m", help="size of the model")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--global-batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="sequences per micro-batch")


class Setup:
    """The model, numbers and plan that both sides of a comparison share."""

    def __init__(self, options: argparse.Namespace, compile_update: bool | str = "auto") -> None:
        self.name = f"{options.family} {options.flavor}"
        training = TrainingTable(
            seq_len=options.seq_len,
            global_batch_size=options.global_batch_size,
            micro_batch_size=options.micro_batch_size,
            dtype="float32",
            max_norm=MAX_NORM,
        )
        table = EngineTable(devices="cpu", num_devices=1, compile=compile_update)  # type: ignore[arg-type]
        self.training, self.numbers = training, RunNumbers(training, table)
        self.family = FAMILIES[options.family]
        self.config = self.family.config_from_flavor(options.flavor)
        self.model: LayeredModel = self.family.build(self.config)
        self.hardware = find_hardware(table)
        self.plan = plan_for(run_question(self.model, self.numbers, self.hardware))

    def engine(self, compiler: LayerCompiler | None = None) -> tuple[Engine, Any]:
        """Build an engine and its store, always with the same initial weights."""
        store = build_store(self.model, self.numbers, self.hardware)
        store.initialize(self.model, seed=0)
        devices, optimizer = self.hardware.make_devices(), AdamWTable()
        engine = build_engine(self.model, store, devices, self.plan, self.numbers, optimizer, compiler)
        return engine, store

    def compare(
        self, steps: int, sides: dict[str, Callable[[list[MicroBatch]], float]]
    ) -> dict[str, list[_Step]]:
        """Train both sides on the same tokens, step by step in turns; the first step of each allocates."""
        generator = torch.Generator().manual_seed(0)
        drawn = [random_step(self.training, self.config.vocab_size, generator) for _ in range(steps + 1)]
        batches = {name: iter(drawn) for name in sides}

        def one_step(name: str) -> _Step:
            losses: list[float] = []
            micro_batches = next(batches[name])
            seconds = timed(lambda: losses.append(sides[name](micro_batches)))
            return _Step(seconds, losses[0])

        return in_turns({name: lambda name=name: one_step(name) for name in sides}, steps + 1)  # type: ignore[misc]

    def report(self, **figures: Any) -> Report:
        """Put the figures behind what was trained."""
        tokens = self.training.global_batch_size * self.training.seq_len
        return {"model": self.name, "tokens_per_step": tokens, **figures}


def engine_step(engine: Engine) -> Callable[[list[MicroBatch]], float]:
    """Return a function that trains one step and waits for its end, so that two sides never run at the same time."""

    def step(micro_batches: list[MicroBatch]) -> float:
        result = engine.forward_backward(micro_batches)
        engine.step(LR)
        engine.drain()
        return result.loss()

    return step


def beside_plain_loop(options: argparse.Namespace) -> Report:
    """Measure steps of the engine and of the plain loop that computes the same."""
    # A virtual device computes with one thread, so the loop has one too: the same cores, and the same bits.
    torch.set_num_threads(1)
    setup = Setup(options)
    engine, store = setup.engine()
    plain = SameArithmeticLoop(setup.family.build(setup.config), store, AdamWTable())
    with engine:
        steps = setup.compare(options.steps, {"plain": plain.step, "engine": engine_step(engine)})
    plain_s, engine_s = ([step.seconds for step in steps[side][1:]] for side in ("plain", "engine"))
    partition = setup.plan.partition
    return setup.report(
        parameters=store.num_parameters(),
        partition=[partition.forward, partition.fused, partition.backward],
        plain_step_s=statistics.median(plain_s),
        engine_step_s=statistics.median(engine_s),
        engine_over_plain_tokens_per_s=median_ratio(plain_s, engine_s),
        steps_with_another_loss=sum(
            a.loss != b.loss for a, b in zip(steps["plain"], steps["engine"], strict=True)
        ),
    )


def missed_by_engine(figures: Report) -> list[str]:
    """List the bounds of the comparison with the plain loop that were missed."""
    ratio, differing = figures["engine_over_plain_tokens_per_s"], figures["steps_with_another_loss"]
    missed = [f"{differing} steps have another loss"] if differing else []
    return missed + ([f"{ratio:.2f} times the tokens/s"] if ratio < LEAST_SPEED_RATIO else [])


def compiled_beside_uncompiled(options: argparse.Namespace) -> Report:
    """Measure steps of two engines, one with compiled layers."""
    setup = Setup(options, compile_update=False)  # the same optimizer update in both
    (plain, _), (compiled, _) = setup.engine(), setup.engine(LayerCompiler(setup.model))
    with plain, compiled:
        sides = {"uncompiled": engine_step(plain), "compiled": engine_step(compiled)}
        steps = setup.compare(options.steps, sides)
    plain_s, compiled_s = ([step.seconds for step in steps[side][1:]] for side in sides)
    return setup.report(
        uncompiled_step_s=statistics.median(plain_s),
        compiled_step_s=statistics.median(compiled_s),
        speedup=median_ratio(plain_s, compiled_s),
        first_compiled_step_s=steps["compiled"][0].seconds,
        largest_relative_difference_of_losses=max(
            abs(a.loss - b.loss) / a.loss for a, b in zip(steps["uncompiled"], steps["compiled"], strict=True)
        ),
    )


TINY = "--flavor debug --seq-len 16 --global-batch-size 2 --micro-batch-size 1 --steps 1"
PLAIN_LOOP = Benchmark(
    """A step of the engine beside a plain PyTorch loop with the same model, data and optimizer arithmetic.

Both train in fp32 with one thread. --check asks for equal losses and 0.9 times the loop's tokens/s.""",
    add_options,
    beside_plain_loop,
    lambda figures: (
        f"engine {figures['engine_step_s']:.3f} s per step, {figures['steps_with_another_loss']} losses differ",
        f"plain loop {figures['plain_step_s']:.3f} s: {figures['engine_over_plain_tokens_per_s']:.2f} times its tokens/s",
    ),
    TINY,
    missed_by_engine,
)
COMPILED_LAYERS = Benchmark(
    """A step with compiled layers (engine.compile = true) beside a step with uncompiled layers.

One CPU device each; both use the plain optimizer update. The first compiled step includes the compiler's time.""",
    add_options,
    compiled_beside_uncompiled,
    lambda figures: (
        f"compiled {figures['compiled_step_s']:.3f} s per step: {figures['speedup']:.2f} times the speed",
        f"uncompiled {figures['uncompiled_step_s']:.3f} s",
    ),
    TINY,
)
