"""Host memory of one of several machines: what it owns, and what the exchange with the others takes.

A machine holds the device weights of the whole model. It holds optimizer state, what device weights lack of the weights, and
gradient sums only of the bundles that it owns. Gradients on their way to their owners land in a window of bounded size.
"""

from collections.abc import Sequence
from dataclasses import replace

from torchround.pipeline.costs import ParameterCounts
from torchround.pipeline.host_buffers import PAGE_BYTES, whole_pages
from torchround.pipeline.machine_shares import assign_owners
from torchround.pipeline.memory import MIB, HostMemory

# Share of all gradient bytes of a round that may have landed without having been sent or added up, unless two
# bundles are larger. All devices can fill it while the network is busy with what landed before.
WINDOW_SHARE = 0.12
# The owner adds parts of gradients up in float32.
SUM_BYTES = 4
# A part of another machine's gradient is read from staging memory of four chunks of 8 MiB, or of the whole part. Each
# of the others has its own.
STAGED_BYTES = 4 * 8 * MIB


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
    gradient_bytes: int,
    optimizer_bytes: Sequence[int],
) -> HostMemory:
    """Turn the state of a run on one machine into that of the fullest one of several.

    Each machine keeps all weights. It adds up gradients in fp32, whatever the number of rounds. `optimizer_bytes`
    is what the optimizer keeps of each bundle.
    """
    sizes = bundle_sizes(parameters)
    owned, largest = fullest_owner(parameters, num_machines, sizes), max(sizes)
    return replace(
        state,
        gradient_bytes=SUM_BYTES * owned + landing_bytes(parameters, gradient_bytes),
        optimizer_bytes=fullest_owner(parameters, num_machines, optimizer_bytes),
        exchange_bytes=min(STAGED_BYTES, gradient_bytes * largest) * (num_machines - 1),
    )
