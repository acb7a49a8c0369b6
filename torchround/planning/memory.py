"""Memory that a plan needs on each device and on the host, and the limits that it must keep.

The counts of a device follow what the engine allocates: space for the weights of any two stages that it runs
one after the other, and for their gradients, a buffer to round gradients in, fixed staging buffers of the
largest boundary, the round's integers, and the peak of one stage's compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchround.planning.costs import Costs, ParameterCounts
from torchround.planning.host_buffers import HostBatch, restarted_layers
from torchround.planning.machine_shares import assign_owners, landing_bytes
from torchround.planning.partition import Partition, Stage, StageKind, evaluation_stages
from torchround.planning.update_costs import UpdateCosts
from torchround.planning.update_modes import mode_of

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
# Gradients are added up on the host in float32.
SUM_BYTES = 4
# A part of another machine's gradient is read from staging memory of four chunks of 8 MiB, or of the whole part. Each
# of the others has its own.
STAGED_BYTES = 4 * 8 * MIB
# Python, PyTorch for the CPU, and what PyTorch imports in a first step, whatever the model. Reports name it and no limit
# counts it: most of it is taken before free memory is read. docs/planning.md has the measurement.
PROGRAM_BYTES = 450_000_000


@dataclass(frozen=True)
class MemoryLimits:
    """The memory that a plan may use, in bytes; None is no limit.

    - `device_bytes`: memory of each device.
    - `host_bytes`: host memory for what depends on the plan: the pool of buffers, the memory of virtual
      devices, and gradients that are added up over several rounds. Below 0 if the state alone does not fit.
    - `integer_bytes`: tokens, labels, positions and document ids of one micro-batch.
    - `recompute`: `"stage"` keeps the activations of a whole stage, `"layer"` those of one layer.
    - `accumulate_bytes`, `rounded_bytes`: an element of a gradient as a device adds it up, and as it is rounded to for its
      way down; 0 if it travels as it is.
    - `batch`: what the pool holds; None counts boundaries of micro-batches that the costs are for.
    - `devices_on_host`: the number of devices whose memory is host memory.
    - `rounds_bytes`: host memory that several rounds take and one does not.
    - `constant_bytes`: buffers of the layers, which stay on each device.
    - `state_bytes`: host memory that every plan takes besides, for messages alone.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    integer_bytes: int = 0
    recompute: str = "stage"
    accumulate_bytes: int = 4
    rounded_bytes: int = 0
    batch: HostBatch | None = None
    devices_on_host: int = 0
    rounds_bytes: int = 0
    constant_bytes: int = 0
    state_bytes: int = 0


def _part(name: str) -> Any:
    """Declare a field of `MemoryParts`; reports give it this name."""
    return field(default=0, metadata={"name": name})


@dataclass(frozen=True)
class MemoryParts:
    """Bytes by kind, and their sum."""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        return {each.metadata["name"]: getattr(self, each.name) for each in fields(self) if each.metadata}

    def text(self, most: int | None = None) -> str:
        """List the kinds that take anything: all in their order, or the `most` largest."""
        sizes = [(name, nbytes) for name, nbytes in self.parts().items() if nbytes]
        if most is not None:
            sizes = sorted(sizes, key=lambda size: -size[1])[:most]
        return ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in sizes)


@dataclass(frozen=True)
class DeviceMemory(MemoryParts):
    """The bytes of one device by kind. Each device runs every stage in turn, so all devices need the same."""

    weights_bytes: int = _part("weights")
    unpacked_bytes: int = _part("unpacked weights of a layer")
    gradients_bytes: int = _part("gradients")
    compute_bytes: int = _part("activations and workspace")
    staging_bytes: int = _part("staging")
    integers_bytes: int = _part("tokens")
    kept_bytes: int = _part("kept activations")
    job_bytes: int = _part("matrices of the optimizer")
    constant_bytes: int = _part("constant buffers")


def device_memory(
    partition: Partition,
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    rounds: int,
    limits: MemoryLimits,
    stale_layers: int = 0,
) -> DeviceMemory:
    """Count what each of `num_devices` devices allocates to run `partition`; `stale_layers` is their number in `bounded`."""
    # A forward stage takes no more than the stages with gradients that hold its layers.
    stages = partition.stages()[len(partition.forward) :]
    largest = max(stage_bytes(stage, costs, "gradient_bytes") for stage in stages)
    # Gradients are rounded piece by piece.
    rounded = min(
        largest * limits.rounded_bytes // limits.accumulate_bytes, ROUNDING_ELEMENTS * limits.rounded_bytes
    )
    # A device holds the integers of a round, and in a validation of all micro-batches.
    validates = limits.batch is not None and limits.batch.validates
    at_once = num_micro_batches if validates else -(-num_micro_batches // rounds)
    return DeviceMemory(
        weights_bytes=slot_space(
            partition, num_devices, lambda stage: stage_bytes(stage, costs, "weight_bytes")
        ),
        unpacked_bytes=max(costs.values("unpacked_bytes")),
        gradients_bytes=rounded
        + slot_space(partition, num_devices, lambda stage: stage_bytes(stage, costs, "gradient_bytes"), True),
        compute_bytes=max(
            *(stage_compute_bytes(stage, costs, limits.recompute) for stage in stages),
            max(costs.values("job_scratch_bytes")),
        ),
        staging_bytes=_staging_space(partition, costs, stale_layers),
        integers_bytes=limits.integer_bytes * at_once,
        kept_bytes=_kept_space(partition, costs),
        job_bytes=max(costs.values("job_slot_bytes")),
        constant_bytes=limits.constant_bytes,
    )


def _kept_space(partition: Partition, costs: Costs) -> int:
    """Compute the buffers of a device for kept activations on their way, of one micro-batch each."""
    kept, sums = costs.values("kept_bytes"), costs.running("kept_bytes")
    # A layer's go down as soon as it is done; a stage's come up together, before its recomputation.
    largest_layer = max(kept[: partition.num_layers - partition.fused], default=0)
    backward = partition.stages()[len(partition.forward) + 1 :]
    largest_stage = max((sums[stage.stop] - sums[stage.start] for stage in backward), default=0)
    return int(KEPT_BUFFERS * (largest_layer + largest_stage))


def _staging_space(partition: Partition, costs: Costs, stale_layers: int) -> int:
    """Compute the staging buffers of a device: for the largest boundary between stages; for one stage, for losses.

    Layers inside a backward stage that start anew (`bounded`) have buffers for the inputs of two micro-batches.
    """
    stages, outputs = partition.stages(), costs.values("boundary_bytes")
    if len(stages) == 1:
        return int(LOSS_BUFFERS * outputs[-1])
    restarts = [restarted_layers(stage, stale_layers) for stage in stages if stale_layers]
    cuts = {stage.start for stage in stages}.union(*restarts) - {0}
    buffers = STAGING_BUFFERS + RESTART_BUFFERS * max(map(len, restarts), default=0)
    return int(buffers * max(outputs[cut - 1] for cut in cuts))


def slot_space(
    partition: Partition, num_devices: int, bytes_of: Callable[[Stage], int], of_gradients: bool = False
) -> int:
    """Compute the space in which the weights, or gradients, of any two consecutive stage jobs of a device fit side by side.

    One of them computes while the other one's weights arrive, or its gradients leave. A device takes every N-th slot of the
    dispatch sequence, so inside a round its next stage is N stages later. Otherwise it is one of the first N stages of
    a later round or pass, and this one is among the last N of its own. An evaluation has the forward stages and
    the fused one. It can come between any two steps, so that each of its last N stages can meet each first one.
    Jobs without gradients do not count between two that have some.
    """
    forward = len(partition.forward)
    sizes = [bytes_of(stage) for stage in partition.stages()[forward if of_gradients else 0 :]]
    last = sizes[-num_devices:]
    if not of_gradients:
        last += sizes[: forward + 1][-num_devices:]
    inside = [one + other for one, other in zip(sizes, sizes[num_devices:], strict=False)]
    return max(max(last) + max(sizes[:num_devices]), *inside, 0)


def forward_stages(
    partition: Partition, num_devices: int, bytes_of: Callable[[Stage], int]
) -> tuple[Stage, ...]:
    """Cut the stages of an evaluation further, until their number is a multiple of `num_devices`.

    Stage slots are dealt to devices in turn, over the passes too. So each layer then meets the same device in every pass,
    which can keep something for it from one pass to the next. `bytes_of` counts the weights of a stage. The stages need no
    more space for weights than `partition` itself. If there are too few layers, the stages stay as they are.
    """
    uncut = stages = evaluation_stages(partition)
    space = slot_space(partition, num_devices, bytes_of)

    def fit() -> bool:
        """Tell whether any two stages that follow each other on a device fit side by side, over passes too."""
        following = [*stages, *stages][num_devices:]
        return all(
            bytes_of(one) + bytes_of(other) <= space for one, other in zip(stages, following, strict=False)
        )

    while len(stages) % num_devices or not fit():
        longer = [stage for stage in stages if stage.stop - stage.start > 1]
        if not longer:
            return uncut
        largest = max(longer, key=bytes_of)
        cuts = range(largest.start + 1, largest.stop)
        halves = [(replace(largest, stop=cut), replace(largest, start=cut)) for cut in cuts]
        index = stages.index(largest)
        # The two parts that are the most alike in bytes.
        most_alike = min(halves, key=lambda parts: max(map(bytes_of, parts)))
        stages = (*stages[:index], *most_alike, *stages[index + 1 :])
    return stages


def stage_bytes(stage: Stage, costs: Costs, name: str) -> int:
    """Add up an amount of the stage's layers: a field or property of `LayerCost` in bytes."""
    sums: list[int] = costs.running(name)
    return sums[stage.stop] - sums[stage.start]


def stage_compute_bytes(stage: Stage, costs: Costs, recompute: str) -> int:
    """Compute the peak of activations and workspace while one micro-batch of the stage runs."""
    layers = slice(stage.start, stage.stop)
    if stage.kind is not StageKind.FORWARD and recompute == "stage":
        workspace: int = max(costs.values("workspace_bytes")[layers])
        return stage_bytes(stage, costs, "activation_bytes") + workspace
    one_layer: int = max(costs.values("compute_bytes")[layers])
    if stage.kind is StageKind.FORWARD:
        return one_layer
    # The layers' inputs stay; each layer's activations exist only during its own backward.
    return one_layer + stage_bytes(stage, costs, "boundary_bytes")


@dataclass(frozen=True)
class HostMemory(MemoryParts):
    """The host memory of a run in bytes, by kind.

    `reader_bytes` is for readers of weights in files, `loader_bytes` for batches of data that are being made,
    `device_bytes` the memory of virtual devices, `exchange_bytes` for messages from other machines. No sum includes
    `mapped_bytes`: the kernel keeps as much of those files in memory as is free.
    """

    weight_bytes: int = _part("weights")
    gradient_bytes: int = _part("gradients")
    optimizer_bytes: int = _part("optimizer state")
    activation_bytes: int = _part("activations between stages")
    integer_bytes: int = _part("tokens")
    exchange_bytes: int = _part("messages of other machines")
    reader_bytes: int = _part("readers of files")
    loader_bytes: int = _part("batches of data")
    device_bytes: int = _part("virtual devices")
    mapped_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Return the part that does not depend on the plan's stages."""
        return self.total_bytes - self.activation_bytes - self.integer_bytes - self.device_bytes


def host_state(
    parameters: ParameterCounts,
    update: str,
    rounds: int,
    element_bytes: int,
    gradient_bytes: int,
    updates: UpdateCosts,
    num_machines: int = 1,
) -> HostMemory:
    """Count weights, gradients and optimizer state of the machine that owns most.

    Each machine holds all versions of the device weights, and `updates` says what the optimizer keeps of
    the bundles that it owns. `gradient_bytes` is the size of an element as it leaves a device. Sums over rounds, tied
    layers or machines are kept in float32.
    """
    bundles, versions = parameters.bundles, mode_of(update).versions
    sizes = [bundle.numel for bundle in bundles]
    largest, owners = max(sizes, default=0), assign_owners(sizes, num_machines)

    def owned(amounts: Sequence[int]) -> int:
        """Return the most that a machine owns of `amounts`, one for each bundle."""
        pairs = list(zip(amounts, owners, strict=True))
        return max(sum(amount for amount, owner in pairs if owner == rank) for rank in range(num_machines))

    sum_bytes = [gradient_bytes, max(SUM_BYTES, gradient_bytes)]
    sums = [bundle.numel * sum_bytes[rounds * len(bundle.layers) * num_machines > 1] for bundle in bundles]
    exchange_bytes = min(STAGED_BYTES, gradient_bytes * largest) * (num_machines - 1)
    return HostMemory(
        weight_bytes=element_bytes * (versions * parameters.trained + parameters.frozen + parameters.packed),
        gradient_bytes=owned(sums) + landing_bytes(parameters, gradient_bytes, rounds, num_machines),
        optimizer_bytes=owned([updates.state_bytes(bundle.by_rule, update) for bundle in bundles]),
        exchange_bytes=exchange_bytes,
        mapped_bytes=element_bytes * parameters.mapped,
    )


def size_text(num_bytes: int) -> str:
    """Format bytes in GiB, or in MiB below a tenth of a GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.2f} MiB"


def gib_text(num_bytes: int) -> str:
    """Format bytes in GiB, as the keys of the config and the options give limits."""
    gib = num_bytes / GIB
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib:.3g} GiB"
