"""Memory that a plan needs on each device and on the host, and the limits that it must keep.

The counts of a device follow what the engine allocates: space for the weights of any two stages that it runs
one after the other, and for their gradients, a buffer to round gradients in, fixed staging buffers of the
largest boundary, the round's integers, and the peak of one stage's compute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchround.pipeline.costs import Costs, ParameterCounts
from torchround.pipeline.host_buffers import whole_pages
from torchround.pipeline.partition import Partition, Stage, StageKind
from torchround.pipeline.pool_count import HostBatch
from torchround.pipeline.update_costs import UpdateCosts

GIB = 2**30
MIB = 2**20
# Staging buffers of a device: two for incoming activations, two for incoming gradients, two for outputs of
# either kind. With two of each, one is filled or emptied while the other is computed with.
STAGING_BUFFERS = 6
# For each layer inside a backward stage that starts anew: one micro-batch computes while the inputs of the next arrive.
RESTART_BUFFERS = 2
# The outputs of a plan of one stage are losses.
LOSS_BUFFERS = 2
# Kept activations go down through two buffers of the largest layer and come up through two of the largest stage.
KEPT_BUFFERS = 2
# A device rounds gradients to the dtype they travel in, if that is not the one they were accumulated in. It
# does so piece by piece, in one buffer of this many elements.
ROUNDING_ELEMENTS = 4 * 2**20
# Frozen weights that stay in files go up through a ring of page-locked buffers, one ring for each device.
READER_BUFFER_BYTES = 4 * MIB
READER_BUFFERS = 8
# Python, PyTorch for the CPU, and what PyTorch imports in a first step, whatever the model. Reports name it and no limit
# counts it: most of it is taken before free memory is read. Measured as `program_mb` of `python -m benchmarks training-memory`.
PROGRAM_BYTES = 450_000_000


@dataclass(frozen=True)
class MemoryLimits:
    """The memory that a plan may use, in bytes; None is no limit.

    - `device_bytes`: memory of each device.
    - `host_bytes`: host memory for what depends on the plan: the pool of buffers, the memory of virtual
      devices, and gradients that are added up over several rounds. Below 0 if the state alone does not fit.
    - `state_bytes`: host memory that every plan takes besides, for messages alone.
    - `batch`: what the pool holds; None counts boundaries of micro-batches that the costs are for.
    - `devices_on_host`: the number of devices whose memory is host memory.
    - `rounds_bytes`: host memory that several rounds take and one does not.
    - `integer_bytes`: tokens, labels, positions and document ids of one micro-batch.
    - `constant_bytes`: buffers of the layers, which stay on each device.
    - `recompute`: `"stage"` keeps the activations of a whole stage, `"layer"` those of one layer.
    - `rounding_share`, `rounding_bytes`: the buffer for rounding gradients has this share of the bytes that
      they are accumulated in, up to this size.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    integer_bytes: int = 0
    recompute: str = "stage"
    rounding_share: float = 0.0
    rounding_bytes: int = 0
    batch: HostBatch | None = None
    devices_on_host: int = 0
    rounds_bytes: int = 0
    constant_bytes: int = 0
    state_bytes: int = 0

    def micro_batches_at_once(self, num_micro_batches: int, rounds: int) -> int:
        """Return how many micro-batches a device holds the integers of: of a round, in a validation of all."""
        validates = self.batch is not None and self.batch.validates
        return num_micro_batches if validates else -(-num_micro_batches // rounds)

    def __post_init__(self) -> None:
        if self.recompute not in ("stage", "layer"):
            raise ValueError(f'recompute = {self.recompute!r} must be "stage" or "layer"')
        if self.device_bytes is not None and self.device_bytes < 0:
            raise ValueError(f"device_bytes = {self.device_bytes} must not be negative")


def rounding(accumulate_bytes: int, gradient_bytes: int) -> dict[str, Any]:
    """Return the fields of `MemoryLimits` for gradients that travel in another dtype; arguments are bytes per element."""
    return {
        "rounding_share": gradient_bytes / accumulate_bytes,
        "rounding_bytes": ROUNDING_ELEMENTS * gradient_bytes,
    }


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes of one device by kind. Each device runs every stage in turn, so all devices need the same."""

    weights_bytes: int
    gradients_bytes: int
    staging_bytes: int
    integers_bytes: int
    compute_bytes: int
    kept_bytes: int = 0
    job_bytes: int = 0
    constant_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the bytes of each kind by the name that reports give it."""
        return {
            "weights": self.weights_bytes,
            "gradients": self.gradients_bytes,
            "activations and workspace": self.compute_bytes,
            "staging": self.staging_bytes,
            "tokens": self.integers_bytes,
            "kept activations": self.kept_bytes,
            "matrices of the optimizer": self.job_bytes,
            "constant buffers": self.constant_bytes,
        }


def device_memory(
    partition: Partition,
    costs: Costs,
    num_devices: int,
    micro_batches_per_round: int,
    limits: MemoryLimits,
    stale_layers: int = 0,
) -> DeviceMemory:
    """Count what each of `num_devices` devices allocates to run `partition`; `stale_layers` is their number in `bounded`."""
    # A forward stage takes no more than the stages with gradients that hold its layers.
    stages = partition.stages()[len(partition.forward) :]
    gradients = max(stage_gradient_bytes(stage, costs) for stage in stages)
    rounded = min(int(limits.rounding_share * gradients), limits.rounding_bytes)
    weights_bytes = weight_space(partition, num_devices, lambda stage: stage_weight_bytes(stage, costs))
    in_slots = gradient_space(partition, num_devices, lambda stage: stage_gradient_bytes(stage, costs))
    return DeviceMemory(
        weights_bytes=weights_bytes,
        gradients_bytes=in_slots + rounded,
        staging_bytes=staging_space(partition, costs, stale_layers),
        integers_bytes=limits.integer_bytes * micro_batches_per_round,
        compute_bytes=max(
            *(stage_compute_bytes(stage, costs, limits.recompute) for stage in stages),
            max(costs.values("job_scratch_bytes")),
        ),
        job_bytes=max(costs.values("job_slot_bytes")),
        kept_bytes=kept_space(partition, costs),
        constant_bytes=limits.constant_bytes,
    )


def kept_space(partition: Partition, costs: Costs) -> int:
    """Compute the buffers of a device for kept activations on their way, of one micro-batch each."""
    kept, sums = costs.values("kept_bytes"), costs.running("kept_bytes")
    if not sums[-1]:
        return 0
    # A layer's go down as soon as it is done; a stage's come up together, before its recomputation.
    backward = [stage for stage in partition.stages() if stage.kind is StageKind.BACKWARD]
    largest_layer = max(kept[: partition.num_layers - partition.fused], default=0)
    largest_stage = max((sums[stage.stop] - sums[stage.start] for stage in backward), default=0)
    return KEPT_BUFFERS * (largest_layer + largest_stage)


def staging_space(partition: Partition, costs: Costs, stale_layers: int = 0) -> int:
    """Compute the staging buffers of a device: for the largest boundary between stages; for one stage, for losses.

    Layers inside a backward stage that start anew (`bounded`) have buffers for the inputs of two micro-batches.
    """
    stages, outputs = partition.stages(), costs.values("boundary_bytes")
    if len(stages) == 1:
        return int(LOSS_BUFFERS * outputs[-1])
    largest = max(outputs[stage.start - 1] for stage in stages if stage.start)
    if not stale_layers:
        return int(STAGING_BUFFERS * largest)
    restarts = [
        range(stage.start + 1, min(stage.stop, stale_layers + 1))
        for stage in stages
        if stage.kind is StageKind.BACKWARD
    ]
    largest = max(largest, *(outputs[cut - 1] for cuts in restarts for cut in cuts), 0)
    return int((STAGING_BUFFERS + RESTART_BUFFERS * max(map(len, restarts))) * largest)


def weight_space(partition: Partition, num_devices: int, bytes_of: Callable[[Stage], int]) -> int:
    """Compute the space in which the weights of any two consecutive stage jobs of a device fit side by side.

    One of them computes while the other one's weights arrive. A device takes every N-th slot of the dispatch
    sequence, so inside a round its next stage is N stages later. Otherwise it is one of the first N stages of
    a later round or pass, and this one is among the last N of its own. An evaluation has the forward stages and
    the fused one. It can come between any two steps, so that each of its last N stages can meet each first one.
    """
    sizes = [bytes_of(stage) for stage in partition.stages()]
    evaluation = sizes[: len(partition.forward) + 1]
    last = [*sizes[-num_devices:], *evaluation[-num_devices:]]
    return _most_of_two(sizes, last, num_devices)


def gradient_space(partition: Partition, num_devices: int, bytes_of: Callable[[Stage], int]) -> int:
    """Compute the space in which the gradients of any two consecutive stage jobs of a device fit that have gradients.

    One of them accumulates while the other one's gradients leave. As `weight_space`, but jobs without gradients
    between the two do not count.
    """
    sizes = [bytes_of(stage) for stage in partition.stages()[len(partition.forward) :]]
    return _most_of_two(sizes, sizes[-num_devices:], num_devices)


def _most_of_two(sizes: Sequence[int], last: Sequence[int], num_devices: int) -> int:
    """Return the largest sum of two sizes that can follow each other; `last` are those at the end of a pass."""
    inside = [one + other for one, other in zip(sizes, sizes[num_devices:], strict=False)]
    return max(max(last) + max(sizes[:num_devices]), *inside, 0)


def stage_weight_bytes(stage: Stage, costs: Costs) -> int:
    """Count the bytes of one upload of the stage's parameters."""
    sums: list[int] = costs.running("weight_bytes")
    return sums[stage.stop] - sums[stage.start]


def stage_gradient_bytes(stage: Stage, costs: Costs) -> int:
    """Count the stage's gradients as the device accumulates them; a forward stage has none."""
    if stage.kind is StageKind.FORWARD:
        return 0
    sums: list[int] = costs.running("gradient_bytes")
    return sums[stage.stop] - sums[stage.start]


def stage_compute_bytes(stage: Stage, costs: Costs, recompute: str) -> int:
    """Compute the peak of activations and workspace while one micro-batch of the stage runs."""
    start, stop = stage.start, stage.stop
    one_layer: int = max(costs.values("compute_bytes")[start:stop])
    if stage.kind is StageKind.FORWARD:
        return one_layer
    if recompute == "layer":
        # The layers' inputs stay; each layer's activations exist only during its own backward.
        sums: list[int] = costs.running("boundary_bytes")
        return one_layer + sums[stop] - sums[start]
    sums = costs.running("activation_bytes")
    largest: int = max(costs.values("workspace_bytes")[start:stop])
    return sums[stop] - sums[start] + largest


def size_text(num_bytes: int) -> str:
    """Format bytes in GiB, or in MiB below a tenth of a GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.2f} MiB"


def gib_text(num_bytes: int) -> str:
    """Format bytes in GiB, as the keys of the config and the options give limits."""
    gib = num_bytes / GIB
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib:.3g} GiB"


def parts_text(parts: Mapping[str, int], most: int | None = None) -> str:
    """List sizes by name, without those that are 0: all in their order, or the `most` largest."""
    names = [name for name, nbytes in parts.items() if nbytes]
    if most is not None:
        names = sorted(names, key=lambda name: -parts[name])[:most]
    return ", ".join(f"{name} {size_text(parts[name])}" for name in names)


@dataclass(frozen=True)
class HostMemory:
    """The host memory of a run in bytes, by kind.

    `reader_bytes` is for readers of weights in files, `loader_bytes` for batches of data that are being made,
    `device_bytes` the memory of virtual devices, `exchange_bytes` for messages from other machines. No sum includes
    `mapped_bytes`: the kernel keeps as much of those files in memory as is free.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int = 0
    integer_bytes: int = 0
    reader_bytes: int = 0
    loader_bytes: int = 0
    device_bytes: int = 0
    mapped_bytes: int = 0
    exchange_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Return the part that does not depend on the plan's stages."""
        return self.total_bytes - self.activation_bytes - self.integer_bytes - self.device_bytes

    @property
    def total_bytes(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the bytes of each kind by the name that reports give it."""
        return {
            "weights": self.weight_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.optimizer_bytes,
            "activations between stages": self.activation_bytes,
            "tokens": self.integer_bytes,
            "messages of other machines": self.exchange_bytes,
            "readers of files": self.reader_bytes,
            "batches of data": self.loader_bytes,
            "virtual devices": self.device_bytes,
        }


def host_state(
    parameters: ParameterCounts,
    update: str,
    rounds: int,
    element_bytes: int,
    gradient_bytes: int,
    updates: UpdateCosts,
) -> HostMemory:
    """Count weights, gradients and optimizer state, as `updates` says what the optimizer keeps.

    `async` keeps a second version of the weights. `gradient_bytes` is the size of an element as it leaves a
    device. Sums over rounds or over tied layers are kept in float32 beside a buffer for the next part; each
    use of a parameter needs such a buffer, and a tied parameter has two uses.
    """
    versions = 2 if update == "async" else 1
    added_up = [
        (bundle.numel, uses) for bundle in parameters.bundles if rounds * (uses := len(bundle.layers)) > 1
    ]
    summed = sum(numel for numel, _ in added_up)
    in_one_part = parameters.trained - summed
    # Parts of sums land in buffers of the pool, which are whole pages.
    landing_bytes = sum(uses * whole_pages(numel * gradient_bytes) for numel, uses in added_up)
    return HostMemory(
        weight_bytes=element_bytes * (versions * parameters.trained + parameters.frozen),
        gradient_bytes=max(4, gradient_bytes) * summed + gradient_bytes * in_one_part + landing_bytes,
        optimizer_bytes=updates.state_bytes(parameters.by_rule, update),
        mapped_bytes=element_bytes * parameters.mapped,
    )
