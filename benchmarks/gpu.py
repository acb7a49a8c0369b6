"""What the engine reaches on real GPUs: tokens/s, MFU, memory and copy rates, beside what was predicted."""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.frame import Benchmark, Option, Report
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
from torchround.config import AdamWTable, Config, EngineTable, TrainingTable
from torchround.engine.compiled import LayerCompiler
from torchround.engine.engine import Engine
from torchround.engine.passes import StepResult
from torchround.engine.reports import StageReport, layer_times
from torchround.engine.store.host_store import HostStore
from torchround.layer import MicroBatch
from torchround.models import FAMILIES, OWN_FAMILIES
from torchround.planning.costs import Costs, measured_costs
from torchround.planning.memory import GIB
from torchround.planning.partition import Partition
from torchround.planning.plan_report import plan_for
from torchround.planning.planner import evaluate_plan
from torchround.run.hardware import Hardware, find_hardware
from torchround.run.numbers import DTYPES, num_parameters, run_question
from torchround.run.step_meter import flops_per_token, mfu
from torchround.trainer import build_engine, build_store, layer_compiler

OPTIMIZER = AdamWTable(lr=LR)
WARM_UP_STEPS = 2  # later steps allocate nothing more
COMPILE: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
# Seconds and bytes of each step, added up over its reports.
SUMMED: dict[str, Callable[[StageReport], float]] = {
    "busy_s": lambda report: report.busy_s,
    "input_wait_s": lambda report: report.idle_s.input,
    "weights_wait_s": lambda report: report.idle_s.weights,
    "optimizer_wait_s": lambda report: report.idle_s.optimizer,
    "uploaded_bytes": lambda report: report.uploaded_bytes,
    "downloaded_bytes": lambda report: report.downloaded_bytes,
}


class Bench:
    """All measurements of one run of the benchmark, in order, until the time is up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.deadline_s = time.perf_counter() + options.budget_s
        self._compilers: dict[bool | str, LayerCompiler | None] = {}
        family = FAMILIES[options.family]
        config = family.config_from_flavor(options.flavor)
        self.model, self.vocab_size = family.build(config), config.vocab_size
        self.training = TrainingTable(
            seq_len=options.seq_len,
            global_batch_size=options.micro_batches * options.micro_batch_size,
            micro_batch_size=options.micro_batch_size,
            dtype=options.dtype,
        )
        self.dtype = DTYPES[options.dtype]
        self.tokens = self.training.global_batch_size * options.seq_len

    def run(self) -> Report:
        """Measure and return everything that goes to the JSON file."""
        options = self.options
        report: dict[str, Any] = {
            "cards": cards(find_hardware(self._table("sync", 1))),
            "model": f"{options.family} {options.flavor}",
            "dtype": options.dtype,
            "tokens_per_step": self.tokens,
            "micro_batch": [options.micro_batch_size, options.seq_len],
            "planned_for_gib": options.device_memory_gib,
        }
        if options.tests_xml is not None:
            report["tests"] = test_results(options.tests_xml)
        everything = find_hardware(EngineTable(devices=options.devices)).make_devices()
        report["copies"] = copy_rates(everything, options.copy_mib * 2**20)
        report["runs"] = list(self._runs(report))
        return report

    def _runs(self, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
        first_compile, *others = self.options.compile
        for update in self.options.updates:
            table = self._table(update, 1)
            store = build_store(self.model, self._config(table), find_hardware(table))
            try:
                store.initialize(self.model, seed=0)
                report["parameters"] = num_parameters(self.model)[0]
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

    def _micro_batches(self, seed: int) -> list[MicroBatch]:
        """Draw one step of random tokens, always the same ones for a seed."""
        return random_step(self.training, self.vocab_size, torch.Generator().manual_seed(seed))

    def _mfu(self, tokens_per_s: float, hardware: Hardware, num_cards: int) -> float | None:
        """Compute the share of the cards' peak that this speed is; None for a card of unknown speed."""
        peak = None if hardware.spec is None else hardware.spec.flops_per_s(self.training.dtype)
        all_cards = None if peak is None else num_cards * peak
        flops = flops_per_token(self.model, self.training.seq_len, self.dtype.itemsize)
        return mfu(tokens_per_s, flops, all_cards)

    def _table(self, update: str, workers: int, compiled: str | None = None) -> EngineTable:
        """Make the engine's settings; `compiled` is a value of `--compile`, its first one by default."""
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
        hardware, config = find_hardware(table), self._config(table)
        question = run_question(self.model, config, hardware)
        plan, devices = plan_for(question), hardware.make_devices()
        baseline_bytes = start_peak(devices)
        compiler = self._layer_compiler(table, hardware, question.stays_uncompiled)
        start_s = time.perf_counter()
        with build_engine(self.model, store, devices, plan, config, compiler) as engine:
            results, ends_s, allocations = self._steps(engine)
            peak_bytes = peak(devices) - baseline_bytes
        return {
            **figures,
            **self._speed(results, ends_s, hardware, workers),
            "first_step_s": ends_s[0] - start_s,  # with all compilation
            "plan": json.loads(plan.to_json()),
            "predicted_step_s": plan.step_s if hardware.spec is not None else None,
            # As if every worker had a card of its own.
            "predicted_from_measured_layers_s": evaluate_plan(
                plan.partition, plan.rounds, measured, plan.num_devices, plan.num_micro_batches, plan.update
            ).step_s,
            # Several workers may share a card, whose peak is theirs together.
            "device_peak_gib": peak_bytes / GIB,
            "predicted_device_gib": plan.device_bytes * len(devices) / num_cards(devices) / GIB,
            "allocations_after_warm_up": allocations[-1] - allocations[WARM_UP_STEPS - 1],
            "host_gib": psutil.Process().memory_info().rss / GIB,
        }

    def _config(self, table: EngineTable) -> Config:
        return Config.model_construct(training=self.training, engine=table, optimizer=OPTIMIZER)

    def _layer_compiler(
        self, table: EngineTable, hardware: Hardware, stays_uncompiled: bool
    ) -> LayerCompiler | None:
        """Make or find the compiler that all runs with this setting share, as the engines of one run do."""
        if table.compile not in self._compilers:
            self._compilers[table.compile] = layer_compiler(
                self.model, table, hardware.kind, stays_uncompiled
            )
        return self._compilers[table.compile]

    def _steps(self, engine: Engine) -> tuple[list[StepResult], list[float], list[int]]:
        """Run warm-up and measured steps; each is dispatched while the step before it runs."""
        results: list[StepResult] = []
        ends_s: list[float] = []
        allocations: list[int] = []
        for step in range(WARM_UP_STEPS + self.options.steps):
            results.append(engine.forward_backward(self._micro_batches(seed=step)))
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
        measured = results[WARM_UP_STEPS:]
        sums = [
            {name: sum(map(figure, result.reports())) for name, figure in SUMMED.items()}
            for result in measured
        ]
        return {
            "losses": [result.loss() for result in results],
            "steps_s": steps_s,
            "step_s": step_s,
            "tokens_per_s": results[-1].num_labels / step_s,
            "mfu": self._mfu(results[-1].num_labels / step_s, hardware, num_cards(hardware.make_devices())),
            "optimizer_s": statistics.median(result.update().seconds for result in measured),
            "per_device_and_step": {
                name: statistics.median(one[name] for one in sums) / workers for name in SUMMED
            },
        }

    def _measure_layers(self, store: HostStore) -> tuple[list[dict[str, Any]], float, Costs]:
        """Measure each layer's own times in the first steps, with one layer per stage; also return the first loss."""
        table = self._table("sync", 1).model_copy(update={"update": store.mode.name})
        hardware, config = find_hardware(table), self._config(table)
        question = run_question(self.model, config, hardware)
        counted = question.costs()
        partition = Partition((1,) * (counted.num_layers - 1), 1, (1,) * (counted.num_layers - 1))
        plan = evaluate_plan(partition, 1, counted, 1, self.options.micro_batches, store.mode.name)
        results = []
        compiler = self._layer_compiler(table, hardware, question.stays_uncompiled)
        devices = hardware.make_devices()
        with build_engine(self.model, store, devices, plan, config, compiler) as engine:
            for step in range(WARM_UP_STEPS):
                results.append(engine.forward_backward(self._micro_batches(seed=step)))
                engine.step(LR)
                results[-1].collect()
        costs = measured_costs(counted, layer_times(results[-1].reports()))
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

    def _resident(self, store: HostStore) -> dict[str, Any]:
        """Train the rival from the same weights and on the same tokens."""
        hardware = find_hardware(self._table("sync", 1))
        device = hardware.make_devices()[0].torch_device
        start_peak(hardware.make_devices())
        try:
            loop = ResidentLoop(self.model, store.weights(), device, self.dtype)
            losses, steps_s = [], []
            for step in range(1 + self.options.steps):
                start_s = time.perf_counter()
                losses.append(loop.step(self._micro_batches(seed=step)))
                steps_s.append(time.perf_counter() - start_s)
        except torch.OutOfMemoryError as error:  # the engine is for models that are larger than the card
            return {"left_out": f"does not fit: {str(error).splitlines()[0]}"}
        finally:
            # Freed before the engine runs, whose peak must not contain the rival's memory.
            loop = None  # type: ignore[assignment]
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.empty_cache()
        step_s = statistics.median(steps_s[1:])
        return {
            "losses": losses,
            "step_s": step_s,
            "tokens_per_s": self.tokens / step_s,
            "mfu": self._mfu(self.tokens / step_s, hardware, 1),
            "device_peak_gib": peak(hardware.make_devices()) / GIB,
        }


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
runs compile them (engine.compile = "auto"), and one run beside the first has nothing compiled. --devices cpu runs the
same code on virtual devices, for a try without a GPU. Prints a short table; everything goes to the JSON file. --check
asks for finite losses and for given tests that passed.""",
    {
        "--devices": Option("cuda", "kind of device, as in engine.devices"),
        "--family": Option("qwen3", "model family", sorted(OWN_FAMILIES)),
        "--flavor": Option("1.7B", "the family's flavor"),
        "--dtype": Option("bfloat16", "number format of weights and computation", sorted(DTYPES)),
        "--seq-len": Option(2048, "tokens of a sequence"),
        "--micro-batch-size": Option(4, "sequences of a micro-batch"),
        "--micro-batches": Option(16, "micro-batches of a step"),
        "--steps": Option(4, "measured steps of each run"),
        "--workers": Option([1, 2], "workers of each run"),
        "--updates": Option(["sync", "async"], "age of the weights", ["sync", "async"]),
        "--device-memory-gib": Option(21.0, "memory of a card that the plan may use"),
        "--copy-mib": Option(512, "size of the copies whose rate is measured"),
        "--budget-s": Option(270.0, "no run starts after so many seconds"),
        "--compile": Option(
            ["auto", "false"],
            "engine.compile of all runs, and of further runs beside the first one",
            list(COMPILE),
        ),
        "--tests-xml": Option(None, "pytest's JUnit file, to be counted into the figures", type=Path),
    },
    lambda options: Bench(options).run(),
    headline,
    "--devices cpu --flavor debug --seq-len 32 --micro-batch-size 1 --micro-batches 2 --steps 1 "
    "--device-memory-gib 0.02 --copy-mib 1 --workers 1 --updates sync",
    missed_bounds,
    show=figures_table,
)
