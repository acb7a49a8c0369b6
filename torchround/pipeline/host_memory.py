"""Host memory of a run by kind: weights, gradients, optimizer state, activations between stages, tokens."""

from dataclasses import dataclass

from torchround.pipeline.memory import GIB

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
