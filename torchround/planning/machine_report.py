"""Several machines before a run: what they exchange in a step, and what of it is exposed.

A plan takes the exchange as hidden. This module simulates it beside the plan's step.
"""

import math
from dataclasses import dataclass

from torchround.planning.exchange_time import Exchange, ExchangedBundle, exchange_step_seconds
from torchround.planning.machine_shares import step_share
from torchround.planning.partition import split_evenly
from torchround.planning.plan import Plan
from torchround.planning.run_question import RunQuestion
from torchround.planning.stage_times import LayerSums

# Share of a network's line rate that carries data.
USABLE_RATE = 0.9


def usable_bytes_per_s(gbit_per_s: float) -> float:
    """Return the bytes per second that a link of this line rate carries, each way."""
    return USABLE_RATE * gbit_per_s * 1e9 / 8


@dataclass(frozen=True)
class ExchangeReport:
    """The exchange of one step.

    - `gradient_bytes`, `weight_bytes`: what the busiest link carries in one direction.
    - `step_s`: seconds per step with the exchange; if the link's rate is not known, as if it took no time.
    - `exposed_s`: seconds of it that the exchange adds.
    """

    gradient_bytes: float
    weight_bytes: float
    step_s: float
    exposed_s: float


def report_exchange(question: RunQuestion, plan: Plan) -> ExchangeReport:
    """Simulate the exchange of the question's machines beside the steps of a plan."""
    rate = question.machines.bytes_per_s or math.inf
    moved = exchange_of(question, rate).wire_bytes(len(round_sizes(question, plan.rounds)))
    hidden_s, step_s = (machine_step_seconds(question, plan, each) for each in (math.inf, rate))
    # Both are means of the same steps, so equal times may differ by rounding.
    return ExchangeReport(*moved, step_s, step_s - hidden_s if step_s > hidden_s * (1 + 1e-9) else 0.0)


def exchange_of(question: RunQuestion, bytes_per_s: float) -> Exchange:
    counts = question.parameters
    # An owner takes its share of the seconds in which one host updates all.
    per_parameter_s = sum(question.costs().values("optimizer_s")) / max(1, counts.trained)
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


def machine_step_seconds(question: RunQuestion, plan: Plan, bytes_per_s: float) -> float:
    """Compute the seconds per step of the question's machines, each with this plan, over links of this rate."""
    sizes, link = round_sizes(question, plan.rounds), question.keep_rule().link
    sums = LayerSums(question.costs().keeping(plan.kept), question.recompute, link, sum(sizes))
    times = sums.times(plan.partition, question.update, len(sizes), plan.stale_layers)
    exchange = exchange_of(question, bytes_per_s)
    launches_s = sum(sizes) * question.costs().launch_s
    stepped_s = exchange_step_seconds(times, sizes, question.num_devices, exchange, plan.stale_layers)
    return max(stepped_s, launches_s)
