"""Plan a run without running it: does it fit, where the memory goes, how fast, and what to change.

    torchround plan --config qwen3_32b.toml --device rtx4090 --num-devices 8 --host-memory-gib 800

The shipped configs name a machine ([machines]), so that `--config` alone is enough for them. Any key of the config can
follow, as for train.py: `--training.seq_len 8192`. Nothing is allocated.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

from torchround.accelerators import deterministic_operations
from torchround.commands import end_with_message, new_parser
from torchround.commands.configured_model import MISTAKES, build_model, find_weights
from torchround.config import MachinesTable, Options, nearest, parse_command_line, show
from torchround.data import MissingTokenizerError, build_tokenizer
from torchround.data.loader import loader_bytes
from torchround.planning import plan_report
from torchround.planning.cards import device_names, find_device
from torchround.planning.exchange_time import exchange_text, usable_bytes_per_s
from torchround.planning.memory import GIB, PROGRAM_BYTES, gib_text, size_text
from torchround.planning.plan import Plan, text_table
from torchround.planning.planner import InfeasiblePlanError
from torchround.planning.run_question import PlannedMachines, RunQuestion
from torchround.run.hardware import USABLE_DEVICE_FRACTION, USABLE_HOST_FRACTION, Hardware, planned_kind
from torchround.run.numbers import run_question
from torchround.untrusted.terminal import say

MOST_ADVICE = 3
RANK = 16  # of the adapters that a message proposes
SHORT = {
    "--device": "machines.card",
    "--num-devices": "engine.num_devices",
    "--host-memory-gib": "engine.host_memory_gib",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan. Returns the exit code: 0 if the run fits, 1 if it does not, 2 for a mistake of the user."""
    parser = new_parser(__doc__)
    parser.add_argument("--config", required=True, help="TOML file, looked up as given, then in configs/")
    for flag, key in SHORT.items():
        parser.add_argument(flag, dest=key, help=f"short for --{key}")
    given, overrides = parser.parse_known_args(arguments)
    overrides += [f"--{key}={value}" for key in SHORT.values() if (value := vars(given)[key]) is not None]

    def plan() -> int:
        options = parse_command_line(["--config", given.config, *overrides])
        machine = planned_hardware(options)
        with deterministic_operations(options.config.training.deterministic):
            answer = plan_report.report_plan(configured_question(options, machine))
            show_plan(machine, answer, options)
        return 0 if answer.plan is not None else 1

    return end_with_message(plan, MISTAKES)


def configured_question(options: Options, hardware: Hardware, *, warns: bool = True) -> RunQuestion:
    """Describe the configured run on `hardware` for the planner. Nothing is downloaded, and the tokenizer may be missing.

    The pretrained files are read only if weights stay in them. Raises `TokenizerError`.
    """
    config, vocab_size = options.config, None
    with suppress(MissingTokenizerError):
        vocab_size = build_tokenizer(config.tokenizer, config.model.hf_path).vocab_size
    model = build_model(options, vocab_size, warns=warns)
    mapped = find_weights(options, model)[1] if config.lora.map_base else {}
    machines = planned_machines(config.machines)
    return run_question(model, config, hardware, mapped, machines, partial(loader_bytes, config.data))


def planned_hardware(options: Options) -> Hardware:
    """Describe the machine that the config names. Raises `ConfigError` for a card that is not in the table."""
    engine, machines = options.config.engine, options.config.machines
    card = find_device(machines.card or "")
    if card is None:
        given = "no card is named" if machines.card is None else f"given {show(machines.card)}"
        near = nearest(machines.card or "", device_names())
        raise options.error("machines.card", f"{given} (--device); legal: {', '.join(device_names())}{near}")
    host_gib = engine.host_memory_gib
    if host_gib is None and machines.host_memory_gib is not None:
        host_gib = USABLE_HOST_FRACTION * machines.host_memory_gib
    # The same limit as on the card itself (`find_hardware`): the config's, otherwise the usable share of the card.
    usable_gib = engine.device_memory_gib or USABLE_DEVICE_FRACTION * card.memory_gib
    return Hardware(
        kind=planned_kind(engine),
        num_devices=engine.num_devices or machines.num_cards or 1,
        spec=card,
        device_bytes=int(usable_gib * GIB),
        host_bytes=None if host_gib is None else int(host_gib * GIB),
    )


def show_plan(machine: Hardware, answer: plan_report.PlanReport, options: Options) -> None:
    """Print the report, and what would make a run fit that does not. `train.py --dry-run` prints it here too."""
    if machine.spec is not None and machine.device_bytes is not None:
        host = "no limit was given" if machine.host_bytes is None else gib_text(machine.host_bytes)
        usable = f"{gib_text(machine.device_bytes)} usable of {machine.spec.memory_gib:g} GiB"
        say(f"planned for {machine.num_devices} x {machine.spec.name} with {usable}; host memory: {host}")
    for line in filter(None, report_lines(answer)):
        say(line)
    if answer.plan is None:
        say("\n".join(advice(answer.question, options, machine)))


def plan_with_advice(question: RunQuestion, options: Options, machine: Hardware) -> Plan:
    """Plan a run. Raises `InfeasiblePlanError` with the changes that would help."""
    try:
        return plan_report.plan_for(question)
    except InfeasiblePlanError as error:
        if error.least is None:
            raise  # keys that contradict each other, not memory
        changes = advice(question, options, machine)
        raise InfeasiblePlanError("\n".join([str(error), *changes]), error.least) from error


def advice(question: RunQuestion, options: Options, machine: Hardware) -> Iterator[str]:
    """Yield the changes that help a run most that does not fit: those that change least come first, adapters last."""
    settings = list(islice(plan_report.changes_that_fit(question), MOST_ADVICE))
    if not settings:
        yield "  no other plan makes it fit; --machines.planned N says whether N machines would do"
    if adapters := next(_adapters_that_fit(question, options, machine), None):
        settings = [*settings[: MOST_ADVICE - 1], adapters]
    yield from (f"  with {setting}: fits" for setting in settings)


def _adapters_that_fit(question: RunQuestion, options: Options, machine: Hardware) -> Iterator[str]:
    """Yield settings of adapters with which the run fits: on 16-bit weights if it has none yet, then on packed ones."""
    given = options.config.lora
    rank = given.rank or RANK
    for base, key, option in (("bf16", "", ""), ("nf4", ' and lora.base = "nf4"', " --lora.base nf4")):
        lora = given.model_copy(update={"rank": rank, "base": base})
        if lora == given or given.base != "bf16" or given.map_base:
            continue
        smaller = replace(options, config=options.config.model_copy(update={"lora": lora}))
        with suppress(*MISTAKES):  # a model may have none of the layers that get adapters
            asked = configured_question(smaller, machine, warns=False)
            if plan_report.fits(replace(asked, machines=question.machines)):
                yield f"lora.rank = {rank}{key} (adapters on released weights; finetune: --lora {rank}{option})"


def report_lines(report: plan_report.PlanReport) -> Iterator[str]:
    question, plan = report.question, report.plan
    limits = question.host_bytes, question.device_bytes
    of_host, of_device = ("" if limit is None else f" of {gib_text(limit)}" for limit in limits)
    if plan is None:
        yield f"does not fit: {report.problem}"
    else:
        devices = f"each device {gib_text(plan.device_bytes)}{of_device}"
        yield f"fits: the host needs {gib_text(report.host.total_bytes)}{of_host}, {devices}"
    rows = {kind: size_text(size) for kind, size in report.host.parts().items() if size}
    rows["all"] = size_text(report.host.total_bytes)
    rows["allowed"] = "no limit was given" if question.host_bytes is None else gib_text(question.host_bytes)
    if report.host.mapped_bytes:
        rows["besides, in files: frozen weights"] = size_text(report.host.mapped_bytes)
    if question.devices_on_host:  # of a process that drives accelerators it was not measured
        rows["besides, about: Python and PyTorch"] = size_text(PROGRAM_BYTES)
    yield f"host memory\n{text_table([*rows.items()], 1)}\n"
    if report.device is not None:
        yield f"each device needs {size_text(report.device.total_bytes)}{of_device}: {report.device.text()}"
    if plan is not None:
        yield "plan, with one line for stages that are alike; bytes are of one device, compute at its peak"
        yield plan.text(question.device is not None)
        yield plan_report.kept_text(question, plan)
        if report.tokens_per_s is None:
            yield "the device's speed is not known, so there are no tokens/s and no PCIe load"
        else:
            yield f"about {report.tokens_per_s:,.0f} tokens/s, predicted from counted work, not measured"
            yield plan_report.link_text(question, plan)
        if (count := question.machines.count) > 1:
            most = f"at most {question.num_micro_batches} on each"
            yield f"{count} machines share each step of {question.step_micro_batches} micro-batches, {most}"
            yield exchange_text(question, plan)
    batch = question.num_devices * question.machines.count
    if longest := plan_report.longest_tokens(question):
        yield f"longest sequence that fits with a batch of {batch}, one per micro-batch: {longest:,} tokens (predicted)"


def planned_machines(table: MachinesTable) -> PlannedMachines:
    rate = None if table.gbit_per_s is None else usable_bytes_per_s(table.gbit_per_s)
    return PlannedMachines(table.planned, rate)
