"""`torchround.Pipeline`: an `nn.Sequential` of ordinary modules, trained on devices that hold a few layers at a time.

The weights live in host memory. The first batch is run layer by layer on the host (`probe.py`), so that a layer which
cannot work is refused by name, and so that the stages are cut from measured costs.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchround.accelerators import kind_of
from torchround.config import EngineTable, OptimizerTable
from torchround.config.optimizer_tables import optimizer_tables
from torchround.engine.engine import Engine
from torchround.engine.errors import EngineUsageError
from torchround.engine.passes import StepResult
from torchround.engine.settings import EngineSettings
from torchround.engine.store.host_store import HostStore
from torchround.engine.update import trained_weights
from torchround.layer import aligned
from torchround.library.module_layer import check_net, wrap
from torchround.library.probe import ACCUMULATE_BYTES, probe
from torchround.library.sample_batch import LossFn, SampleBatch, cut, joined
from torchround.library.seeds import INFERENCE
from torchround.optim.host_optimizer import HostOptimizer
from torchround.optim.optimizer import NO_STATE, make_optimizer
from torchround.planning.cards import ASSUMED_DEVICE
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.memory import MemoryLimits
from torchround.planning.partition import Partition
from torchround.planning.planner import InfeasiblePlanError, make_plan
from torchround.planning.update_modes import MODES, SYNC, mode_of
from torchround.run.hardware import find_hardware
from torchround.run.numbers import parameter_counts

# The settings of our own optimizers if they are not given: as in `torch.optim`, but without weight decay.
DEFAULTS = {"lr": 1e-2, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}


class Pipeline:
    """A net that trains on stateless devices, with calls like those of a loop on one device.

    - `net`: an `nn.Sequential` on the CPU; each member is one layer. It stays as it is: the pipeline has its own copy of
      the weights, and refers to none of the net's.
    - `devices`: how many, accelerators if PyTorch sees any and otherwise virtual devices on the CPU.
    - `optimizer`: `"adamw"`, `"muon"`, a class of `torch.optim`, or a callable that gets the named parameters and returns
      an optimizer. A class or a callable runs on the host, after the last gradient, and is slower.
    - `settings`: those of the optimizer, `lr` among them. Our own have the keys of their tables in `configuration.md`, such as
      `betas`, `eps`, `weight_decay` (of matrices) and `state="compact"` for 8 bits; see `DEFAULTS`.
    - `max_norm`: bound of the norm of the whole gradient; 0 is no bound. With `"muon"`, of AdamW's part.
    - `update`: `"sync"` as a plain loop; `"async"` computes with weights that are one step old, and devices never wait.
    - `seed`: seed of the layers' random numbers.
    - `partition`: the stages, in place of those from measured costs. `device_memory_gib`: most memory of each device.

    Raises `EngineUsageError` for what cannot work, `PipelineError` for a fault in a layer on its device. After a fault and
    `close` the next batch starts new threads, if the weights are whole.
    """

    def __init__(
        self,
        net: nn.Sequential,
        devices: int = 2,
        optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
        *,
        max_norm: float = 0.0,
        update: str = SYNC.name,
        seed: int = 0,
        partition: Partition | None = None,
        device_memory_gib: float | None = None,
        **settings: Any,
    ) -> None:
        check_net(net)
        modes = [name for name, mode in MODES.items() if not mode.updates_by_layer]
        if update not in modes or not 0 <= max_norm < math.inf:
            asked = f"update={update!r}, max_norm={max_norm!r}"
            raise EngineUsageError(f"{asked}; legal: update in {modes}, and a finite max_norm of at least 0")
        self.lr = settings.get("lr", DEFAULTS["lr"])
        self._seed, self._max_norm = seed, max_norm
        self._given = self.partition = partition
        self._hardware = find_hardware(EngineTable(num_devices=devices, device_memory_gib=device_memory_gib))
        self._devices = self._hardware.make_devices()
        self._wrapped = wrapped = wrap(net)
        self._optimizer = choice = _choose_optimizer(optimizer, wrapped.stored, settings)
        self._host = choice if isinstance(choice, HostOptimizer) else None
        predicts = not isinstance(choice, HostOptimizer) and choice.can_predict
        self._mode = mode_of(update).with_prediction(predicts)
        self.store = HostStore(
            wrapped.model,
            wrapped.store_dtype,
            mode=self._mode,
            pinned=kind_of(self._hardware.kind).locks_pages,
            optimizer=NO_STATE if isinstance(choice, HostOptimizer) else make_optimizer(choice),
        )
        self._wrapped.fill(self.store, net.state_dict())
        if self._host is not None:  # now, so that a scheduler can have it before the first batch
            self._host.bind(trained_weights(self.store))
        self._engine: Engine | None = None
        self._is_for_training = False
        self._calls = self._forwards = 0
        self._open = False  # open: a call's gradients wait for step()

    def forward_backward(
        self, inputs: Any, labels: Any, loss_fn: LossFn, num_micro_batches: int = 3, lazy: bool = False
    ) -> "float | StepResult":
        """Compute the loss of a batch and add its gradients to those of the calls since the last `step`.

        `inputs` go to the first layer; tensors of inputs and labels are cut along dimension 0 into `num_micro_batches`
        micro-batches. `loss_fn(outputs, labels)` returns the loss of one of them. The sum over them is returned. If
        `lazy`, the call returns while the devices may be at work, with a result whose `loss()` waits for the sum.
        """
        numbers = {"seed": self._seed, "call": self._calls}
        batches = cut(inputs, labels, num_micro_batches, loss_fn, is_training=True, **numbers)
        result = self._engine_for(batches).forward_backward(batches, num_labels=1)
        self._calls += 1
        self._open = True
        return result if lazy else result.loss()

    def step(self, lr: float | None = None) -> None:
        """Update the weights with the gradients of all calls since the last step, which are then zero. Does not wait.

        `lr` is the rate of this step. Without it `adamw` takes `Pipeline.lr`, and an optimizer of `torch.optim` the rates of
        its own groups, which a scheduler may have changed.
        """
        if self._engine is None or not self._open:
            raise EngineUsageError("step() needs a forward_backward() before it")
        self._engine.step(self.lr if lr is None and self._host is None else lr)
        self._open = False

    def forward(self, inputs: Any, num_micro_batches: int = 3) -> Any:
        """Compute the net's output in evaluation mode, without gradients, on the host.

        Micro-batches are joined in order along dimension 0, leaf by leaf. A tensor whose dimension 0 is not the number of
        samples comes as a list, one for each micro-batch.
        """
        numbers = {"seed": self._seed, "call": INFERENCE + self._forwards}
        batches = cut(inputs, None, num_micro_batches, None, is_training=False, **numbers)
        engine = self._engine_for(batches)
        with nullcontext() if self._mode.has_flush else engine.true_device_weights():
            outputs = engine.forward(batches).outputs()
        self._forwards += 1
        return joined(outputs, [batch.samples for batch in batches])

    __call__ = forward

    # Weights.

    def weights(self) -> dict[str, Tensor]:
        """Copy the weights and buffers, with the names and dtypes of the plain net. Waits for all steps."""
        self._drain()
        return self._wrapped.weights(self.store)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Copy all that a new `Pipeline` with the same arguments needs to train on with the same bits. Waits for all steps.

        `"model"` holds `weights()`, `"optimizer"` everything else: its state, step, rate, loss scale, and the counts that random
        numbers depend on.
        """
        if self._open:
            raise EngineUsageError(
                "state_dict() was called between forward_backward() and step(); call weights()"
            )
        host = self.optimizer
        optimizer = {
            "step": self.store.step,
            "lr": self.lr,
            "calls": [self._calls, self._forwards],
            "resume": self.store.resume_state(),
            "tensors": {name: view.clone() for name, view in self._wrapped.kept_views(self.store).items()},
            "class": _name_of(host),
            "torch": None if host is None else copy.deepcopy(host.state_dict()),
        }
        return {"model": self.weights(), "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; a plain net's state dict gives weights and buffers alone, and the rest stays.

        Raises `EngineUsageError` if names, shapes or the optimizer differ, and then changes nothing.
        """
        if self._open:
            raise EngineUsageError("load_state_dict() was called between forward_backward() and step()")
        model, kept = state, None
        if state.keys() == {"model", "optimizer"}:
            model, kept = state["model"], state["optimizer"]
        host, views = self.optimizer, self._wrapped.kept_views(self.store)
        own = None if kept is None else {"tensors": views, "class": _name_of(host)}
        expected, given = _described(self._wrapped.net.state_dict(), own), _described(model, kept)
        if names := [key for key in {**expected, **given} if expected.get(key) != given.get(key)]:
            raise EngineUsageError(
                f"the state dict is not of this net and optimizer; {len(names)} entries differ: {', '.join(names[:8])}"
            )
        self.close()  # it counts steps, and its devices hold buffers
        self._wrapped.fill(self.store, model)
        if kept is None:
            return
        for name, value in kept["tensors"].items():
            views[name].copy_(value)
        self.store.resume(kept["step"], **kept["resume"])
        self.lr = kept["lr"]
        self._calls, self._forwards = kept["calls"]
        if host is not None:
            host.load_state_dict(copy.deepcopy(kept["torch"]))

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The `torch.optim` object, for its state and its groups between steps; None for our own."""
        self._drain()
        return None if self._host is None or not self.store.trained else self._host.optimizer

    def close(self) -> None:
        """Finish all steps and end the threads. The weights stay readable, and another batch starts the threads again."""
        self.__exit__(None)

    def __enter__(self) -> "Pipeline":  # noqa: PYI034  (typing.Self needs Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        engine, self._engine, self._open = self._engine, None, False
        if engine is not None:
            engine.__exit__(kind, *rest)

    # Inside.

    def _engine_for(self, batches: Sequence[SampleBatch]) -> Engine:
        """Take the engine, after a probe with the first micro-batch if this is the first call of its kind."""
        trains = batches[0].is_training
        if self._engine is not None and (self._is_for_training or not trains):
            return self._engine
        self.close()
        # Copies, because a layer that changes its input must not change the caller's.
        copies = tuple(part.clone() for part in batches[0].parts)
        costs = probe(self._wrapped, self.store, replace(batches[0], parts=copies))
        self.partition = self._given or self._cut(costs, batches)
        self._engine = Engine(
            *(self._wrapped.model, self.store, self._devices, self.partition),
            optimizer=self._optimizer,
            settings=EngineSettings(max_norm=self._max_norm, accumulates=True),
        )
        self._is_for_training = trains
        return self._engine

    def _cut(self, layers: Sequence[LayerCost], batches: Sequence[SampleBatch]) -> Partition:
        """Find the fastest stages by the costs of the first (longest) micro-batch. Raises `EngineUsageError` if none fit."""
        hop_s = ASSUMED_DEVICE.hop_s(max(layer.boundary_bytes for layer in layers))
        costs = Costs(tuple(layers), hop_s, parameter_counts(self.store.bundles).shared_layers)
        device_bytes, size = self._hardware.device_bytes, self.store.dtype.itemsize
        constants = self._wrapped.model.constant_bytes()
        limits = MemoryLimits(
            device_bytes=None if device_bytes is None else max(0, device_bytes - constants),
            integer_bytes=sum(aligned(part.nbytes) for part in batches[0].tensors()),
            accumulate_bytes=ACCUMULATE_BYTES,
            rounded_bytes=0 if size == ACCUMULATE_BYTES else size,
        )
        shape = self._hardware.num_devices, len(batches), self._mode.name
        try:
            return make_plan(costs, *shape, rounds=1, limits=limits).partition
        except InfeasiblePlanError as error:
            raise EngineUsageError(
                f"no cut of the net fits the devices: {error}. What helps: more num_micro_batches, smaller layers"
            ) from error

    def _drain(self) -> None:
        if self._engine is not None:
            self._engine.drain()


def _choose_optimizer(
    asked: str | Callable[..., torch.optim.Optimizer], stored: Mapping[str, str], settings: Mapping[str, Any]
) -> OptimizerTable | HostOptimizer:
    """Choose the optimizer that is asked for, as engines take it. Raises `EngineUsageError` for an unknown name.

    The table of one of ours checks the settings (`ValidationError`). Any other optimizer gets the parameters by the names
    of the plain net, and the settings.
    """
    if not isinstance(asked, str):
        plain = {name: key for key, name in reversed(list(stored.items()))}
        return HostOptimizer(
            lambda named: asked([(plain[name], parameter) for name, parameter in named], **settings)
        )
    if (table := optimizer_tables().get(asked)) is None:
        legal = ", ".join(map(repr, optimizer_tables()))
        raise EngineUsageError(
            f"optimizer = {asked!r}; legal: {legal}, a class of torch.optim, or a callable"
        )
    usual = {key: value for key, value in DEFAULTS.items() if key in table.model_fields}
    return table.model_validate({**usual, **settings})


def _name_of(host: torch.optim.Optimizer | None) -> str | None:
    return None if host is None else type(host).__qualname__


def _described(model: Mapping[str, Tensor], kept: Mapping[str, Any] | None) -> dict[str, Any]:
    """Describe a state, so that descriptions are equal if one can be loaded into the other."""
    found: dict[str, Any] = {name: value.shape for name, value in model.items()}
    if kept is not None:
        found |= {name: (value.dtype, value.shape) for name, value in kept["tensors"].items()}
        found["class of the optimizer"] = kept["class"]
    return found
