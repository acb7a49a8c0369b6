"""The settings of an engine, and what they and its optimizer demand of its store and its partition."""

from dataclasses import dataclass
from typing import Literal

import torch

from torchround.config import OptimizerTable
from torchround.engine.compiled import LayerCompiler
from torchround.engine.errors import EngineUsageError
from torchround.engine.store.bundles import BOUNDED
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel
from torchround.optim import HostOptimizer
from torchround.optim.optimizer import make_optimizer
from torchround.planning.partition import KeptNames, Partition


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine. `max_norm` 0 turns clipping off; gradients add up on devices in `accumulate_dtype`.

    `clip = "layer"` clips each bundle by its own norm, with its share of `max_norm` (`optim.layer_max_norm`).
    `stale_layers` is the number of layers, from the first one on, whose forward reads the previous weight version
    under the `bounded` policy, in the first round of a step's first call. `times_layers` measures each layer for
    `costs_from_reports`, at the cost of more marks in the streams. `compile_update` compiles the optimizer's update before
    the first update (`optim/kernel.py`). `compiler` compiles the layers; engines of one model that follow each other may share it.
    `kept` names the parts that each layer keeps from its forward to its backward stage (`torchround/keeping.py`);
    empty keeps nothing. `accumulates` lets a step have several calls of `forward_backward`, whose gradients add up
    on the host in fp32.
    """

    rounds: int = 1
    max_norm: float = 1.0
    clip: Literal["global", "layer"] = "global"
    stale_layers: int = 0
    layerwise_recompute: bool = False
    times_layers: bool = False
    accumulate_dtype: torch.dtype = torch.float32
    hang_timeout_s: float = 600.0
    compile_update: bool = False
    compiler: LayerCompiler | None = None
    kept: KeptNames = ()
    accumulates: bool = False

    def check(self, model: LayeredModel, store: HostStore, partition: Partition) -> None:
        """Raise `EngineUsageError` if the store or the partition cannot be used with the model or these settings."""
        if partition.num_layers != len(model.layers):
            raise EngineUsageError(
                f"the partition covers {partition.num_layers} layers, the model has {len(model.layers)}"
            )
        if self.kept and len(self.kept) != partition.num_layers:
            raise EngineUsageError(
                f"kept names parts of {len(self.kept)} layers; the partition covers {partition.num_layers}"
            )
        self._check_compiled(model)
        if not store.is_consistent:
            raise EngineUsageError(
                "the host store mixes two weight versions; load a checkpoint into it first"
            )
        most = sum(partition.forward) if store.policy is BOUNDED else 0
        if not 0 <= self.stale_layers <= most:
            raise EngineUsageError(
                f"stale_layers is {self.stale_layers}; legal under {store.policy.name}: 0 to {most}"
                + (", the layers before the fused stage" if store.policy is BOUNDED else "")
            )
        if store.ownership.num_machines > 1 and self.stale_layers < store.stale_layers:
            raise EngineUsageError(
                f"the device weights of {store.stale_layers} layers are one version old, and each machine could renew only "
                f"its own; use stale_layers = {store.stale_layers}, got {self.stale_layers}"
            )
        if stale := [layer for layer in range(self.stale_layers) if self.kept and self.kept[layer]]:
            raise EngineUsageError(
                f"layers {stale} keep activations, but their backward reads newer weights than their forward; "
                "layers below stale_layers keep nothing"
            )
        if store.policy is not BOUNDED:
            return
        if self.max_norm > 0 and self.clip == "global":
            raise EngineUsageError(
                'bounded updates do not wait for the global norm; use clip = "layer", or max_norm 0'
            )
        if store.dtype == torch.float16:
            raise EngineUsageError(
                "bounded updates need bfloat16 or float32: float16 skips whole steps, which it knows too late"
            )

    def _check_compiled(self, model: LayeredModel) -> None:
        """Raise `EngineUsageError` for layers that cannot be compiled, if they have to be."""
        if self.compiler is None or not self.compiler.is_required:
            return
        for name, layer in zip(model.names, model.layers, strict=True):
            if next(layer.buffers(), None) is not None and not getattr(layer, "never_compiled", False):
                raise EngineUsageError(
                    f"layer {name} ({type(layer).__name__}) holds buffers, which compiled code cannot take; give it an "
                    "attribute never_compiled = True, or the engine no compiler"
                )


def allocate_gradients(
    store: HostStore, model: LayeredModel, optimizer: OptimizerTable | HostOptimizer, settings: EngineSettings
) -> None:
    """Let the optimizer's rules update the store, and give it the gradient buffers that they read.

    Raises `EngineUsageError` if the store and the optimizer do not fit.

    The rounds decide which gradients add up on the host, and so which pool buffers they need. PyTorch's optimizers
    take gradients in the dtype of their weights, which is fp32.
    """
    if isinstance(optimizer, HostOptimizer):
        if store.policy is BOUNDED:
            raise EngineUsageError(
                "bounded updates update layer by layer, and a HostOptimizer steps all at once; use sync or async"
            )
        if store.policy.predicts:
            raise EngineUsageError(
                "predicted device weights need AdamW's moments; with a HostOptimizer use async without prediction"
            )
        if store.ownership.num_machines > 1:
            raise EngineUsageError("a HostOptimizer works on one machine; on several use AdamW")
        if store.splits_weights:
            raise EngineUsageError(
                "a HostOptimizer needs fp32 weights, and the host store splits them; make it with optimizer=NO_STATE"
            )
    else:
        try:
            store.assign_rules(model, make_optimizer(optimizer))
        except ValueError as error:
            raise EngineUsageError(
                f"the host store is not of this optimizer: {error}; make it with optimizer=make_optimizer(table)"
            ) from error
        _check_policy(store, optimizer)
    needs_sum = isinstance(optimizer, HostOptimizer) and store.gradient_dtype != torch.float32
    store.allocate_gradients(settings.rounds, settings.accumulates or needs_sum)


def _check_policy(store: HostStore, optimizer: OptimizerTable) -> None:
    """Raise `EngineUsageError` if the optimizer cannot update as the store's policy asks."""
    if store.policy is BOUNDED and not optimizer.updates_by_layer:
        raise EngineUsageError(
            f"bounded updates begin before a step's last gradient, and those of {optimizer.name} need the devices, which would "
            "wait for each gradient before the next forward; use sync or async"
        )
    if store.policy.predicts and not optimizer.can_predict:
        raise EngineUsageError(
            f"predicted device weights need a state that tells the next step, and {optimizer.name} has none; use async "
            "without prediction"
        )
