"""An engine without training: frozen weights on the host, and device memory for keys and values.

All layers are frozen, so that the host store holds device weights only. If all weights fit the devices, each device has
two stages in a pass, and both stay in their slots. Otherwise there are more stages, and each pass uploads them again.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal

import torch

from torchround.config import AdamWTable
from torchround.engine.device import Device
from torchround.engine.engine import Engine
from torchround.engine.errors import EngineUsageError
from torchround.engine.settings import EngineSettings
from torchround.engine.store.host_store import HostStore
from torchround.generation.continuations import GROUPS, generate, sequence_bytes
from torchround.layer import FileTensor, LayeredModel, LayerWork, MicroBatch
from torchround.planning.memory import MIB, size_text, slot_space
from torchround.planning.partition import Partition, Stage, StageKind

# One in each half of a device's space for weights: with two stages a pass, both are still there in the next pass.
STAGES_THAT_STAY = 2
# Activations between stages: two buffers of a device for incoming ones, two for outgoing ones.
STAGING_BUFFERS = 4
# Keys and values that continuations of a validation may keep on each device beside what a training run has planned.
SAMPLE_CACHE_BYTES = 256 * MIB


def inference_store(
    model: LayeredModel,
    dtype: torch.dtype,
    devices: Sequence[Device],
    mapped: Mapping[str, Sequence[FileTensor]] | None = None,
) -> HostStore:
    """Freeze the model, and return a store of device weights, to fill by `HostStore.weights`. `mapped` as in `HostStore`."""
    for layer in model.layers:
        layer.requires_grad_(False)
    pinned = any(device.pins_host_memory for device in devices)
    return HostStore(model, dtype, pinned=pinned, mapped=mapped)


@dataclass(frozen=True)
class Score:
    """The sum of the losses of `num_labels` tokens, in nats."""

    loss_sum: float
    num_labels: int

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.num_labels, 1)


def score(engine: Engine, batches: Iterable[Sequence[MicroBatch]]) -> Score:
    """Add up token losses in fp64 in their order. The next batch runs while the losses of one are read."""
    loss_sum, num_labels = 0.0, 0
    results = map(engine.evaluate, batches)
    for result, _ in pairwise(chain(results, (None,))):
        assert result is not None, "the pair's second alone may be None"
        loss_sum = sum(result.loss_sums(), start=loss_sum)
        num_labels += result.num_labels
    return Score(loss_sum, num_labels)


class TextEngine(Engine):
    """An engine for continuations and scores of a frozen model, which has been filled.

    It is made for `batch_size` sequences at a time of up to `tokens` tokens, continuation included. `device_bytes` is
    the memory of each device; None is no limit. Devices that would get no layer stay unused. Raises `EngineUsageError`
    if the weights of two layers and the activations of one do not fit.
    """

    def __init__(
        self,
        model: LayeredModel,
        store: HostStore,
        devices: Sequence[Device],
        *,
        batch_size: int,
        tokens: int,
        device_bytes: int | None = None,
        experts_by_need: bool | Literal["auto"] = "auto",
    ) -> None:
        devices = devices[: len(model.layers)]
        kind = devices[0].torch_device.type
        self.batch_size = batch_size
        partition, self.cache_bytes = plan_inference(
            model, store, len(devices), kind, batch_size, tokens, device_bytes
        )
        settings = EngineSettings(experts_by_need=experts_by_need)
        super().__init__(model, store, devices, partition, optimizer=AdamWTable(), settings=settings)

    def generate(self, prompts: Sequence[Sequence[int]], **limits: Any) -> list[list[int]]:
        """Continue each prompt, with the other arguments of `generate`."""
        return generate(self, prompts, batch_size=self.batch_size, cache_bytes=self.cache_bytes, **limits)

    def __enter__(self) -> "TextEngine":  # noqa: PYI034  (typing.Self needs Python 3.11)
        return self


def plan_inference(
    model: LayeredModel,
    store: HostStore,
    num_devices: int,
    kind: str,
    batch_size: int,
    tokens: int,
    device_bytes: int | None,
) -> tuple[Partition, int | None]:
    """Choose the stages of a pass, and the memory of each device for keys and values; None is no limit.

    The fewest stages whose weights leave room for the keys and values of `batch_size` sequences of `tokens` tokens; if
    none do, the ones that leave the most. Raises `EngineUsageError` if no stages fit.
    """
    sizes = [
        store.stage_bytes(Stage(StageKind.FORWARD, layer, layer + 1)) for layer in range(len(model.layers))
    ]
    rows = -(-batch_size // GROUPS)
    works: list[LayerWork] = [
        layer.work(rows, tokens, store.dtype.itemsize, kind)  # type: ignore[operator]
        for layer in model.layers
    ]
    # What a backward would need is counted too: an estimate from above.
    compute = max(work.activation_bytes + work.workspace_bytes for work in works)
    staging = STAGING_BUFFERS * max(work.boundary_bytes for work in works)
    unpacking = max(bundle.unpacking_bytes(store.dtype.itemsize, kind) for bundle in store.bundles)
    besides = compute + staging + model.constant_bytes() + store.unpacked_bytes() + unpacking
    wanted = [batch_size * size for size in sequence_bytes(model.layers, tokens, store.dtype.itemsize)]
    best: tuple[int, Partition] | None = None
    # Multiples of the devices, so that a layer stays with its device.
    most = len(sizes) // num_devices
    for multiple in range(min(STAGES_THAT_STAY, most), most + 1):
        count = multiple * num_devices
        *forward, fused = cut_evenly(sizes, count)
        # Frozen layers have no backward, but a partition names one.
        partition = Partition(tuple(forward), fused, tuple(forward[::-1]))
        if device_bytes is None:
            return partition, None
        left = device_bytes - besides - slot_space(partition, num_devices, store.stage_bytes)
        stages = partition.stages()[:count]
        on_devices = [
            sum(sum(wanted[stage.start : stage.stop]) for stage in stages[first::num_devices])
            for first in range(num_devices)
        ]
        if left >= max(on_devices):
            return partition, left
        if best is None or left > best[0]:
            best = left, partition
    assert best is not None, "a model has at least one layer for each device"
    if best[0] < 0:
        assert device_bytes is not None, "without a limit everything fits"
        raise EngineUsageError(
            f"the weights of two stages and the activations of one layer need {size_text(device_bytes - best[0])} "
            f"on a device, which has {size_text(device_bytes)}; use fewer or shorter sequences at a time, or devices "
            "with more memory"
        )
    return best[1], best[0]


def cut_evenly(sizes: Sequence[int], count: int) -> list[int]:
    """Cut a list into `count` runs so that the largest sum of a run is as small as possible; returns their lengths."""
    sums = range(max(sizes), sum(sizes))
    most = sums.start + bisect_left(sums, True, key=lambda most: len(_runs(sizes, most)) <= count)
    starts = _runs(sizes, most)
    # Fewer runs may be enough for that; more of them hurt nothing.
    more = [cut for cut in range(1, len(sizes)) if cut not in starts][: count - len(starts)]
    starts = [*sorted(starts + more), len(sizes)]
    return [stop - start for start, stop in pairwise(starts)]


def _runs(sizes: Sequence[int], most: int) -> list[int]:
    """List where the runs begin if each takes as much as it can, up to `most`."""
    starts, taken = [0], 0
    for index, size in enumerate(sizes):
        if taken and taken + size > most:
            starts.append(index)
            taken = 0
        taken += size
    return starts
