"""Plan a run without running it: does it fit, where the memory goes, how fast, and what to change.

    torchround plan --config qwen3_32b.toml --device rtx4090 --num-devices 8 --host-memory-gib 800

Any key of the config can follow, as for train.py: `--training.seq_len 8192`. A card that is not in the table is
given by numbers: `--device-memory-gib 24 --device-tflops 165 --pcie-gb-per-s 32`. Nothing is allocated.
"""

import argparse
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torchround.accelerators import deterministic_operations
from torchround.commands import CommandError
from torchround.commands.configured_model import build_model, find_weights
from torchround.commands.machine_lines import machine_parts, planned_machines
from torchround.config import Config, ConfigError, Options, parse_command_line
from torchround.data import MissingTokenizerError, TokenizerError, build_tokenizer
from torchround.data.loader import loader_bytes
from torchround.engine.errors import EngineUsageError
from torchround.hf import HFError
from torchround.layer import LayeredModel
from torchround.models import ModelConfigError
from torchround.pipeline.cards import DeviceSpec, UnknownPeakError, device_names, find_device
from torchround.pipeline.costs import Costs, CostsError
from torchround.pipeline.kept_report import ratio_text
from torchround.pipeline.memory import GIB, PROGRAM_BYTES, HostMemory, size_text
from torchround.pipeline.partition import PlanError
from torchround.pipeline.plan import Plan, layer_names
from torchround.pipeline.plan_report import PlanReport, report_plan
from torchround.pipeline.run_question import ONE_MACHINE, PlannedMachines, RunQuestion
from torchround.run.hardware import USABLE_DEVICE_FRACTION, Hardware, planned_kind
from torchround.run.numbers import RunNumbers, run_question

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

# The value of `--costs` for measured times that are part of the repository, and their folder.
SHIPPED, MEASURED_TIMES = "shipped", Path(__file__).parents[2] / "docs" / "costs"
WIDTH = 110  # in characters, of the tables when the output is not a terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Returns the exit code: 0 if the run fits, 1 if it does not, 2 for a mistake of the user."""
    given, overrides = parser().parse_known_args(arguments)
    try:
        options = parse_command_line(["--config", given.config, *overrides])
        if options.print_config or options.dry_run:
            raise CommandError("--print-config and --dry-run are switches of train.py; a plan never trains")
        if given.lora_rank:
            options = _with_adapters(options, given.lora_rank)
        machine = hardware(given, options.config)
        with deterministic_operations(options.config.training.deterministic):
            question = configured_question(options, known_vocab_size(options), machine)
            if given.costs:
                question = question.with_times(measured_costs(given))
            answer = report_plan(question)
    except (
        *(ConfigError, ModelConfigError, CommandError, EngineUsageError, CostsError),
        *(TokenizerError, HFError, PlanError, UnknownPeakError),
    ) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    show_plan(answer)
    show_advice(options, machine, answer)
    return 0 if answer.plan is not None else 1


def measured_costs(given: argparse.Namespace) -> Costs:
    """Read the measured times that `--costs` asks for. Raises `CommandError` or `CostsError`."""
    path = Path(given.costs)
    if given.costs == SHIPPED:
        path = MEASURED_TIMES / f"{given.device}_{Path(given.config).stem}.json"
        if not path.is_file():
            known = ", ".join(sorted(file.name for file in MEASURED_TIMES.glob("*_*.json")))
            raise CommandError(
                f"--costs {SHIPPED}: there is no {path.name}; measured times are shipped as {known}"
            )
    try:
        return Costs.from_json(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"--costs {path}: {error}") from None


def configured_question(options: Options, vocab_size: int | None, hardware: Hardware) -> RunQuestion:
    """Return the planner's question for the configured run on `hardware`. A dry run asks it too.

    `vocab_size` as in `build_model`. The pretrained files are read only if weights stay in them, so that a plan
    needs no download.
    """
    config = options.config
    model = build_model(options, vocab_size)
    mapped = find_weights(options, model)[1] if config.lora.map_base else {}
    return question_of(config, model, hardware, mapped, planned_machines(config.machines))


def question_of(
    config: Config,
    model: LayeredModel,
    hardware: Hardware,
    mapped: Collection[str],
    machines: PlannedMachines = ONE_MACHINE,
) -> RunQuestion:
    """Return the planner's question for a model that is built already; the last two arguments as in `run_question`."""
    return run_question(
        model,
        RunNumbers(config.training, config.engine, config.machines, config.optimizer),
        hardware,
        mapped,
        validates=config.validation.interval_steps > 0,
        loader_bytes_for=partial(loader_bytes, config.data),
        machines=machines,
    )


def known_vocab_size(options: Options) -> int | None:
    """Return the size of the run's vocabulary; None if its tokenizer is not on this machine, as a plan needs no download.

    Raises `TokenizerError` for a tokenizer that is here but cannot be read: a run would refuse it too.
    """
    try:
        return build_tokenizer(options.config.tokenizer, options.config.model.hf_path).vocab_size
    except MissingTokenizerError:
        return None


def _with_adapters(options: Options, rank: int) -> Options:
    """Return the options with `lora.rank` set, which `--lora-rank` is short for."""
    lora = options.config.lora.model_copy(update={"rank": rank})
    return replace(options, config=options.config.model_copy(update={"lora": lora}))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options; other arguments are overrides of the config."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = result.add_argument
    add("--config", required=True, help="TOML file, looked up as given, then in configs/")
    add("--device", help=f"card: {', '.join(device_names())}")
    add("--num-devices", type=count, help="default: engine.num_devices, else 1")
    add(
        "--host-memory-gib",
        type=positive,
        help="host memory that the run may use; default: engine.host_memory_gib, else no limit",
    )
    add("--device-memory-gib", type=positive, help="of each device; default: the card's")
    add("--device-tflops", type=positive, help="dense peak in the run's dtype, instead of the card's")
    add("--pcie-gb-per-s", type=positive, help="nominal, one direction, instead of the card's")
    add(
        "--costs",
        help=f'file of measured layer times, or "{SHIPPED}": those in docs/costs/ of this card and config',
    )
    add("--lora-rank", type=count, default=0, help="plan adapters of this rank on lora.targets")
    return result


def count(text: str) -> int:
    """Parse a count from the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"given {text}; legal: an integer of at least 1")
    return int(text)


def positive(text: str) -> float:
    """Parse an amount from the command line."""
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < math.inf:
        raise argparse.ArgumentTypeError(f"given {text}; legal: a number above 0")
    return amount


def hardware(given: argparse.Namespace, config: Config) -> Hardware:
    """Describe the hardware: a card of the table, with the numbers that were given in place of the card's own."""
    card = find_device(given.device) if given.device else None
    if given.device and card is None:
        raise CommandError(
            f"--device {given.device} is not in the table: {', '.join(device_names())}; any other card is given "
            "by --device-memory-gib, --device-tflops and --pcie-gb-per-s"
        )
    numbers = (given.device_memory_gib, given.device_tflops, given.pcie_gb_per_s)
    if card is None and any(number is None for number in numbers):
        raise CommandError(
            f"give --device ({', '.join(device_names())}), or --device-memory-gib, --device-tflops and --pcie-gb-per-s"
        )
    memory_gib, tflops, pcie = numbers
    spec = card or DeviceSpec("given by numbers", 0.0, 0.0)
    spec = replace(spec, memory_gib=memory_gib or spec.memory_gib, pcie_gb_per_s=pcie or spec.pcie_gb_per_s)
    if tflops:  # it is that of the run's dtype, the only one that the plan asks for
        peaks: dict[str, float] = {config.training.dtype: tflops * 1e12}
        spec = replace(spec, peak_flops=peaks, fp16_accumulation_flops=None)
    host_gib = given.host_memory_gib or config.engine.host_memory_gib
    # The same limit as on the card itself (`find_hardware`): the config's, otherwise the usable share of the card.
    usable = config.engine.device_memory_gib or USABLE_DEVICE_FRACTION * spec.memory_gib
    return Hardware(
        kind=planned_kind(config.engine),
        num_devices=given.num_devices or config.engine.num_devices or 1,
        spec=spec,
        device_bytes=int(usable * GIB),
        host_bytes=None if host_gib is None else int(host_gib * GIB),
    )


def show_plan(answer: PlanReport) -> None:
    """Print the report. `train.py --dry-run` prints it here too."""
    from rich.console import Console  # importing rich draws random numbers, which an import must not

    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else WIDTH)
    console.print(rendered(answer), highlight=False, soft_wrap=not is_terminal)


def show_advice(options: Options, machine: Hardware, answer: PlanReport) -> None:
    """Print what would make a run fit that does not."""
    from torchround.commands.plan_advice import advice  # which asks this module for its questions

    for line in advice(options, machine, answer):
        print(line)


def rendered(report: PlanReport) -> "Group":
    """Turn the report into tables and lines for a console."""
    from rich.console import Group  # draws random numbers when imported, which an import must not

    timed = report.question.device is not None
    parts: list[object] = [_host_table(report)]
    if report.plan is not None:
        parts += [
            _plan_table(report.plan, timed),
            _device_line(report),
            *(report.kept.lines(timed) if report.kept is not None else ()),
            report.plan.summary(timed),
            *_speed_lines(report),
        ]
    else:
        parts += [f"does not fit: {report.problem}"]
    parts += [*machine_parts(report), *_faster_lines(report), _length_line(report)]
    return Group(*(part for part in parts if part))  # type: ignore[arg-type]


def _host_table(report: PlanReport) -> "Table":
    host: HostMemory = report.host
    rows: dict[str, int | str] = {
        "weights": host.weight_bytes,
        "gradients": host.gradient_bytes,
        "optimizer state": host.optimizer_bytes,
        **({} if report.plan is None else _plan_rows(host)),
        **({"messages of other machines": host.exchange_bytes} if host.exchange_bytes else {}),
        **({"readers of files": host.reader_bytes} if host.reader_bytes else {}),
        "batches of data": host.loader_bytes,
        **({"virtual devices": host.device_bytes} if host.device_bytes else {}),
        "all": host.total_bytes,
    }
    allowed = report.question.host_bytes
    rows["allowed"] = "no limit was given" if allowed is None else allowed
    if host.mapped_bytes:
        rows["besides, in files: frozen weights"] = host.mapped_bytes
    if report.question.devices_on_host:  # of a process that drives accelerators it was not measured
        rows["besides, about: Python and PyTorch"] = PROGRAM_BYTES
    table = _table("host memory", ("kind",), ("size",))
    for name, size in rows.items():
        table.add_row(name, size if isinstance(size, str) else size_text(size))
    return table


def _plan_rows(host: HostMemory) -> dict[str, int]:
    return {"activations between stages": host.activation_bytes, "tokens": host.integer_bytes}


def _plan_table(plan: Plan, timed: bool) -> "Table":
    names = ("stages", "kind", "layers each", "layers")
    table = _table(
        "plan, with one line for stages that are alike; bytes are of one device, compute at its peak",
        names,
        (*(("ms",) if timed else ()), "weights", "gradients", "compute"),
    )
    for first, last, stage in plan.runs():
        table.add_row(
            f"{first}" if first == last else f"{first} - {last}",
            stage.kind,
            f"{stage.num_layers}",
            layer_names(plan.stages[first], plan.stages[last]),
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


def _device_line(report: PlanReport) -> str:
    memory, limit = report.device, report.question.device_bytes
    assert memory is not None, "a plan has device memory"
    parts = (
        f"weights {size_text(memory.weights_bytes)}, gradients {size_text(memory.gradients_bytes)}, "
        f"activations and workspace {size_text(memory.compute_bytes)}, staging {size_text(memory.staging_bytes)}, "
        f"tokens {size_text(memory.integers_bytes)}"
    )
    if memory.kept_bytes:
        parts += f", kept activations {size_text(memory.kept_bytes)}"
    if memory.job_bytes:
        parts += f", matrices of the optimizer {size_text(memory.job_bytes)}"
    if memory.constant_bytes:
        parts += f", constant buffers {size_text(memory.constant_bytes)}"
    of = "" if limit is None else f" of {size_text(limit)} usable"
    return f"each device needs {size_text(memory.total_bytes)}{of}: {parts}"


def _speed_lines(report: PlanReport) -> Iterator[str]:
    device, transfers, plan = report.question.device, report.transfers, report.plan
    if device is None or transfers is None or plan is None:
        yield "the device's speed is not known, so there are no tokens/s and no PCIe load"
        return
    source = (
        "from measured times of layers" if report.question.is_measured else "from counted work, not measured"
    )
    yield f"about {report.tokens_per_s:,.0f} tokens/s, predicted {source}"
    stage = plan.stages[transfers.busiest_stage]
    yield (
        f"PCIe at {device.pcie_gb_per_s:g} GB/s each way: {100 * transfers.up_load:.0f} % up, "
        f"{100 * transfers.down_load:.0f} % down on average; {100 * transfers.busiest_load:.0f} % in the "
        f"busiest stage, {transfers.busiest_stage} ({stage.kind}, {layer_names(stage, stage)})"
    )
    if ratio := ratio_text(report.question, report.question.costs()):
        yield f"{ratio}, counted"
    if report.micro_batches_to_hide == math.inf:
        yield "activations alone take longer than computing: no number of micro-batches hides the weight upload"
    elif report.micro_batches_to_hide is not None:
        size = plan.num_micro_batches / plan.rounds
        hidden = size >= report.micro_batches_to_hide
        yield (
            f"weight upload is {'' if hidden else 'not '}hidden by compute (needs "
            f"{report.micro_batches_to_hide:.1f} micro-batches per round; this run has {size:g})"
        )


def _faster_lines(report: PlanReport) -> Iterator[str]:
    yield from map(str, sorted(report.faster, key=lambda change: -change.gain))


def _length_line(report: PlanReport) -> str:
    if not report.longest_tokens:
        return "no sequence length fits, not even 1024 tokens in micro-batches of one sequence"
    question = report.question
    num_sequences = question.num_devices * question.machines.count
    return (
        f"longest sequence that fits with a batch of {num_sequences} sequences, one per micro-batch, one round, "
        f'recompute = "{question.recompute}": {report.longest_tokens:,} tokens (predicted)'
    )
