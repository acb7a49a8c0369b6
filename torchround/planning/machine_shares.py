"""Shares of several machines: the micro-batches that each computes, the bundles that each owns, and where gradients land.

The rounds of a step are dealt to the machines in turn. So N machines with R rounds cut a batch exactly as one machine
with N * R rounds does, and every part of a gradient is the same on both.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchround.planning.costs import ParameterCounts
from torchround.planning.host_buffers import whole_pages
from torchround.planning.partition import PlanError, split_evenly

# Share of a round's gradients that may have landed and not left yet: devices fill it while the network is busy.
LANDED_SHARE = 0.12


@dataclass(frozen=True)
class StepShare:
    """One machine's part of a step.

    `micro_batches` are the numbers, within the step, of the micro-batches that this machine computes, in order;
    `rounds` are the numbers of its rounds among the `total_rounds` of all machines. Both are empty on a machine that
    a short step leaves without work.
    """

    machine: int
    num_machines: int
    micro_batches: tuple[int, ...]
    rounds: tuple[int, ...]
    total_micro_batches: int
    total_rounds: int

    def after(self, rounds: int) -> "StepShare":
        """Return the share of a further call of the same step, whose rounds follow the `rounds` of the calls before."""
        numbers = tuple(rounds + number for number in self.rounds)
        return replace(self, rounds=numbers, total_rounds=rounds + self.total_rounds)


def step_share(num_micro_batches: int, rounds: int, machine: int, num_machines: int) -> StepShare:
    """Return what `machine` computes of a step of `num_micro_batches`, if each machine runs up to `rounds` rounds.

    Round `g` of all machines is round `g // num_machines` of machine `g % num_machines`. Cutting a machine's
    micro-batches evenly into its rounds gives these very rounds, because longer ones come first. Raises `PlanError`.
    """
    if num_micro_batches < 1 or rounds < 1 or not 0 <= machine < num_machines:
        raise PlanError(
            f"no share of {num_micro_batches} micro-batches in {rounds} rounds for machine {machine} of {num_machines}"
        )
    total_rounds = min(num_machines * rounds, num_micro_batches)
    ours = tuple(range(machine, total_rounds, num_machines))
    cuts = split_evenly(num_micro_batches, total_rounds)
    micro_batches = tuple(index for round_index in ours for index in cuts[round_index])
    return StepShare(machine, num_machines, micro_batches, ours, num_micro_batches, total_rounds)


def assign_owners(sizes: Sequence[int], num_machines: int) -> tuple[int, ...]:
    """Return the machine that owns each of these bundles, balanced by size.

    The largest comes first and goes to the machine with the fewest bytes so far. Ties go to the lower index and the
    lower rank, so every machine finds the same owners.
    """
    loads = [0] * num_machines
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = min(range(num_machines), key=lambda machine: (loads[machine], machine))
        loads[owners[index]] += sizes[index]
    return tuple(owners)


def ring_places(part_bytes: Sequence[int]) -> Counter[int]:
    """Count the places, by their bytes, in which the parts of a round's gradients land in turn on one of several machines.

    Parts of one size share places. Of four parts or more two can be on the host, so one lands while another is sent.
    """
    counts = Counter(part_bytes)
    return Counter({size: max(min(2, n // 2), math.ceil(LANDED_SHARE * n)) for size, n in counts.items()})


def landing_bytes(parameters: ParameterCounts, gradient_bytes: int, rounds: int, num_machines: int) -> int:
    """Count the buffers on one of the machines that parts of gradients land in before they are added up.

    Each use of parameters has one, if several parts come. On several machines those of a single use share `ring_places`.
    """
    pages = [
        (whole_pages(bundle.numel * gradient_bytes), len(bundle.layers)) for bundle in parameters.bundles
    ]
    if num_machines == 1:
        return sum(nbytes * uses for nbytes, uses in pages if rounds * uses > 1)
    places = ring_places([nbytes for nbytes, uses in pages if uses == 1])
    return sum(places.elements()) + sum(nbytes * uses for nbytes, uses in pages if uses > 1)
