"""What a partition needs in a device's memory, and what is allowed.

The counts follow what the engine allocates: two weight slots and two gradient slots of the largest stage, a buffer
to round gradients in, fixed staging buffers of the largest boundary, the round's integers, and the peak of one stage's compute.
"""

from dataclasses import dataclass
from typing import Any

from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import Partition, Stage, StageKind

GIB = 2**30
MIB = 2**20
# Two activations in, two gradients in, two outputs of either kind.
STAGING_BUFFERS = 6
# Gradients whose dtype differs from the one they were accumulated in are rounded piece by piece on their way
# down, through one buffer of this many elements.
ROUNDING_ELEMENTS = 4 * 2**20


@dataclass(frozen=True)
class MemoryLimits:
    """What a plan may use. `None` is no limit. All in bytes.

    `device_bytes`: per device. `host_bytes`: what is left of host memory for activations between stages,
    after weights, gradients and optimizer state. `integer_bytes`: tokens, labels, positions and document ids
    of one micro-batch. `recompute`: `"stage"` keeps a stage's activations, `"layer"` one layer's. Gradients that are
    rounded on their way down need `rounding_share` times the bytes they are accumulated in, `rounding_bytes` at most.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    integer_bytes: int = 0
    recompute: str = "stage"
    rounding_share: float = 0.0
    rounding_bytes: int = 0

    def __post_init__(self) -> None:
        if self.recompute not in ("stage", "layer"):
            raise ValueError(f'recompute = {self.recompute!r} must be "stage" or "layer"')
        for name in ("device_bytes", "host_bytes"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} = {value} must not be negative")


def rounding(accumulate_bytes: int, gradient_bytes: int) -> dict[str, Any]:
    """What `MemoryLimits` says of gradients that travel in another number format; bytes of one element."""
    return {
        "rounding_share": gradient_bytes / accumulate_bytes,
        "rounding_bytes": ROUNDING_ELEMENTS * gradient_bytes,
    }


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device by kind; every device runs every stage in turn, so all need the same."""

    weights_bytes: int
    gradients_bytes: int
    staging_bytes: int
    integers_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.staging_bytes
            + self.integers_bytes
            + self.compute_bytes
        )


def device_memory(
    partition: Partition, costs: Costs, micro_batches_per_round: int, limits: MemoryLimits
) -> DeviceMemory:
    """What each device allocates to run `partition`."""
    stages = partition.stages()
    gradients = max(stage_gradient_bytes(stage, costs) for stage in stages)
    rounded = min(int(limits.rounding_share * gradients), limits.rounding_bytes)
    return DeviceMemory(
        weights_bytes=2 * max(stage_weight_bytes(stage, costs) for stage in stages),
        gradients_bytes=2 * gradients + rounded,
        staging_bytes=STAGING_BUFFERS * max(layer.boundary_bytes for layer in costs.layers),
        integers_bytes=limits.integer_bytes * micro_batches_per_round,
        compute_bytes=max(stage_compute_bytes(stage, costs, limits.recompute) for stage in stages),
    )


def stage_weight_bytes(stage: Stage, costs: Costs) -> int:
    """One upload of the stage's parameters."""
    return sum(layer.weight_bytes for layer in costs.layers[stage.start : stage.stop])


def stage_gradient_bytes(stage: Stage, costs: Costs) -> int:
    """The stage's gradients as accumulated on the device; a forward stage has none."""
    if stage.kind is StageKind.FORWARD:
        return 0
    return sum(layer.gradient_bytes for layer in costs.layers[stage.start : stage.stop])


def stage_compute_bytes(stage: Stage, costs: Costs, recompute: str) -> int:
    """Peak of activations and workspace while one micro-batch of the stage runs."""
    layers = costs.layers[stage.start : stage.stop]
    one_layer = max(layer.activation_bytes + layer.workspace_bytes for layer in layers)
    if stage.kind is StageKind.FORWARD:
        return one_layer
    if recompute == "layer":
        return one_layer + sum(layer.boundary_bytes for layer in layers)
    return sum(layer.activation_bytes for layer in layers) + max(layer.workspace_bytes for layer in layers)


def rounds_in_flight(num_devices: int, num_stages: int, rounds: int, update: str) -> int:
    """Most rounds whose activations are on the host at once, however fast each device is; N devices, S stages.

    While a round's last stage is unfinished, the others can be N - 1 stages into the next round, S - N fewer into the
    one after that, and so on; with S <= N a device may run ahead with the first stages of all. `async` steps
    follow each other without a flush, so the next step's rounds count too.
    """
    rounds_under_way = rounds if update == "sync" else 2 * rounds
    if num_devices == 1:
        return 1
    if num_stages <= num_devices:
        return rounds_under_way
    return min(1 + -(-(num_devices - 1) // (num_stages - num_devices)), rounds_under_way)


def host_activation_bytes(
    partition: Partition, costs: Costs, num_devices: int, num_micro_batches: int, rounds: int, update: str
) -> int:
    """Host memory for what passes between stages.

    Per micro-batch alive: the input of every stage but the first layer's (kept from forward to backward
    where a backward stage starts, else from one stage to the next) and one gradient on its way.
    """
    stages = partition.stages()
    cuts = {stage.start for stage in stages} - {0}
    per_micro_batch = sum(costs.layers[cut - 1].boundary_bytes for cut in cuts)
    per_micro_batch += max(layer.boundary_bytes for layer in costs.layers)
    alive = rounds_in_flight(num_devices, len(stages), rounds, update) * -(-num_micro_batches // rounds)
    return per_micro_batch * alive


def size_text(num_bytes: int) -> str:
    """In GiB, or in MiB where that is little."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.2f} MiB"


# Host memory of a run by kind: weights, gradients, optimizer state, activations between stages, tokens.


# An fp32 weight and two fp32 moments.
OPTIMIZER_BYTES = 12


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters, tied ones once. `tied`: those of `trained` that several layers use. `mapped`: frozen ones that stay in
    files and are no part of `frozen`."""

    trained: int
    frozen: int = 0
    tied: int = 0
    mapped: int = 0


@dataclass(frozen=True)
class HostMemory:
    """Bytes by kind. `mapped_bytes` are part of no sum: the kernel keeps as much of those files as memory is free."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int = 0
    integer_bytes: int = 0
    mapped_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """What does not depend on the plan's stages."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes + self.integer_bytes

    def short_by(self, host_bytes: int | None) -> float:
        """GiB that the state alone lacks, 0 if it fits."""
        return 0.0 if host_bytes is None else max(0, self.state_bytes - host_bytes) / GIB


def host_state(
    parameters: ParameterCounts, update: str, rounds: int, element_bytes: int, gradient_bytes: int
) -> HostMemory:
    """DESIGN section 4: 16 bytes per trained parameter in 16 bits, 18 with `async`'s second version.

    `gradient_bytes` per element as they come down; sums over rounds or tied layers are kept in float32, with a buffer
    for each use of a parameter, of which a tied one has two, where the next part lands.
    """
    versions = 2 if update == "async" else 1
    summed = parameters.trained if rounds > 1 else parameters.tied
    return HostMemory(
        weight_bytes=element_bytes * (versions * parameters.trained + parameters.frozen),
        gradient_bytes=max(4, gradient_bytes) * summed
        + gradient_bytes * (parameters.trained + parameters.tied),
        optimizer_bytes=OPTIMIZER_BYTES * parameters.trained,
        mapped_bytes=element_bytes * parameters.mapped,
    )
