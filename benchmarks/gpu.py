"""What the engine reaches on real GPUs: tokens/s, MFU, memory and copy rates, beside what was predicted."""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.frame import Benchmark, Report
from benchmarks.gpu_figures import (
    cards,
    copy_rates,
    figures_table,
    num_allocations,
    num_cards,
    peak,
    start_peak,
    test_results,
)
from benchmarks.plain_loops import LR, ResidentLoop, random_step
from torchround.config import AdamWTable, EngineTable, TrainingTable
from torchround.engine.compiled import LayerCompiler
from torchround.engine.engine import Engine
from torchround.engine.passes import StepResult
from torchround.engine.reports import costs_from_reports, one_layer_a_stage
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch
from torchround.models import FAMILIES, OWN_FAMILIES
from torchround.planning.costs import Costs
from torchround.planning.memory import GIB
from torchround.planning.plan import Plan
from torchround.planning.plan_report import plan_for
from torchround.planning.planner import evaluate_plan
from torchround.run.engine_parts import build_engine, build_store, layer_compiler
from torchround.run.hardware import Hardware, find_hardware
from torchround.run.numbers import DTYPES, RunNumbers, run_question
from torchround.run.step_meter import flops_per_token, mfu

OPTIMIZER = AdamWTable(lr=LR)
WARM_UP_STEPS = 2  # later steps allocate nothing more
COMPILE: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}


@dataclass(frozen=True)
class TrainedModel:
    """A model, its vocabulary, and the size of a step."""

    name: str
    model: LayeredModel
    vocab_size: int
    training: TrainingTable

    def micro_batches(self, seed: int) -> list[MicroBatch]:
        """Draw one step of random tokens, always the same ones for a seed."""
        return random_step(self.training, self.vocab_size, torch.Generator().manual_seed(seed))

    def mfu(self, tokens_per_s: float, hardware: Hardware, num_cards: int) -> float | None:
        """Return the share of the cards' peak that this speed is; None for a card of unknown speed."""
        peak = None if hardware.spec is None else hardware.spec.flops_per_s(self.training.dtype)
        element_bytes = DTYPES[self.training.dtype].itemsize
        return mfu(
            tokens_per_s, flops_per_token(self.model, self.training.seq_len, element_bytes), peak, num_cards
        )


class Bench:
    """All measurements of one run of the benchmark, in order, until the time is up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline_s = time.perf_counter() + options.budget_s
        self._compilers: dict[bool | str, LayerCompiler | None] = {}
        family = FAMILIES[options.family]
        config = family.config_from_flavor(options.flavor)
        training = TrainingTable(
            seq_len=options.seq_len,
            global_batch_size=options.micro_batches * options.micro_batch_size,
            micro_batch_size=options.micro_batch_size,
            dtype=options.dtype,
        )
        self.shape = TrainedModel(
            f"{options.family} {options.flavor}", family.build(config), config.vocab_size, training
        )

    def run(self) -> Report:
        """Measure and return everything that goes to the JSON file."""
        one = find_hardware(self._table("sync", 1))
        training = self.shape.training
        report: dict[str, Any] = {
            "cards": cards(one),
            "model": self.shape.name,
            "dtype": training.dtype,
            "tokens_per_step": training.global_batch_size * training.seq_len,
            "micro_batch": [training.micro_batch_size, training.seq_len],
            "planned_for_gib": self.options.device_memory_gib,
        }
        if self.options.tests_xml is not None:
            report["tests"] = test_results(Path(self.options.tests_xml))
        everything = find_hardware(EngineTable(devices=self.options.devices)).make_devices()
        report["copies"] = copy_rates(everything, self.options.copy_mib * 2**20)
        report["runs"] = list(self._runs(report))
        return report

    def _runs(self, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
        first_compile, *others = self.options.compile
        for update in self.options.updates:
            table = self._table(update, 1)
            store = build_store(self.shape.model, self._numbers(table), find_hardware(table))
            try:
                store.initialize(self.shape.model, seed=0)
                report["parameters"] = store.num_parameters()
                if "resident" not in report:
                    report["resident"] = self._resident(store)
                if "layers" not in report:
                    report["layers"], report["first_loss"], costs = self._measure_layers(store)
                for workers in self.options.workers:
                    yield self._engine_run(store, update, workers, first_compile, costs)
                    # Beside the run that comes first, with nothing else changed.
                    while others:
                        yield self._engine_run(store, update, workers, others.pop(0), costs)
            finally:
                store.close()
                del store
                gc.collect()

    def _numbers(self, table: EngineTable) -> RunNumbers:
        return RunNumbers(self.shape.training, table)

    def _table(self, update: str, workers: int, compiled: str | None = None) -> EngineTable:
        """Return the engine's settings; `compiled` is a value of `--compile`, its first one by default."""
        table = EngineTable(devices=self.options.devices, num_devices=workers, update=update)  # type: ignore[arg-type]
        share_gib = find_hardware(table).device_bytes / GIB
        return table.model_copy(
            update={
                "device_memory_gib": min(self.options.device_memory_gib, share_gib),
                "compile": COMPILE[compiled or self.options.compile[0]],
            }
        )

    def _engine_run(
        self, store: HostStore, update: str, workers: int, compiled: str, measured: Costs
    ) -> dict[str, Any]:
        figures: dict[str, Any] = {"update": update, "workers": workers, "compile": compiled}
        if time.perf_counter() > self.deadline_s:
            return {**figures, "left_out": "the time was up"}
        table = self._table(update, workers, compiled)
        hardware, numbers = find_hardware(table), self._numbers(table)
        plan = plan_for(run_question(self.shape.model, numbers, hardware))
        devices = hardware.make_devices()
        baseline_bytes = start_peak(devices)
        compiler = self._layer_compiler(table, hardware)
        start_s = time.perf_counter()
        with build_engine(self.shape.model, store, devices, plan, numbers, OPTIMIZER, compiler) as engine:
            results, ends_s, allocations = self._steps(engine)
            allocations = [count - allocations[WARM_UP_STEPS - 1] for count in allocations]
            peak_bytes = peak(devices) - baseline_bytes
        figures |= self._speed(results, ends_s, hardware, workers)
        figures["first_step_s"] = ends_s[0] - start_s  # with all compilation
        figures |= {
            "plan": json.loads(plan.to_json()),
            "predicted_step_s": plan.step_s if hardware.spec is not None else None,
            "predicted_from_measured_layers_s": self._predicted_s(plan, measured),
            # Several workers may share a card, whose peak is theirs together.
            "device_peak_gib": peak_bytes / GIB,
            "predicted_device_gib": plan.device_bytes * len(devices) / num_cards(devices) / GIB,
            "allocations_after_warm_up": allocations[-1],
            "host_gib": psutil.Process().memory_info().rss / GIB,
        }
        return figures

    def _layer_compiler(self, table: EngineTable, hardware: Hardware) -> LayerCompiler | None:
        """Return the compiler that all runs with this setting share, as the engines of one run do."""
        if table.compile not in self._compilers:
            self._compilers[table.compile] = layer_compiler(self.shape.model, table, hardware.kind)
        return self._compilers[table.compile]

    def _steps(self, engine: Engine) -> tuple[list[StepResult], list[float], list[int]]:
        """Run warm-up and measured steps; each is dispatched while the step before it runs."""
        results: list[StepResult] = []
        ends_s: list[float] = []
        allocations: list[int] = []
        for step in range(WARM_UP_STEPS + self.options.steps):
            results.append(engine.forward_backward(self.shape.micro_batches(seed=step)))
            engine.step(LR)
            if len(results) > 1:
                results[-2].collect()
                ends_s.append(time.perf_counter())
                allocations.append(num_allocations(engine.devices))
            if len(results) > WARM_UP_STEPS + 1 and time.perf_counter() > self.deadline_s:
                break
        results[-1].collect()
        ends_s.append(time.perf_counter())
        allocations.append(num_allocations(engine.devices))
        return results, ends_s, allocations

    def _speed(
        self, results: Sequence[StepResult], ends_s: Sequence[float], hardware: Hardware, workers: int
    ) -> dict[str, Any]:
        steps_s = [later - earlier for earlier, later in itertools.pairwise(ends_s)]
        step_s = statistics.median(steps_s[WARM_UP_STEPS - 1 :])
        tokens_per_s = results[-1].num_labels / step_s
        times = [sum_times(result) for result in results[WARM_UP_STEPS:]]
        return {
            "losses": [result.loss() for result in results],
            "steps_s": steps_s,
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "mfu": self.shape.mfu(tokens_per_s, hardware, num_cards(hardware.make_devices())),
            "optimizer_s": statistics.median(result.update().seconds for result in results[WARM_UP_STEPS:]),
            "per_device_and_step": {
                key: statistics.median(time[key] for time in times) / workers for key in times[0]
            },
        }

    def _measure_layers(self, store: HostStore) -> tuple[list[dict[str, Any]], float, Costs]:
        """Measure each layer's own times in the first steps, with one layer per stage; also return the first loss."""
        table = self._table("sync", 1).model_copy(update={"update": store.policy.name})
        hardware, numbers = find_hardware(table), self._numbers(table)
        counted = run_question(self.shape.model, numbers, hardware).costs()
        partition = one_layer_a_stage(counted.num_layers)
        plan = evaluate_plan(partition, 1, counted, 1, self.options.micro_batches, store.policy.name)
        results = []
        compiler = self._layer_compiler(table, hardware)
        with build_engine(
            self.shape.model, store, hardware.make_devices(), plan, numbers, OPTIMIZER, compiler
        ) as engine:
            for step in range(WARM_UP_STEPS):
                results.append(engine.forward_backward(self.shape.micro_batches(seed=step)))
                engine.step(LR)
                results[-1].collect()
        costs = costs_from_reports(counted, results[-1].reports())
        layers = [
            {
                "name": ours.name,
                "forward_s": ours.forward_s,
                "backward_s": ours.backward_s,
                "counted_forward_s": theirs.forward_s,
                "counted_backward_s": theirs.backward_s,
            }
            for ours, theirs in zip(costs.layers, counted.layers, strict=True)
        ]
        return layers, results[0].loss(), costs

    def _predicted_s(self, plan: Plan, costs: Costs) -> float:
        """Simulate a step of `plan` with measured layer times, as if every worker had a card of its own."""
        return evaluate_plan(
            plan.partition, plan.rounds, costs, plan.num_devices, plan.num_micro_batches, plan.update
        ).step_s

    def _resident(self, store: HostStore) -> dict[str, Any]:
        """Train the rival from the same weights and on the same tokens."""
        hardware = find_hardware(self._table("sync", 1))
        device = hardware.make_devices()[0].torch_device
        start_peak(hardware.make_devices())
        try:
            loop = ResidentLoop(
                self.shape.model, store.weights(), device, DTYPES[self.shape.training.dtype], LR
            )
            losses, steps_s = [], []
            for step in range(1 + self.options.steps):
                start_s = time.perf_counter()
                losses.append(loop.step(self.shape.micro_batches(seed=step)))
                steps_s.append(time.perf_counter() - start_s)
        except (
            torch.OutOfMemoryError
        ) as error:  # a model that is larger than the card is what the engine is for
            return {"left_out": f"does not fit: {str(error).splitlines()[0]}"}
        finally:
            # Freed before the engine runs, whose peak must not contain the rival's memory.
            loop = None  # type: ignore[assignment]
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.empty_cache()
        step_s = statistics.median(steps_s[1:])
        tokens_per_s = self.shape.training.global_batch_size * self.shape.training.seq_len / step_s
        return {
            "losses": losses,
            "step_s": step_s,
            "tokens_per_s": tokens_per_s,
            "mfu": self.shape.mfu(tokens_per_s, hardware, 1),
            "device_peak_gib": peak(hardware.make_devices()) / GIB,
        }


def sum_times(result: StepResult) -> dict[str, float]:
    """Add up the seconds and bytes of all devices in one step."""
    names = (
        "busy_s",
        "input_wait_s",
        "weights_wait_s",
        "optimizer_wait_s",
        "uploaded_bytes",
        "downloaded_bytes",
    )
    return {name: sum(getattr(report, name) for report in result.reports()) for name in names}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, the steps and the limits."""
    parser.add_argument("--devices", default="cuda", help="kind of device, as in engine.devices")
    parser.add_argument("--family", choices=sorted(OWN_FAMILIES), default="qwen3", help="model family")
    parser.add_argument("--flavor", default="1.7B", help="the family's flavor")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="bfloat16", help="number format of weights and computation"
    )
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=16, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="workers of each run")
    parser.add_argument("--updates", nargs="+", choices=["sync", "async"], default=["sync", "async"])
    parser.add_argument(
        "--device-memory-gib", type=float, default=21.0, help="what the plan may use of a card"
    )
    parser.add_argument("--copy-mib", type=int, default=512, help="size of the copies whose rate is measured")
    parser.add_argument("--budget-s", type=float, default=270.0, help="no run starts after so many seconds")
    parser.add_argument(
        "--compile",
        nargs="+",
        choices=list(COMPILE),
        default=["auto", "false"],
        help="engine.compile of all runs, and of further runs beside the first one (default: auto false)",
    )
    parser.add_argument("--tests-xml", help="pytest's JUnit file, to be counted into the figures")


def missed_bounds(figures: Report) -> list[str]:
    """List losses that are not finite and tests that failed."""
    runs = [*figures["runs"], figures["resident"]]
    missed = [
        f"loss {loss} is not finite"
        for run in runs
        for loss in run.get("losses", ())
        if not math.isfinite(loss)
    ]
    return missed + [f"test {name} failed" for name in figures.get("tests", {}).get("failures", ())]


def headline(figures: Report) -> tuple[str, str]:
    """Name the speed of each run that was made, and the rival's."""
    runs = [run for run in figures["runs"] if "left_out" not in run]
    ours = ", ".join(
        f"{run['update']} x {run['workers']} compile {run['compile']} {run['tokens_per_s']:.0f}"
        for run in runs
    )
    resident = figures["resident"]
    rival = resident.get("left_out") or f"all on the device {resident['tokens_per_s']:.0f}"
    return f"{figures['model']}: {ours or 'no run'} tokens/s", rival


GPU = Benchmark(
    """What the engine reaches on real GPUs: tokens/s, MFU, memory and copy rates, beside what was predicted.

A model of a real shape with random weights and random tokens, sync and async, with one worker and with two that share
a card, and as a rival a plain loop that keeps everything on the card. The plan is made for a card of
--device-memory-gib, so that there is something to offload on a large card too. Layers and update are compiled as users'
runs compile them (engine.compile = "auto"), and one run beside the first has nothing compiled. --devices cpu runs the same code on
virtual devices, for a try without a GPU. Prints a short table; everything goes to the JSON file. Ends with 1 if a
loss is not finite or a given test failed.""",
    add_options,
    lambda options: Bench(options).run(),
    headline,
    "--devices cpu --flavor debug --seq-len 32 --micro-batch-size 1 --micro-batches 2 --steps 1 "
    "--device-memory-gib 0.02 --copy-mib 1 --workers 1 --updates sync",
    missed_bounds,
    show=figures_table,
)
