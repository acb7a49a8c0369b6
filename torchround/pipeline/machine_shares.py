"""Shares of several machines: the micro-batches of a step, the bundles of weights, and the host memory that each takes.

The rounds of a step are dealt to the machines in turn. So N machines with R rounds cut a batch exactly as one machine
with N * R rounds does, and every part of a gradient is the same on both.

A machine holds the device weights of the whole model. It holds optimizer state, what device weights lack of the weights, and
gradient sums only of the bundles that it owns. Gradients on their way to their owners land in a window of bounded size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchround.pipeline.costs import ParameterCounts
from torchround.pipeline.host_buffers import PAGE_BYTES, whole_pages
from torchround.pipeline.memory import MIB, HostMemory
from torchround.pipeline.partition import PlanError, split_evenly

# Share of all gradient bytes of a round that may have landed without having been sent or added up, unless two
# bundles are larger. All devices can fill it while the network is busy with what landed before.
WINDOW_SHARE = 0.12
# The owner adds parts of gradients up in float32.
SUM_BYTES = 4
# A part of another machine's gradient is read from staging memory of four chunks of 8 MiB, or of the whole part. Each
# of the others has its own.
STAGED_BYTES = 4 * 8 * MIB
# The changes of weights are found by at most so many threads, each with a copy of one bundle's former weights. They wait
# to be sent in at most this share of the bytes of the weights.
MOST_ENCODERS, WORTH_SENDING = 4, 0.5


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


def fullest_owner(parameters: ParameterCounts, num_machines: int, amounts: Sequence[int]) -> int:
    """Return the most that a machine owns of `amounts`, one for each bundle, with owners balanced by size."""
    loads = [0] * num_machines
    owners = assign_owners(bundle_sizes(parameters), num_machines)
    for amount, owner in zip(amounts, owners, strict=True):
        loads[owner] += amount
    return max(loads)


def bundle_sizes(parameters: ParameterCounts) -> list[int]:
    """List the trained parameters of each bundle; all of them as one bundle if the counts do not name any."""
    return [numel for numel, _ in parameters.bundles] or [parameters.trained]


def landing_window_bytes(part_bytes: Sequence[int]) -> int:
    """Compute the landing window: two of the largest parts of a gradient, or a share of all of them if that is more.

    `part_bytes` are the parts of one round in the dtype that they travel in. Two of the largest always fit, so one can
    land while the one before it is still being sent.
    """
    two_largest = sum(sorted(part_bytes)[-2:])
    return max(two_largest, int(WINDOW_SHARE * sum(part_bytes)))


def landing_bytes(parameters: ParameterCounts, gradient_bytes: int) -> int:
    """Count the buffers that parts of gradients land in on one of several machines, in whole pages.

    Each use of parameters that several layers share has a buffer of its own beside the window.
    """
    bundles = parameters.bundles or ((parameters.trained, 1),)
    pages = [(whole_pages(numel * gradient_bytes), uses) for numel, uses in bundles]
    window = landing_window_bytes([nbytes for nbytes, uses in pages if uses == 1])
    in_pool = sum(nbytes * uses for nbytes, uses in pages if uses > 1)
    return window // PAGE_BYTES * PAGE_BYTES + in_pool


def state_of_machine(
    state: HostMemory,
    parameters: ParameterCounts,
    num_machines: int,
    element_bytes: int,
    gradient_bytes: int,
    optimizer_bytes: Sequence[int],
    sends_changed: bool = False,
) -> HostMemory:
    """Turn the state of a run on one machine into that of the fullest one of several.

    Each machine keeps all weights. It adds up gradients in fp32, whatever the number of rounds. `optimizer_bytes`
    is what the optimizer keeps of each bundle; `sends_changed` as in `PlannedMachines`.
    """
    sizes = bundle_sizes(parameters)
    owned, largest = fullest_owner(parameters, num_machines, sizes), max(sizes)
    encoding_bytes = element_bytes * (MOST_ENCODERS * largest + WORTH_SENDING * owned) if sends_changed else 0
    return replace(
        state,
        gradient_bytes=SUM_BYTES * owned + landing_bytes(parameters, gradient_bytes),
        optimizer_bytes=fullest_owner(parameters, num_machines, optimizer_bytes),
        exchange_bytes=min(STAGED_BYTES, gradient_bytes * largest) * (num_machines - 1) + int(encoding_bytes),
    )
