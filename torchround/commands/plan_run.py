"""Plan a run without running it: does it fit, where the memory goes, how fast, and what to change.

    torchround plan --config qwen3_32b.toml --device rtx4090 --num-devices 8 --host-memory-gib 800

The shipped configs name a machine ([machines]), so that `--config` alone is enough for them. Any key of the config can
follow, as for train.py: `--training.seq_len 8192`. A card that is not in the table is given by numbers:
`--device-memory-gib 24 --device-tflops 165 --pcie-gb-per-s 32`. Nothing is allocated.
"""

import argparse
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from torchround.accelerators import deterministic_operations
from torchround.commands import POSITIVE_COUNT, CommandError, new_parser, number
from torchround.commands.configured_model import MISTAKES, build_model, find_weights
from torchround.config import Config, MachinesTable, Options, parse_command_line
from torchround.data import MissingTokenizerError, build_tokenizer
from torchround.data.loader import loader_bytes
from torchround.engine.errors import EngineUsageError
from torchround.layer import LayeredModel
from torchround.planning.cards import DeviceSpec, device_names, find_device
from torchround.planning.costs import Costs
from torchround.planning.machine_report import (
    fewest_machines,
    report_exchange,
    usable_bytes_per_s,
)
from torchround.planning.memory import GIB, PROGRAM_BYTES, gib_text, size_text
from torchround.planning.plan import Plan, text_table
from torchround.planning.plan_report import (
    PlanReport,
    changes_that_fit,
    gain_text,
    gains,
    kept_text,
    link_text,
    longest_tokens,
    plan_for,
    ratio_text,
    report_plan,
)
from torchround.planning.planner import InfeasiblePlanError
from torchround.planning.run_question import ONE_MACHINE, PlannedMachines, RunQuestion
from torchround.run.hardware import (
    USABLE_DEVICE_FRACTION,
    USABLE_HOST_FRACTION,
    Hardware,
    find_hardware,
    planned_kind,
)
from torchround.run.numbers import RunNumbers, run_question
from torchround.untrusted.terminal import say

MOST_ADVICE = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Returns the exit code: 0 if the run fits, 1 if it does not, 2 for a mistake of the user."""
    given, overrides = parser().parse_known_args(arguments)
    try:
        options = parse_command_line(["--config", given.config, *overrides])
        if options.print_config or options.dry_run:
            raise CommandError("--print-config and --dry-run are switches of train.py; a plan never trains")
        machine = hardware(given, options.config)
        with deterministic_operations(options.config.training.deterministic):
            question = configured_question(options, known_vocab_size(options), machine)
            if given.costs:
                try:
                    question = question.with_times(Costs.from_json(Path(given.costs).read_text()))
                except (OSError, ValueError) as error:
                    raise CommandError(f"--costs {given.costs}: {error}") from None
            answer = report_plan(question)
            show_plan(machine, answer)
    except (*MISTAKES, CommandError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0 if answer.plan is not None else 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options; other arguments are overrides of the config."""
    result = new_parser(__doc__)
    amount = number(float, "a number above 0", lambda value: 0 < value < math.inf)
    add = result.add_argument
    add("--config", required=True, help="TOML file, looked up as given, then in configs/")
    add("--device", help=f"card, default: machines.card; {', '.join(device_names())}")
    add("--num-devices", type=POSITIVE_COUNT, help="default: engine.num_devices, else machines.num_cards")
    add(
        "--host-memory-gib",
        type=amount,
        help="host memory that the run may use; default: engine.host_memory_gib, else 95 %% of machines.host_memory_gib",
    )
    add("--device-memory-gib", type=amount, help="of each device; default: the card's")
    add("--device-tflops", type=amount, help="dense peak in the run's dtype, instead of the card's")
    add("--pcie-gb-per-s", type=amount, help="nominal, one direction, instead of the card's")
    add("--costs", help="file of measured layer times, such as those in docs/costs/")
    return result


def configured_question(options: Options, vocab_size: int | None, hardware: Hardware) -> RunQuestion:
    """Return the planner's question for the configured run on `hardware`. A dry run asks it too.

    `vocab_size` as in `build_model`. The pretrained files are read only if weights stay in them, so that a plan needs no
    download.
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
        RunNumbers.of(config),
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


def show_plan(machine: Hardware, answer: PlanReport) -> None:
    """Print the report, and what would make a run fit that does not. `train.py --dry-run` prints it here too."""
    lines: Iterable[str] = report_lines(answer)
    if machine.spec is not None:
        lines = chain([machine_text(machine)], lines)
    if answer.plan is None:
        lines = chain(lines, advice(answer.question))
    for line in filter(None, lines):
        say(line)


def plan_with_advice(question: RunQuestion) -> Plan:
    """Return the plan of a run. Raises `InfeasiblePlanError` with the changes that would help."""
    try:
        return plan_for(question)
    except InfeasiblePlanError as error:
        if error.least is None:
            raise  # keys that contradict each other, not memory
        lines = (str(error), *advice(question))
        raise InfeasiblePlanError("\n".join(lines), error.least) from error


def advice(question: RunQuestion) -> Iterator[str]:
    """Yield the changes that help a run most that does not fit: those that change least come first."""
    settings = list(islice(changes_that_fit(question), MOST_ADVICE))
    if len(settings) < MOST_ADVICE and (machines := fewest_machines(question)):
        settings.append(f"{machines} such machines")
    yield from (f"  with {setting}: fits" for setting in settings)


def report_lines(report: PlanReport) -> Iterator[str]:
    """Yield the report as lines and tables."""
    question, plan = report.question, report.plan
    limits = question.host_bytes, question.device_bytes
    of_host, of_device = ("" if limit is None else f" of {gib_text(limit)}" for limit in limits)
    if plan is None:
        yield f"does not fit: {report.problem}"
    else:
        devices = f"each device {gib_text(plan.device_bytes)}{of_device}"
        yield f"fits: the host needs {gib_text(report.host.total_bytes)}{of_host}, {devices}"
    yield f"host memory\n{_host_table(report)}\n"
    if plan is not None:
        yield "plan, with one line for stages that are alike; bytes are of one device, compute at its peak"
        yield plan.text(question.device is not None)
    if report.device is not None:
        usable = of_device and f"{of_device} usable"
        yield f"each device needs {size_text(report.device.total_bytes)}{usable}: {report.device.text()}"
    if plan is not None:
        yield kept_text(question, plan)
    if plan is not None and report.tokens_per_s is None:
        yield "the device's speed is not known, so there are no tokens/s and no PCIe load"
    elif plan is not None:
        source = "measured times of layers" if question.is_measured else "counted work, not measured"
        yield f"about {report.tokens_per_s:,.0f} tokens/s, predicted from {source}"
        yield link_text(question, plan)
        if ratio := ratio_text(question, question.costs()):
            yield ratio if question.is_measured else f"{ratio}, counted"
    if (count := question.machines.count) > 1:
        yield (
            f"{count} machines share each step of {question.step_micro_batches} micro-batches, at most "
            f"{question.num_micro_batches} on each; the plan and the host memory are for the machine with most to do"
        )
        if plan is not None:
            yield exchange_text(question, plan)
    if plan is not None:
        yield from (gain_text(question, *found) for found in gains(question, plan).items())
    yield _length_line(question)


def _host_table(report: PlanReport) -> str:
    host, allowed = report.host, report.question.host_bytes
    rows = {kind: size_text(size) for kind, size in host.parts().items() if size}
    rows["all"] = size_text(host.total_bytes)
    rows["allowed"] = "no limit was given" if allowed is None else gib_text(allowed)
    if host.mapped_bytes:
        rows["besides, in files: frozen weights"] = size_text(host.mapped_bytes)
    if report.question.devices_on_host:  # of a process that drives accelerators it was not measured
        rows["besides, about: Python and PyTorch"] = size_text(PROGRAM_BYTES)
    return text_table([*rows.items()], 1)


def _length_line(question: RunQuestion) -> str:
    longest = in_16_bits = longest_tokens(question)
    if question.accumulate_bytes > 2:
        in_16_bits = longest_tokens(replace(question, accumulate_bytes=2))
    if not longest:
        return "no sequence of 1024 tokens fits, not even in micro-batches of one"
    more = f'; engine.accumulate_dtype = "bfloat16": {in_16_bits:,} tokens' if in_16_bits > longest else ""
    return (
        f"longest sequence that fits with a batch of {question.num_devices * question.machines.count} sequences, one per "
        f'micro-batch, one round, recompute = "{question.recompute}": {longest:,} tokens (predicted){more}'
    )


def planned_machines(table: MachinesTable) -> PlannedMachines:
    """Return the machines that a dry run and the `plan` command plan for."""
    rate = None if table.gbit_per_s is None else usable_bytes_per_s(table.gbit_per_s)
    return PlannedMachines(table.planned, rate)


def exchange_text(question: RunQuestion, plan: Plan) -> str:
    """Describe what several machines exchange in a step, and how much of it lengthens the step."""
    exchange, rate = report_exchange(question, plan), question.machines.bytes_per_s
    sizes = exchange.gradient_bytes, exchange.weight_bytes
    gradients, weights = (size_text(round(nbytes)) for nbytes in sizes)
    text = f"{gradients} of gradients out and {weights} of weights back per step on the busiest link"
    if rate is None:
        return text
    text += f", {sum(sizes) / rate:.3g} s at {rate * 8 / 1e9:.3g} Gb/s of data"
    if question.device is None:
        return text  # the devices' speed says how much of this is hidden
    tokens_per_s = question.global_batch_size * question.seq_len / exchange.step_s
    return (
        f"{text}, {exchange.exposed_s:.3g} s of it not hidden by compute; step {exchange.step_s:.4g} s, about "
        f"{tokens_per_s:,.0f} tokens/s of all machines"
    )
