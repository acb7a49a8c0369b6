"""Several machines before a run: what they exchange in a step, what of it is exposed, and the speed of 1 to 16 machines.

A plan takes the exchange as hidden. This module simulates it beside the plan's step.
"""

import math
from dataclasses import dataclass, replace

from torchround.pipeline.costs import Costs
from torchround.pipeline.machine_shares import step_share
from torchround.pipeline.partition import split_evenly
from torchround.pipeline.plan import Plan
from torchround.pipeline.plan_report import host_memory, plan_for
from torchround.pipeline.planner import InfeasiblePlanError
from torchround.pipeline.run_question import PlannedMachines, RunQuestion
from torchround.pipeline.simulation.exchange_time import (
    Exchange,
    ExchangedBundle,
    exchange_step_seconds,
)
from torchround.pipeline.simulation.stage_times import LayerSums

# Share of a network's line rate that carries data.
USABLE_RATE = 0.9
# Line rates in Gb/s and numbers of machines that a report shows.
GBIT_PER_S, MACHINE_COUNTS = (10.0, 25.0, 100.0), (1, 2, 4, 8, 16)


def usable_bytes_per_s(gbit_per_s: float) -> float:
    """Return the bytes per second that a link of this line rate carries, each way."""
    return USABLE_RATE * gbit_per_s * 1e9 / 8


@dataclass(frozen=True)
class ExchangeReport:
    """The exchange of one step.

    - `gradient_bytes`, `weight_bytes`: what the busiest link carries in one direction.
    - `gradients_s`, `weights_s`: seconds on that link; None if its rate is not known.
    - `step_s`: seconds per step with the exchange; without a rate as if it took no time.
    - `exposed_s`: seconds of it that the exchange adds.
    """

    gradient_bytes: float
    weight_bytes: float
    gradients_s: float | None
    weights_s: float | None
    step_s: float
    exposed_s: float


def report_exchange(question: RunQuestion, plan: Plan, costs: Costs) -> ExchangeReport:
    """Simulate the exchange of the question's machines beside the steps of a plan.

    Raises `ValueError` for `bounded` plans, which several machines cannot run.
    """
    exchange = exchange_of(question, costs, question.machines.bytes_per_s or math.inf)
    local_rounds = len(round_sizes(question, plan.rounds))
    gradients, weights = exchange.wire_bytes(local_rounds)
    hidden_s = machine_step_seconds(question, plan, costs, math.inf)
    rate = question.machines.bytes_per_s
    step_s = hidden_s if rate is None else machine_step_seconds(question, plan, costs, rate)
    return ExchangeReport(
        gradient_bytes=gradients,
        weight_bytes=weights,
        gradients_s=None if rate is None else gradients / rate,
        weights_s=None if rate is None else weights / rate,
        step_s=step_s,
        # Both are means of the same steps, so equal times may differ by rounding.
        exposed_s=step_s - hidden_s if step_s > hidden_s * (1 + 1e-9) else 0.0,
    )


def exchange_of(question: RunQuestion, costs: Costs, bytes_per_s: float) -> Exchange:
    """Return what the question's machines exchange over links of this rate."""
    counts = question.parameters
    # An owner takes its share of the seconds in which one host updates all.
    per_parameter_s = sum(layer.optimizer_s for layer in costs.layers) / max(1, counts.trained)
    return Exchange(
        bundles=tuple(
            ExchangedBundle(bundle.numel, bundle.layers, bundle.numel * per_parameter_s)
            for bundle in counts.bundles
        ),
        num_machines=question.machines.count,
        bytes_per_s=bytes_per_s,
        gradient_bytes=question.gradient_bytes,
        weight_bytes=question.element_bytes,
    )


def round_sizes(question: RunQuestion, rounds: int) -> list[int]:
    """List the micro-batches of each round of the machine with the largest share."""
    share = step_share(question.step_micro_batches, rounds, 0, question.machines.count)
    return [len(part) for part in split_evenly(len(share.micro_batches), len(share.rounds))]


def machine_step_seconds(question: RunQuestion, plan: Plan, costs: Costs, bytes_per_s: float) -> float:
    """Compute the seconds per step of the question's machines, each with this plan, over links of this rate."""
    sizes, link = round_sizes(question, plan.rounds), question.keep_rule().link
    sums = LayerSums(costs.keeping(plan.kept), question.recompute, link, sum(sizes))
    times = sums.times(plan.partition, question.update, len(sizes))
    exchange = exchange_of(question, costs, bytes_per_s)
    return exchange_step_seconds(times, sizes, question.num_devices, exchange)


@dataclass(frozen=True)
class MachineRow:
    """The speed of one number of machines that share the configured batch.

    - `micro_batches`: micro-batches of a step on the machine with the largest share.
    - `problem`: the reason if the run does not fit; then there are no figures.
    - `host_bytes`: host memory of the fullest machine.
    - `step_s`: seconds per step for each of the report's rates, then without the exchange.
    """

    count: int
    micro_batches: int
    problem: str = ""
    host_bytes: int = 0
    step_s: tuple[float, ...] = ()


def rates_shown(machines: PlannedMachines) -> tuple[float, ...]:
    """Return the rates of a table in bytes per second: the known one, otherwise those of usual networks."""
    if machines.bytes_per_s is not None:
        return (machines.bytes_per_s,)
    return tuple(usable_bytes_per_s(gbit) for gbit in GBIT_PER_S)


def machine_rows(question: RunQuestion, plan: Plan | None) -> tuple[MachineRow, ...]:
    """Time 1 to 16 machines, and the question's number, each number with a plan for its share of the batch.

    `plan` is that of the question, None if it does not fit.
    """
    counts = sorted({*MACHINE_COUNTS, question.machines.count})
    return tuple(_row(question, plan, count) for count in counts)


def _row(question: RunQuestion, plan: Plan | None, count: int) -> MachineRow:
    asked = question.on_machines(count)
    if count > asked.step_micro_batches:
        return MachineRow(count, 0, "without work")
    if count != question.machines.count:
        plan = _plan_of_share(asked, plan)
    if plan is None:
        return MachineRow(count, asked.num_micro_batches, "does not fit")
    costs = asked.costs()
    rates = (*rates_shown(question.machines), math.inf)
    return MachineRow(
        count,
        asked.num_micro_batches,
        host_bytes=host_memory(asked, plan).total_bytes,
        step_s=tuple(machine_step_seconds(asked, plan, costs, rate) for rate in rates),
    )


def _plan_of_share(asked: RunQuestion, plan: Plan | None) -> Plan | None:
    """Return the faster of the stages of another number's plan and those of a search that keeps nothing, if one fits.

    A search that also chooses what to keep would take seconds for each number.
    """
    questions = [asked.without_choice()]
    if plan is not None and plan.kept:
        rounds = min(plan.rounds, asked.num_micro_batches)
        questions.append(replace(asked, given=(plan.partition, rounds), given_kept=plan.kept))
    plans = []
    for question in questions:
        try:
            plans.append(plan_for(question))
        except InfeasiblePlanError:
            continue
    return min(plans, key=lambda found: found.step_s, default=None)
