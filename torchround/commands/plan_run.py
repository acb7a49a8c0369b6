"""Plan a run without running it: does it fit, where the memory goes, how fast, and what to change.

    torchround plan --config qwen3_32b.toml --device rtx4090 --num-devices 8 --host-memory-gib 800

The shipped configs name a machine ([machines]), so that `--config` alone is enough for them. Any key of the config can
follow, as for train.py: `--training.seq_len 8192`. A card that is not in the table is given by numbers:
`--device-memory-gib 24 --device-tflops 165 --pcie-gb-per-s 32`. Nothing is allocated.
"""

import argparse
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchround.accelerators import deterministic_operations
from torchround.commands import CommandError
from torchround.commands.configured_model import build_model, find_weights, flavors_of
from torchround.commands.machine_lines import fewest_machines, machine_parts, planned_machines
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
from torchround.pipeline.memory import GIB, PROGRAM_BYTES, gib_text, size_text
from torchround.pipeline.partition import PlanError
from torchround.pipeline.plan import Plan, layer_names
from torchround.pipeline.plan_report import PlanReport, changes_that_fit, fits, plan_for, report_plan
from torchround.pipeline.planner import InfeasiblePlanError
from torchround.pipeline.run_question import ONE_MACHINE, PlannedMachines, RunQuestion
from torchround.run.hardware import (
    USABLE_DEVICE_FRACTION,
    USABLE_HOST_FRACTION,
    Hardware,
    find_hardware,
    planned_kind,
)
from torchround.run.numbers import RunNumbers, num_parameters, run_question
from torchround.untrusted.terminal import say

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MOST_ADVICE = 3
ADVISED_RANK = 16  # of adapters
# The value of `--costs` for measured times that are part of the repository, and their folder.
SHIPPED, MEASURED_TIMES = "shipped", Path(__file__).parents[2] / "docs" / "costs"
WIDTH = 110  # in characters, of the tables when the output is not a terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Returns the exit code: 0 if the run fits, 1 if it does not, 2 for a mistake of the user."""
    given, overrides = parser().parse_known_args(arguments)
    try:
        rank = ["--lora.rank", f"{given.lora_rank}"] if given.lora_rank else []
        options = parse_command_line(["--config", given.config, *overrides, *rank])
        if options.print_config or options.dry_run:
            raise CommandError("--print-config and --dry-run are switches of train.py; a plan never trains")
        machine = hardware(given, options.config)
        with deterministic_operations(options.config.training.deterministic):
            question = configured_question(options, known_vocab_size(options), machine)
            if given.costs:
                question = question.with_times(measured_costs(given, machine))
            answer = report_plan(question)
            show_plan(answer, machine)
            show_advice(options, machine, answer)
    except (
        *(ConfigError, ModelConfigError, CommandError, EngineUsageError, CostsError),
        *(TokenizerError, HFError, PlanError, UnknownPeakError),
    ) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0 if answer.plan is not None else 1


def measured_costs(given: argparse.Namespace, machine: Hardware) -> Costs:
    """Read the measured times that `--costs` asks for. Raises `CommandError` or `CostsError`."""
    path = Path(given.costs)
    if given.costs == SHIPPED:
        card = machine.spec.name if machine.spec else "unknown"
        path = MEASURED_TIMES / f"{card}_{Path(given.config).stem}.json"
        if not path.is_file():
            known = (
                ", ".join(sorted(file.name for file in MEASURED_TIMES.glob("*_*.json"))) or "files of a clone"
            )
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


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options; other arguments are overrides of the config."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = result.add_argument
    add("--config", required=True, help="TOML file, looked up as given, then in configs/")
    add("--device", help=f"card, default: machines.card; {', '.join(device_names())}")
    add("--num-devices", type=count, help="default: engine.num_devices, else machines.num_cards, else 1")
    add(
        "--host-memory-gib",
        type=positive,
        help="host memory that the run may use; default: engine.host_memory_gib, else 95 %% of machines.host_memory_gib",
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
    """Describe the hardware: a card of the table, with the numbers that were given in place of the card's own.

    Raises `EngineUsageError` for a card that is not in the table.
    """
    memory_gib, tflops, pcie = given.device_memory_gib, given.device_tflops, given.pcie_gb_per_s
    is_described, legal = memory_gib and tflops and pcie, ", ".join(device_names())
    name = given.device or (None if is_described else config.machines.card)
    card = find_device(name) if name else None
    if name and card is None:
        key = "--device" if given.device else "machines.card"
        raise EngineUsageError(
            f"{key} {name} is not in the table: {legal}; any other card is given by --device-memory-gib, --device-tflops and "
            "--pcie-gb-per-s"
        )
    if card is None and not is_described:
        raise EngineUsageError(
            f"give --device ({legal}), or --device-memory-gib, --device-tflops and --pcie-gb-per-s"
        )
    spec = card or DeviceSpec("given by numbers", 0.0, 0.0)
    spec = replace(spec, memory_gib=memory_gib or spec.memory_gib, pcie_gb_per_s=pcie or spec.pcie_gb_per_s)
    if tflops:  # it is that of the run's dtype, the only one that the plan asks for
        peaks: dict[str, float] = {config.training.dtype: tflops * 1e12}
        spec = replace(spec, peak_flops=peaks, fp16_accumulation_flops=None)
    engine, machines = config.engine, config.machines
    host_gib = given.host_memory_gib or engine.host_memory_gib
    if host_gib is None and machines.host_memory_gib is not None:
        host_gib = USABLE_HOST_FRACTION * machines.host_memory_gib
    # The same limit as on the card itself (`find_hardware`): the config's, otherwise the usable share of the card.
    usable_gib = engine.device_memory_gib or USABLE_DEVICE_FRACTION * spec.memory_gib
    return Hardware(
        kind=planned_kind(engine),
        num_devices=given.num_devices or engine.num_devices or machines.num_cards or 1,
        spec=spec,
        device_bytes=int(usable_gib * GIB),
        host_bytes=None if host_gib is None else int(host_gib * GIB),
    )


def dry_run_hardware(config: Config) -> Hardware:
    """Describe the machine that the config names; without one, find this machine's hardware."""
    if config.machines.card is None:
        return find_hardware(config.engine)
    say("planned for the machine that the config names (--machines.card none: for this one)")
    return hardware(parser().parse_args(["--config", ""]), config)


def machine_text(machine: Hardware) -> str:
    """Say on one line which machine a plan is for, and what of its memory the run may use."""
    assert machine.spec is not None and machine.device_bytes is not None, "a described machine has a card"
    if machine.host_bytes is None:
        host = (
            "no limit of host memory was given (--host-memory-gib): it takes the least among the fastest, and "
            'engine.keep_activations = "auto" keeps nothing'
        )
    else:
        host = f"{gib_text(machine.host_bytes)} of host memory"
    return (
        f"planned for {machine.num_devices} x {machine.spec.name} with {gib_text(machine.device_bytes)} usable of "
        f"{machine.spec.memory_gib:g} GiB; {host}"
    )


def show_plan(answer: PlanReport, machine: Hardware) -> None:
    """Print the report. `train.py --dry-run` prints it here too."""
    from rich.console import Console  # importing rich draws random numbers, which an import must not

    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else WIDTH)
    if machine.spec is not None:
        console.print(machine_text(machine), highlight=False, soft_wrap=not is_terminal)
    console.print(rendered(answer), highlight=False, soft_wrap=not is_terminal)


def show_advice(options: Options, machine: Hardware, answer: PlanReport) -> None:
    """Print what would make a run fit that does not."""
    if answer.plan is None:
        for line in advice(options, machine, answer.question):
            print(line)


def plan_with_advice(options: Options, machine: Hardware, question: RunQuestion) -> Plan:
    """Return the plan of a run. Raises `InfeasiblePlanError` with the changes that would help."""
    try:
        return plan_for(question)
    except InfeasiblePlanError as error:
        if error.least is None:
            raise  # keys that contradict each other, not memory
        lines = (str(error), *advice(options, machine, question))
        raise InfeasiblePlanError("\n".join(lines), error.least) from error


def advice(options: Options, machine: Hardware, question: RunQuestion) -> Iterator[str]:
    """Yield the changes that help a run most that does not fit: those that change least come first."""
    settings = chain(changes_that_fit(question), _other_runs(options, machine, question))
    lines = [f"  with {setting}: fits" for setting in islice(settings, MOST_ADVICE)]
    yield from lines or ["  no three changes of the config make it fit"]


def _other_runs(options: Options, machine: Hardware, question: RunQuestion) -> Iterator[str]:
    """Yield what fits and trains something else, or elsewhere: another type, adapters, more machines, a smaller flavor."""
    config = options.config
    changes: list[tuple[str, str, str, object]] = []
    if config.training.dtype == "float32":
        changes.append(('training.dtype = "bfloat16"', "training", "dtype", "bfloat16"))
    if not config.lora.rank:
        changes.append((f"lora.rank = {ADVISED_RANK} (adapters)", "lora", "rank", ADVISED_RANK))
    for setting, table, key, value in changes:
        if _fits_with(options, machine, question.machines, table, key, value):
            yield setting
    if machines := fewest_machines(question):
        yield f"{machines} such machines"
    if config.model.flavor is None or config.model.shape is not None:
        return
    sizes = {
        name: num_parameters(build_model(_changed(options, "model", "flavor", name), warns=False))[0]
        for name in flavors_of(config.model.family)
        if not name.startswith("debug")
    }
    own = sizes.get(config.model.flavor, 0)
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[name] < own and _fits_with(options, machine, question.machines, "model", "flavor", name):
            yield f'model.flavor = "{name}"'
            return


def _fits_with(
    options: Options, machine: Hardware, machines: PlannedMachines, table: str, key: str, value: object
) -> bool:
    """Check whether the run fits with a key changed. A value that the model cannot take does not."""
    changed = _changed(options, table, key, value)
    try:
        model = build_model(changed, warns=False)
        question = question_of(changed.config, model, machine, (), machines)
        return fits(question)
    except (ConfigError, ModelConfigError, PlanError, UnknownPeakError):
        return False


def _changed(options: Options, table: str, key: str, value: object) -> Options:
    """Return the options with a key changed, and without a plan, which is for other layers or costs."""
    config = options.config
    tables = {
        table: getattr(config, table).model_copy(update={key: value}),
        "engine": config.engine.model_copy(update={"plan": None}),
    }
    return replace(options, config=config.model_copy(update=tables))


def rendered(report: PlanReport) -> "Group":
    """Turn the report into tables and lines for a console."""
    from rich.console import Group  # draws random numbers when imported, which an import must not

    timed = report.question.device is not None
    parts: list[object] = [_verdict(report), _host_table(report)]
    if report.plan is not None:
        parts += [_plan_table(report.plan, timed), _device_line(report), *report.plan.kept_lines()]
        parts += [] if report.kept is None else [report.kept.text(timed)]
        parts += [report.plan.summary(timed), *_speed_lines(report)]
    else:
        parts += [_device_line(report)]
    parts += [*machine_parts(report), *_faster_lines(report), _length_line(report)]
    return Group(*(part for part in parts if part))  # type: ignore[arg-type]


def _verdict(report: PlanReport) -> str:
    if report.plan is None:
        return f"does not fit: {report.problem}"
    limits = report.question.host_bytes, report.question.device_bytes
    host, device = ("" if limit is None else f" of {gib_text(limit)}" for limit in limits)
    return (
        f"fits: the host needs {gib_text(report.host.total_bytes)}{host}, each device "
        f"{gib_text(report.plan.device_bytes)}{device}"
    )


def _host_table(report: PlanReport) -> "Table":
    host, allowed = report.host, report.question.host_bytes
    rows = {kind: size_text(size) for kind, size in host.parts().items() if size}
    rows["all"] = size_text(host.total_bytes)
    rows["allowed"] = "no limit was given" if allowed is None else gib_text(allowed)
    if host.mapped_bytes:
        rows["besides, in files: frozen weights"] = size_text(host.mapped_bytes)
    if report.question.devices_on_host:  # of a process that drives accelerators it was not measured
        rows["besides, about: Python and PyTorch"] = size_text(PROGRAM_BYTES)
    table = _table("host memory", ("kind",), ("size",))
    for row in rows.items():
        table.add_row(*row)
    return table


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
    if report.device is None:
        return ""
    memory, limit = report.device, report.question.device_bytes
    of = "" if limit is None else f" of {gib_text(limit)} usable"
    return f"each device needs {size_text(memory.total_bytes)}{of}: {memory.text()}"


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
        yield ratio if report.question.is_measured else f"{ratio}, counted"
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
        return "no sequence of 1024 tokens fits, not even in micro-batches of one"
    question = report.question
    num_sequences = question.num_devices * question.machines.count
    longer = report.longest_by_16_bits > report.longest_tokens
    return (
        f"longest sequence that fits with a batch of {num_sequences} sequences, one per micro-batch, one round, "
        f'recompute = "{question.recompute}": {report.longest_tokens:,} tokens (predicted)'
        + (f'; engine.accumulate_dtype = "bfloat16": {report.longest_by_16_bits:,} tokens' if longer else "")
    )
