"""The memory that would do for a run that does not fit: of each device, and of the host."""

import math
from dataclasses import dataclass, replace

from torchround.pipeline.memory import GIB
from torchround.pipeline.plan_report import plan_for
from torchround.pipeline.run_question import RunQuestion
from torchround.pipeline.search.annealing import coarse_partitions
from torchround.pipeline.search.planning_problem import Candidate, PlanningProblem


@dataclass(frozen=True)
class EnoughMemory:
    """Bytes of each device and of the host with which a run fits; None if the run has as much already."""

    device_bytes: int | None
    host_bytes: int | None

    def __str__(self) -> str:
        parts = []
        if self.device_bytes is not None:
            parts.append(f"{_rounded_up(self.device_bytes)} per device")
        if self.host_bytes is not None:
            parts.append(f"{_rounded_up(self.host_bytes)} of host memory in all")
        return " and ".join(parts)


def _rounded_up(num_bytes: int) -> str:
    """Format bytes so that the printed figure is enough, too."""
    return f"{math.ceil(100 * num_bytes / GIB) / 100:.2f} GiB"


def enough_memory(question: RunQuestion) -> EnoughMemory:
    """Return the memory that would do for the run as it is; more than the least if the model is large."""
    rounds = question.rounds if isinstance(question.rounds, int) else question.num_micro_batches
    rounds = question.given[1] if question.given is not None else rounds
    problem = _problem(question)
    # The finest partition comes last. It needs least of a device.
    finest = coarse_partitions(problem, rounds)[-1] if question.given is None else question.given[0]
    device_bytes = problem.device_bytes(finest, rounds)
    is_short = question.device_bytes is not None and device_bytes > question.device_bytes
    if is_short:
        question = replace(question, device_bytes=device_bytes)
        problem = _problem(question)
    candidates = [finest]
    if question.given is None:
        unlimited = replace(question, host_bytes=None, rounds=rounds).without_choice()
        candidates = [*coarse_partitions(problem, rounds), plan_for(unlimited).partition]
    plan_bytes = min(problem.host_bytes(Candidate(partition, rounds)) for partition in candidates)
    host_bytes = question.state_of(rounds).state_bytes + plan_bytes
    has_room = question.host_bytes is None or host_bytes <= question.host_bytes
    return EnoughMemory(device_bytes if is_short else None, None if has_room else host_bytes)


def _problem(question: RunQuestion) -> PlanningProblem:
    # The state counts with the rounds above, so they are not to count once more.
    limits = replace(question.limits(), rounds_bytes=0, host_bytes=None)
    costs = question.costs()
    costs = costs.keeping(question.keep_rule().fixed(costs))
    return PlanningProblem(costs, question.num_devices, question.num_micro_batches, question.update, limits)
