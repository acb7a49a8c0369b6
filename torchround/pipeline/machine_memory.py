"""Host memory of one of several machines: what it owns, and what the exchange with the others takes.

A machine holds the 16-bit weights of the whole model. It holds fp32 weights, moments and gradient sums only of the bundles
that it owns. Gradients on their way to their owners land in a window of bounded size.
"""

from collections.abc import Sequence
from dataclasses import replace

from torchround.pipeline.costs import ParameterCounts
from torchround.pipeline.host_buffers import whole_pages
from torchround.pipeline.machine_shares import assign_owners
from torchround.pipeline.memory import MIB, OPTIMIZER_BYTES, HostMemory

# Share of all gradient bytes of a round that may have landed without having been sent or added up, unless two
# bundles are larger. All devices can fill it while the network is busy with what landed before.
WINDOW_SHARE = 0.12
# The owner adds parts of gradients up in float32.
SUM_BYTES = 4
# A part of another machine's gradient is read from staging memory of four chunks of 8 MiB, or of the whole part. Each
# of the others has its own.
STAGED_BYTES = 4 * 8 * MIB


def owned_parameters(parameters: ParameterCounts, num_machines: int) -> int:
    """Return the trained parameters of the machine that owns most, with owners balanced by size."""
    if num_machines == 1:
        return parameters.trained
    sizes = bundle_sizes(parameters)
    loads = [0] * num_machines
    for size, owner in zip(sizes, assign_owners(sizes, num_machines), strict=True):
        loads[owner] += size
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
    """Count the buffers that parts of gradients land in on one of several machines, in whole pages."""
    bundles = parameters.bundles or ((parameters.trained, 1),)
    parts = [whole_pages(numel * gradient_bytes) for numel, uses in bundles if uses == 1]
    # Parts of a shared bundle wait for each other at the owner, so they land outside the window.
    shared = [whole_pages(numel * gradient_bytes) for numel, uses in bundles for _ in range(uses) if uses > 1]
    return landing_window_bytes(parts) + sum(shared)


def state_of_machine(
    state: HostMemory, parameters: ParameterCounts, gradient_bytes: int, num_machines: int
) -> HostMemory:
    """Turn the state of a run on one machine into that of the fullest one of several.

    Each machine keeps all weights. It adds up gradients in fp32, whatever the number of rounds.
    """
    owned = owned_parameters(parameters, num_machines)
    largest_bytes = gradient_bytes * max(bundle_sizes(parameters))
    return replace(
        state,
        gradient_bytes=SUM_BYTES * owned + landing_bytes(parameters, gradient_bytes),
        optimizer_bytes=OPTIMIZER_BYTES * owned,
        exchange_bytes=min(STAGED_BYTES, largest_bytes) * (num_machines - 1),
    )
