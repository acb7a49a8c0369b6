"""The shortest honest answer when nothing fits: which layer, how many GiB are short, which keys would help."""

from collections.abc import Iterable, Sequence

from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import GIB, DeviceMemory, device_memory, host_activation_bytes
from torchround.pipeline.partition import Partition
from torchround.pipeline.search.planning_problem import PlanningProblem
from torchround.pipeline.search.systematic_search import greedy_partition

DEVICE_KEYS = {
    "weights_bytes": ("engine.device_memory_gib", "model.flavor"),
    "gradients_bytes": ("engine.accumulate_dtype", "lora.rank"),
    "staging_bytes": ("training.micro_batch_size", "training.seq_len"),
    "integers_bytes": ("engine.rounds",),
    "compute_bytes": ("training.micro_batch_size", "training.seq_len"),
}
HOST_KEYS = ("training.global_batch_size", "engine.rounds", "training.seq_len")


class InfeasiblePlanError(ValueError):
    """No partition fits, or the given one does not.

    `layer`: the one that needs most. `missing_gib`: how much is short. `keys`: config keys that would help.
    """

    def __init__(self, message: str, layer: str, missing_gib: float, keys: tuple[str, ...]) -> None:
        super().__init__(message)
        self.layer, self.missing_gib, self.keys = layer, missing_gib, keys


def why_infeasible(
    problem: PlanningProblem, rounds_choices: Sequence[int], partition: Partition | None = None
) -> InfeasiblePlanError:
    """The error for `partition`, or for the finest one, which needs least of a device."""
    ones = (1,) * (problem.num_layers - 1)
    finest = Partition(ones, 1, ones)
    chosen = partition or finest
    size = -(-problem.num_micro_batches // max(rounds_choices))
    needed = device_memory(chosen, problem.costs, size, problem.limits)
    limit = problem.limits.device_bytes
    if limit is not None and needed.total_bytes > limit:
        return _device_error(problem.costs, needed, limit, given=partition is not None)
    # Few stages need few boundaries, if a device has room for them.
    fullest = greedy_partition(problem, float("inf"))
    coarse = [fullest] if problem.fits_device(fullest, max(rounds_choices)) else []
    return _host_error(problem, rounds_choices, [partition] if partition else [finest, *coarse])


def _device_error(costs: Costs, needed: DeviceMemory, limit: int, given: bool) -> InfeasiblePlanError:
    missing_gib = (needed.total_bytes - limit) / GIB
    largest = max(
        costs.layers,
        key=lambda layer: (
            2 * (layer.weight_bytes + layer.gradient_bytes) + layer.activation_bytes + layer.workspace_bytes
        ),
    )
    parts = {
        "weights_bytes": f"{needed.weights_bytes / GIB:.3g} for two slots of weights",
        "gradients_bytes": f"{needed.gradients_bytes / GIB:.3g} for two of gradients",
        "staging_bytes": f"{needed.staging_bytes / GIB:.3g} for activations on their way",
        "integers_bytes": f"{needed.integers_bytes / GIB:.3g} for tokens and labels",
        "compute_bytes": f"{needed.compute_bytes / GIB:.3g} for activations and workspace",
    }
    by_size = sorted(parts, key=lambda kind: -getattr(needed, kind))
    keys = ("engine.plan",) if given else _keys(key for kind in by_size[:2] for key in DEVICE_KEYS[kind])
    subject = "the given plan" if given else f"layer {largest.name}, a stage of its own,"
    message = (
        f"{subject} needs {needed.total_bytes / GIB:.3g} GiB of a device that may use {limit / GIB:.3g} GiB: "
        f"{missing_gib:.3g} GiB are missing ({', '.join(parts[kind] for kind in by_size)}). "
        f"What would help: {', '.join(keys)}"
    )
    return InfeasiblePlanError(message, largest.name, missing_gib, keys)


def _host_error(
    problem: PlanningProblem, rounds_choices: Sequence[int], candidates: Sequence[Partition]
) -> InfeasiblePlanError:
    limit = problem.limits.host_bytes
    assert limit is not None, "what fits every limit is not infeasible"
    costs, devices, micro_batches = problem.costs, problem.num_devices, problem.num_micro_batches
    needed, stages = min(
        (
            host_activation_bytes(chosen, costs, devices, micro_batches, rounds, problem.update),
            chosen.num_stages,
        )
        for chosen in candidates
        for rounds in rounds_choices
    )
    largest = max(costs.layers, key=lambda layer: layer.boundary_bytes)
    missing_gib = (needed - limit) / GIB
    message = (
        f"the activations between {stages} stages need {needed / GIB:.3g} GiB of host memory and "
        f"{limit / GIB:.3g} GiB are left for them: {missing_gib:.3g} GiB are missing (the output of layer "
        f"{largest.name} is the largest, {largest.boundary_bytes / GIB:.3g} GiB per micro-batch). "
        f"What would help: {', '.join(HOST_KEYS)}"
    )
    return InfeasiblePlanError(message, largest.name, missing_gib, HOST_KEYS)


def _keys(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, in order."""
    return tuple(dict.fromkeys(names))
