"""The settings of an engine, and what they and its optimizer demand of its store and its partition."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from torchround.config import OptimizerTable
from torchround.engine.compiled import LayerCompiler
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel
from torchround.optim import HostOptimizer
from torchround.planning.partition import KeptNames, Partition


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine. `max_norm` 0 turns clipping off; gradients add up on devices in `accumulate_dtype`.

    `clip = "layer"` clips each bundle by its own norm, with its share of `max_norm` (`optim.layer_max_norm`).
    `stale_layers` is the number of layers, from the first one on, whose forward reads the previous weight version under the
    `bounded` mode, in the first round of a step's first call. `times_layers` measures each layer for `layer_times`.
    `compile_update` compiles the optimizer's update (`optim/kernel.py`), `compiler` the layers; engines of one model may share
    it. `kept` names the parts that each layer keeps from its forward to its backward stage (`torchround/keeping.py`).
    `accumulates` lets a step have several calls of `forward_backward`, whose gradients add up on the host in fp32.
    With `experts_by_need` only the packed experts that tokens are routed to are uploaded; "auto" if a stage job has few tokens.
    """

    rounds: int = 1
    max_norm: float = 1.0
    clip: Literal["global", "layer"] = "global"
    stale_layers: int = 0
    layerwise_recompute: bool = False
    times_layers: bool = False
    accumulate_dtype: torch.dtype = torch.float32
    hang_timeout_s: float = 300.0
    compile_update: bool = False
    compiler: LayerCompiler | None = None
    kept: KeptNames = ()
    accumulates: bool = False
    experts_by_need: bool | Literal["auto"] = "auto"

    def problems(
        self,
        store: HostStore,
        model: LayeredModel,
        partition: Partition,
        optimizer: OptimizerTable | HostOptimizer,
    ) -> Iterator[str]:
        if partition.num_layers != len(model.layers):
            yield f"the partition covers {partition.num_layers} layers, the model has {len(model.layers)}"
        if self.kept and len(self.kept) != partition.num_layers:
            yield f"kept names parts of {len(self.kept)} layers; the partition covers {partition.num_layers}"
        if not store.is_consistent:
            yield "the host store mixes two weight versions; load a checkpoint into it first"
        mode, several = store.mode, store.ownership.num_machines > 1
        most = sum(partition.forward) if mode.updates_by_layer else 0  # the layers before the fused stage
        if not 0 <= self.stale_layers <= most:
            yield f"stale_layers is {self.stale_layers}; legal here under {mode.name}: 0 to {most}"
        if several and self.stale_layers < store.stale_layers:
            # Each machine could renew only its own.
            yield f"the device weights of {store.stale_layers} layers are one version old; use as many stale_layers"
        if self.experts_by_need is True and self.compiler is not None:
            yield "compiled layers have whole stacks of experts; use experts_by_need False, or no compiler"
        if any(self.kept[: self.stale_layers]):
            yield "layers below stale_layers keep nothing: their backward reads newer weights than their forward"
        if mode.updates_by_layer and self.max_norm > 0 and self.clip == "global":
            yield f'{mode.name} updates do not wait for the global norm; use clip = "layer", or max_norm 0'
        if mode.updates_by_layer and store.dtype == torch.float16:
            yield f"{mode.name} updates need bfloat16 or float32: float16 skips whole steps, which it knows too late"
        if isinstance(optimizer, HostOptimizer):
            if mode.updates_by_layer or several or mode.predicts or store.splits_weights:
                yield (
                    "a HostOptimizer steps all fp32 weights at once: not with bounded updates, predicted device weights, "
                    "several machines or split weights (make the host store with optimizer=NO_STATE)"
                )
            return
        if mode.updates_by_layer and not optimizer.updates_by_layer:
            # The devices would wait for each gradient before the next forward.
            yield f"{mode.name} updates begin before a step's last gradient, {optimizer.name}'s after it; use another mode"
        if mode.predicts and not optimizer.can_predict:
            yield f"{optimizer.name} has no state that predicts the next step; use async without prediction"
