"""Lines and a table about several machines in the report of a plan: what they exchange, and the speed of 1 to 16 of them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torchround.config import MachinesTable
from torchround.pipeline.machine_report import (
    MACHINE_COUNTS,
    USABLE_RATE,
    ExchangeReport,
    MachineRow,
    machine_rows,
    rates_shown,
    report_exchange,
    usable_bytes_per_s,
)
from torchround.pipeline.memory import size_text
from torchround.pipeline.plan import Plan
from torchround.pipeline.plan_report import PlanReport, fits
from torchround.pipeline.run_question import PlannedMachines, RunQuestion

if TYPE_CHECKING:
    from rich.table import Table


def planned_machines(table: MachinesTable) -> PlannedMachines:
    """Return the machines that a dry run and the `plan` command plan for."""
    rate = None if table.gbit_per_s is None else usable_bytes_per_s(table.gbit_per_s)
    return PlannedMachines(table.planned, rate)


def machine_parts(report: PlanReport) -> Iterator["str | Table"]:
    """Yield what a report says about several machines; nothing if it is about one."""
    question = report.question
    if question.machines.count == 1:
        return
    yield (
        f"{question.machines.count} machines share each step of {question.step_micro_batches} micro-batches, at most "
        f"{question.num_micro_batches} on each; the plan and the host memory are for the machine with most to do"
    )
    if report.plan is not None:
        yield from _exchange_lines(question, report_exchange(question, report.plan, question.costs()))
    if question.device is not None:
        yield _table(question, machine_rows(question, report.plan))


def network_text(question: RunQuestion, plan: Plan) -> str:
    """Describe the measured network of a run of several machines, and what its exchange takes of a step."""
    rate = question.machines.bytes_per_s
    assert rate is not None, "several machines measure their network"
    exchange = report_exchange(question, plan, question.costs())
    text = (
        f"{rate * 8 / 1e9:.3g} Gb/s each way (measured); "
        f"{size_text(round(exchange.gradient_bytes))} of gradients and {size_text(round(exchange.weight_bytes))} of weights "
        f"per step take {(exchange.gradient_bytes + exchange.weight_bytes) / rate:.3g} s"
    )
    # The devices' speed says how much of this is hidden.
    return text if question.device is None else f"{text}, {exchange.exposed_s:.3g} s not hidden by compute"


def fewest_machines(question: RunQuestion) -> int | None:
    """Return the fewest machines, of the numbers in the table, on which a run fits that does not; None if none do.

    More machines share the state in host memory. They do not help devices that are too small.
    """
    if question.update == "bounded":
        return None
    for count in MACHINE_COUNTS:
        more = replace(question, given=None).on_machines(count)
        if question.machines.count < count <= more.step_micro_batches and fits(more):
            return count
    return None


def _exchange_lines(question: RunQuestion, exchange: ExchangeReport) -> Iterator[str]:
    yield (
        f"exchange per step on the busiest link: {size_text(round(exchange.gradient_bytes))} of gradients out, "
        f"{size_text(round(exchange.weight_bytes))} of weights back"
    )
    if question.device is None or exchange.gradients_s is None or exchange.weights_s is None:
        return
    tokens_per_s = question.global_batch_size * question.seq_len / exchange.step_s
    yield (
        f"at {_gbit(question.machines.bytes_per_s):g} Gb/s: {exchange.gradients_s:.3g} s and {exchange.weights_s:.3g} s on "
        f"the wire, {exchange.exposed_s:.3g} s not hidden by compute; step {exchange.step_s:.4g} s, about "
        f"{tokens_per_s:,.0f} tokens/s of all machines"
    )


def _gbit(bytes_per_s: float | None) -> float:
    """Return the line rate of a usable rate, in Gb/s."""
    assert bytes_per_s is not None, "a rate is given"
    return round(bytes_per_s * 8 / 1e9 / USABLE_RATE, 6)


def _table(question: RunQuestion, rows: tuple[MachineRow, ...]) -> "Table":
    from rich.box import SIMPLE_HEAD  # importing rich draws random numbers, which an import must not
    from rich.table import Table

    rates = [f"{_gbit(rate):g} Gb/s" for rate in rates_shown(question.machines)]
    title = (
        f"tokens/s of all machines, with a batch of {question.global_batch_size} sequences for all; in brackets the "
        "share of what each machine gives in the first row that fits, without an exchange"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("machines", "micro-batches", "host", *rates, "no exchange"):
        table.add_column(name, justify="right", no_wrap=True)
    for cells in row_texts(question, rows):
        table.add_row(*cells)
    return table


def row_texts(question: RunQuestion, rows: tuple[MachineRow, ...]) -> Iterator[list[str]]:
    """Yield the cells of each row: machines, micro-batches of each, host memory, tokens/s for each rate."""
    tokens = question.global_batch_size * question.seq_len
    first = next((row for row in rows if row.step_s), None)
    # The fewest machines that fit, without an exchange: what each of them gives is what a further one could add.
    alone = math.nan if first is None else tokens / first.step_s[-1] / first.count
    for row in rows:
        if row.problem:
            yield [f"{row.count}", row.problem, *[""] * (len(rates_shown(question.machines)) + 2)]
            continue
        speeds = [tokens / step_s for step_s in row.step_s]
        yield [
            f"{row.count}",
            f"{row.micro_batches}",
            size_text(row.host_bytes),
            *(f"{speed:,.0f} ({speed / alone / row.count:.2f})" for speed in speeds),
        ]
