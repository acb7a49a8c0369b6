"""A step time that no plan within the limits can beat, to judge the plan that the search found.

For each number of rounds, fused size and number of stages, a step takes at least the larger of two times: the
devices' work plus the idle time that filling and draining cannot avoid, and the time of one round's
micro-batches on their way through all stages. The bound is the least of these over all of them.

N devices, M micro-batches, S stages.
"""

from collections.abc import Sequence

import numpy as np

from torchround.pipeline.partition import Partition
from torchround.pipeline.search.partition_batch import Candidate, Floats
from torchround.pipeline.search.planning_problem import SAME_STEP, PlanningProblem


def lower_bound_s(problem: PlanningProblem, rounds_choices: Sequence[int], found_s: float) -> float:
    """Compute the bound in seconds; at most `found_s`, the step time of a known plan within the limits."""
    largest = largest_fused(problem)
    least_s = least_work_s(problem, largest) / problem.num_devices
    if found_s <= least_s * (1 + SAME_STEP):
        return found_s
    bound_s = found_s
    # Every plan has some number of rounds and some fused stage,
    # so the least bound over all of them holds for all plans.
    for rounds in rounds_choices:
        for fused in range(1, largest + 1):
            bound_s = min(bound_s, max(_bound_s(problem, rounds, fused), problem.sums.updated_s[-1]))
    return max(bound_s, least_s)


def largest_fused(problem: PlanningProblem) -> int:
    """Return the most layers that memory allows in the fused stage."""
    return problem.num_layers - problem.widest.first_layers[problem.num_layers]


def least_work_s(problem: PlanningProblem, largest: int) -> float:
    """Compute the least device seconds of a step in plans whose fused stage holds up to `largest` layers."""
    return problem.num_micro_batches * min(problem.sums.work_s(fused) for fused in range(1, largest + 1))


def _bound_s(problem: PlanningProblem, rounds: int, fused: int) -> float:
    """Compute the bound for one number of rounds and one size of the fused stage."""
    if fused == problem.num_layers:
        return problem.exact_s(Candidate(Partition((), fused, ()), rounds))
    # Numbers of stages that memory rules out are cut off the tables before the minimum is taken.
    fewest_forward, fewest_backward = _fewest_stages(problem, problem.num_layers - fused)
    limit = _stage_limit(problem, fused)
    allowed = np.s_[min(fewest_forward, limit) - 1 :, min(fewest_backward, limit) - 1 :]
    alone_s = _alone_s(problem, rounds, fused)[allowed]
    work_s = problem.num_micro_batches * problem.sums.work_s(fused)
    devices = problem.num_devices
    if problem.overlap == "async":
        # Steps overlap: one may last two step times from its first stage to its last gradient.
        return max(work_s / devices, float(alone_s.min()) / 2)
    stages = np.arange(1, limit + 1)
    used = np.minimum(devices, rounds * (stages[:, None] + 1 + stages))[allowed]
    return float(np.maximum(alone_s, (work_s + _idle_s(problem, limit)[allowed]) / used).min())


def _fewest_stages(problem: PlanningProblem, split: int) -> tuple[int, int]:
    """Count the forward and backward stages over layers `0 .. split` that memory asks for at least."""
    forward, start = 0, 0
    while start < split:
        start = problem.widest.last_ends[start]
        forward += 1
    backward, stop = 0, split
    while stop > 0:
        stop = problem.widest.first_layers[stop]
        backward += 1
    return forward, backward


def _stage_limit(problem: PlanningProblem, fused: int) -> int:
    """Return how many numbers of forward or backward stages to tell apart: beyond N the idle time stays the same."""
    return min(problem.num_devices, problem.num_layers - fused)


def _alone_s(problem: PlanningProblem, rounds: int, fused: int) -> Floats:
    """Compute the seconds of a round on its own by the numbers of forward and of backward stages.

    The first micro-batch passes every stage; each further one leaves at least the slowest stage's time later.
    The last row and column stand for that many stages or more.
    """
    split, limit = problem.num_layers - fused, _stage_limit(problem, fused)
    stages = np.arange(1, limit + 1)
    parts = np.where(stages < limit, stages, split)
    forward_s, backward_s, both_s = problem.forward_s, problem.backward_s, np.array(problem.both_s)
    fused_s = forward_s[-1] - forward_s[split] + backward_s[-1] - backward_s[split]
    longest_layer_s = float(np.diff(both_s).max())
    slowest_s = np.maximum(
        np.maximum(forward_s[split] / parts[:, None], both_s[split] / parts),
        max(fused_s, longest_layer_s),
    )
    first_s = forward_s[split] + fused_s + backward_s[split]
    hops_s = (stages[:, None] + stages) * problem.sums.hop_s
    size = -(-problem.num_micro_batches // rounds)
    return np.asarray(first_s + hops_s + (size - 1) * slowest_s)


def _idle_s(problem: PlanningProblem, limit: int) -> Floats:
    """Compute the idle device seconds of filling and draining by the numbers of forward and of backward stages.

    The device of slot k waits for k forward stages of at least a layer each. The device of the k-th last slot
    is done before k backward stages, whose recomputation may be over by then.
    """
    waiting = np.arange(1, limit + 1)
    waiting = waiting[waiting < problem.num_devices]
    fill_s = np.cumsum(problem.forward_s[waiting] + waiting * problem.sums.hop_s)
    drain_s = np.cumsum(problem.backward_s[waiting] + waiting * problem.sums.hop_s)
    last = np.minimum(np.arange(limit), len(waiting) - 1)
    if not len(waiting):
        return np.zeros((limit, limit))
    return np.asarray(fill_s[last][:, None] + drain_s[last])
