"""What a run needs and how fast it would be, from its config and model, before anything large is allocated.

Used by `train.py --dry-run` and `scripts/plan.py`. The figures come from `pipeline/plan_report.py`; here a
config is turned into its question and the answers into text.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchround.config import Config
from torchround.engine.build import DTYPES, given_plan, layer_parameters, layer_works
from torchround.layer import LayeredModel
from torchround.pipeline.costs import Costs, costs_from_work
from torchround.pipeline.devices import ASSUMED_DEVICE, DeviceSpec
from torchround.pipeline.memory import HostMemory, size_text
from torchround.pipeline.plan import Plan, PlannedStage
from torchround.pipeline.plan_report import PlanReport, RunQuestion
from torchround.run.host_budget import parameter_counts

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


@dataclass(frozen=True)
class Hardware:
    """Devices to plan for, of `kind` `cuda` or `cpu`. `spec` is None where the card is not known; limits in bytes,
    None for no limit."""

    num_devices: int
    spec: DeviceSpec | None
    device_bytes: int | None
    host_bytes: int | None
    kind: str = "cuda"


def run_question(
    config: Config, model: LayeredModel, hardware: Hardware, mapped: Collection[str] = ()
) -> RunQuestion:
    """The run of `config` on `hardware`; `model` has its adapters, and `mapped` are names of weights that stay in files.

    Raises `EngineUsageError` where `engine.plan` is a file that holds none.
    """
    training, engine = config.training, config.engine
    element_bytes = DTYPES[training.dtype].itemsize
    gradient_dtype = training.dtype if engine.grad_dtype == "auto" else engine.grad_dtype

    def costs_for(tokens: int, sequences: int, accumulate_bytes: int) -> Costs:
        return costs_from_work(
            model.names,
            layer_works(model, sequences, tokens, element_bytes, hardware.kind, engine.compile is True),
            layer_parameters(model),
            hardware.spec or ASSUMED_DEVICE,
            dtype=training.dtype,
            element_bytes=element_bytes,
            accumulate_bytes=accumulate_bytes,
        )

    return RunQuestion(
        costs_for=costs_for,
        parameters=parameter_counts(model, mapped),
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        num_devices=hardware.num_devices,
        device=hardware.spec,
        device_bytes=hardware.device_bytes,
        host_bytes=hardware.host_bytes,
        update=engine.update,
        rounds=engine.rounds or 1,
        recompute=engine.recompute,
        element_bytes=element_bytes,
        gradient_bytes=DTYPES[gradient_dtype].itemsize,
        accumulate_bytes=DTYPES[engine.accumulate_dtype].itemsize,
        given=None if engine.plan is None else given_plan(engine),
    )


def rendered(report: PlanReport) -> "Group":
    """The report for a console."""
    from rich.console import Group  # draws random numbers when imported, which an import must not

    timed = report.question.device is not None
    parts: list[object] = [_host_table(report)]
    if report.plan is not None:
        parts += [
            _plan_table(report.plan, timed),
            _device_line(report),
            report.plan.summary(timed),
            *_speed_lines(report),
        ]
    else:
        parts += [f"does not fit: {report.problem}", *_change_lines(report)]
    parts += [*_faster_lines(report), _length_line(report)]
    return Group(*(part for part in parts if part))  # type: ignore[arg-type]


def _host_table(report: PlanReport) -> "Table":
    host: HostMemory = report.host
    rows = {
        "weights": host.weight_bytes,
        "gradients": host.gradient_bytes,
        "optimizer state": host.optimizer_bytes,
        "activations between stages": host.activation_bytes,
        "tokens": host.integer_bytes,
        "all": host.total_bytes,
    }
    if report.question.host_bytes is not None:
        rows["allowed"] = report.question.host_bytes
    if host.mapped_bytes:
        rows["besides, in files: frozen weights"] = host.mapped_bytes
    table = _table("host memory", ("kind",), ("size",))
    for name, size in rows.items():
        table.add_row(name, size_text(size))
    return table


def _plan_table(plan: Plan, timed: bool) -> "Table":
    names = ("stages", "kind", "layers each", "layers")
    table = _table(
        "plan, one line for stages that are alike; weights, gradients and compute peak of a device",
        names,
        (*(("ms",) if timed else ()), "weights", "gradients", "compute"),
    )
    for first, last, stage in plan.runs():
        table.add_row(
            f"{first}" if first == last else f"{first} - {last}",
            stage.kind,
            f"{stage.num_layers}",
            _layers(plan.stages[first], plan.stages[last]),
            *((f"{1e3 * stage.seconds:.1f}",) if timed else ()),
            *(size_text(size) for size in (stage.weight_bytes, stage.gradient_bytes, stage.compute_bytes)),
        )
    return table


def _table(title: str, names: tuple[str, ...], numbers: tuple[str, ...]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _layers(first: PlannedStage, last: PlannedStage) -> str:
    """The layers of a run of stages, lowest first; backward stages are dispatched from the deepest."""
    low, high = (last, first) if first.kind == "backward" else (first, last)
    if low.first_layer == high.last_layer:
        return low.first_layer
    return f"{low.first_layer} .. {high.last_layer}"


def _device_line(report: PlanReport) -> str:
    memory, limit = report.device, report.question.device_bytes
    assert memory is not None, "a plan has device memory"
    parts = (
        f"weights {size_text(memory.weights_bytes)}, gradients {size_text(memory.gradients_bytes)}, "
        f"activations and workspace {size_text(memory.compute_bytes)}, staging {size_text(memory.staging_bytes)}, "
        f"tokens {size_text(memory.integers_bytes)}"
    )
    of = "" if limit is None else f" of {size_text(limit)} usable"
    return f"each device needs {size_text(memory.total_bytes)}{of}: {parts}"


def _speed_lines(report: PlanReport) -> Iterator[str]:
    device, transfers, plan = report.question.device, report.transfers, report.plan
    if device is None or transfers is None or plan is None:
        yield "the device's speed is not in the table, so there is no tokens/s and no PCIe load"
        return
    yield f"about {report.tokens_per_s:,.0f} tokens/s, counted from FLOPs, not measured, with transfers taken as hidden"
    stage = plan.stages[transfers.busiest_stage]
    yield (
        f"PCIe at {device.pcie_gb_per_s:g} GB/s each way: {100 * transfers.up_load:.0f} % up, "
        f"{100 * transfers.down_load:.0f} % down on average; {100 * transfers.busiest_load:.0f} % in the "
        f"busiest stage, {transfers.busiest_stage} ({stage.kind}, {stage.first_layer} .. {stage.last_layer})"
    )
    if report.micro_batches_to_hide == math.inf:
        yield "activations alone take longer than what is computed: no number of micro-batches hides the weights"
    elif report.micro_batches_to_hide is not None:
        size = plan.num_micro_batches / plan.rounds
        verdict = (
            "computation hides them" if size >= report.micro_batches_to_hide else "devices wait for them"
        )
        yield (
            f"weights going up need {report.micro_batches_to_hide:.1f} micro-batches per round to be hidden, "
            f"this run has {size:g}: {verdict}"
        )


def _faster_lines(report: PlanReport) -> Iterator[str]:
    basis = "" if report.question.device is not None else ", if time went by FLOPs"
    for change in sorted(report.faster, key=lambda change: -change.gain):
        yield f"{change.setting} would take {100 * change.gain:.0f} % less time per step{basis}"


def _change_lines(report: PlanReport) -> Iterator[str]:
    for change in report.changes:
        yield f"  with {change.setting}: {'fits' if change.fits else 'still does not fit'}"


def _length_line(report: PlanReport) -> str:
    if not report.longest_tokens:
        return "no sequence length fits, not even 1024 tokens in micro-batches of one sequence"
    question = report.question
    return (
        f"longest sequence that fits with a batch of {question.num_devices} sequences, one per micro-batch, one round, "
        f'recompute = "{question.recompute}": {report.longest_tokens:,} tokens (predicted)'
    )
