"""The plan of a pipeline: stages cut from the costs that the probe measured, within the devices' memory."""

from collections.abc import Sequence

from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, aligned
from torchround.library.probe import LayerMeasure
from torchround.library.refusals import PipelineUsageError
from torchround.library.sample_batch import SampleBatch
from torchround.planning.cards import ASSUMED_DEVICE
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.memory import MemoryLimits
from torchround.planning.partition import KeptNames, Partition
from torchround.planning.planner import InfeasiblePlanError, make_plan
from torchround.run.hardware import Hardware
from torchround.run.numbers import layer_numels, parameter_counts

# Gradients add up on devices in float32.
ACCUMULATE_BYTES = 4


def kept_names(measures: Sequence[LayerMeasure]) -> KeptNames:
    """Return the names of the parts that each layer keeps."""
    return tuple(tuple(part.name for part in measure.kept) for measure in measures)


def measured_costs(model: LayeredModel, store: HostStore, measures: Sequence[LayerMeasure]) -> Costs:
    """Return the planner's costs of a model from what the probe measured."""
    layers = tuple(
        LayerCost(
            name=name,
            forward_s=measure.forward_s,
            backward_s=measure.backward_s,
            weight_bytes=(trained + frozen) * store.dtype.itemsize,
            gradient_bytes=trained * ACCUMULATE_BYTES,
            activation_bytes=measure.activation_bytes,
            boundary_bytes=measure.boundary_bytes,
            workspace_bytes=measure.workspace_bytes,
            keepable=measure.kept,
            kept=kept,
        )
        for name, (trained, frozen), measure, kept in zip(
            model.names, layer_numels(model), measures, kept_names(measures), strict=True
        )
    )
    largest = max(layer.boundary_bytes for layer in layers)
    return Costs(layers, ASSUMED_DEVICE.hop_s(largest), parameter_counts(store.bundles).shared_layers)


def cut_model(
    model: LayeredModel,
    store: HostStore,
    measures: Sequence[LayerMeasure],
    batches: Sequence[SampleBatch],
    hardware: Hardware,
    update: str,
) -> Partition:
    """Return the partition that is fastest by the measured costs. Raises `PipelineUsageError` if none fits.

    Costs are of the first micro-batch, which is one of the longest.
    """
    costs = measured_costs(model, store, measures)
    limit, constants = hardware.device_bytes, model.constant_bytes()
    limits = MemoryLimits(
        device_bytes=None if limit is None else max(0, limit - constants),
        integer_bytes=sum(aligned(part.nbytes) for part in batches[0].tensors()),
        accumulate_bytes=ACCUMULATE_BYTES,
        rounded_bytes=0 if (size := store.gradient_dtype.itemsize) == ACCUMULATE_BYTES else size,
    )
    try:
        plan = make_plan(costs, hardware.num_devices, len(batches), update, rounds=1, limits=limits)
    except InfeasiblePlanError as error:
        largest = max(costs.layers, key=lambda layer: layer.weight_bytes + layer.activation_bytes)
        raise PipelineUsageError(
            f"no cut of the net fits the devices: {error}. Layer {largest.name} is the largest. What helps: more "
            "micro-batches (num_micro_batches), smaller layers (each member of the nn.Sequential is one), or more "
            "memory (device_memory_gib)"
        ) from error
    return plan.partition
