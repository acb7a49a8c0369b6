"""`torchround.Pipeline`: an `nn.Sequential` of ordinary modules, trained on devices that hold a few layers at a time.

    with Pipeline(net, devices=2, optimizer="adamw", lr=1e-3) as pipeline:
        for inputs, labels in batches:
            loss = pipeline.forward_backward(inputs, labels, loss_fn)
            pipeline.step()

The weights live in host memory. The first batch is run layer by layer on the host (`probe.py`), so that a layer which
cannot work is refused by name, and so that the stages are cut from measured costs.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchround.accelerators import kind_of, known_kinds
from torchround.config import EngineTable
from torchround.engine.device import Device
from torchround.engine.engine import Engine
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.passes import StepResult
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC
from torchround.engine.store.host_store import HostStore
from torchround.engine.update import trained_weights
from torchround.library.model_state import (
    check_same,
    described,
    fill_store,
    free_weights,
    kept_views,
    saved_buffers,
    weights_of,
)
from torchround.library.module_layer import store_dtype, wrap
from torchround.library.optimizers import DEFAULT_LR, choose_optimizer
from torchround.library.probe import cut_model, probe
from torchround.library.refusals import PipelineUsageError, check_loss, check_net, check_number
from torchround.library.sample_batch import LossFn, SampleBatch, cut, joined
from torchround.library.seeds import INFERENCE
from torchround.optim import HostOptimizer
from torchround.optim.optimizer import NO_STATE, make_optimizer
from torchround.planning.memory import GIB
from torchround.planning.partition import Partition
from torchround.run.hardware import Hardware, find_hardware

logger = logging.getLogger(__name__)

MODES = "leave it out: forward_backward() computes in the mode that the net had, forward() in evaluation mode"
DEVICES = "leave it out: Pipeline(devices=..) takes the devices"
# Calls of a plain loop on its module or its optimizer, with what takes their place.
CALLS_OF_A_LOOP = {
    **dict.fromkeys(("train", "eval"), MODES),
    **dict.fromkeys(("to", "cpu", *known_kinds()), DEVICES),
    "zero_grad": "leave it out: step() leaves no gradient",
    "backward": "forward_backward(inputs, labels, loss_fn) computes loss and gradients",
}


class PendingLoss:
    """The summed loss of a call whose devices may still be at work. `float(loss)` waits for it."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def value(self) -> float:
        """Wait for the devices, and return the sum of the losses of all micro-batches."""
        return self._result.loss()

    __float__ = value


class Pipeline:
    """A net that trains on stateless devices, with calls like those of a loop on one device.

    - `net`: an `nn.Sequential` on the CPU; each member is one layer. It stays as it is: the pipeline has its own copy of
      the weights. With `takes_over` its parameters are moved to `meta` instead, so that the weights exist once.
    - `devices`: how many, accelerators if PyTorch sees any and otherwise virtual devices on the CPU; or a list of `Device`.
    - `optimizer`: `"adamw"`, `"muon"`, a class of `torch.optim`, or a callable that gets the named parameters and returns
      an optimizer. A class or a callable runs on the host, after the last gradient, and is slower.
    - `lr` (1e-2 if not given, where the optimizer has one), `weight_decay`: as in `torch.optim`, but without weight decay if
      none is asked for, also for a class that has one by default. It is for all parameters but `no_decay`.
    - `betas`, `eps`: of AdamW, also of its part in `"muon"`, (0.9, 0.999) and 1e-8 if not given; a class of `torch.optim`
      has its own defaults.
    - `state`: `"compact"` keeps the state of `"adamw"` and `"muon"` in 8 bits.
    - `max_norm`: bound of the norm of the whole gradient; 0 is no bound. With `"muon"`, of AdamW's part.
    - `update`: `"sync"` as a plain loop; `"async"` computes with weights that are one step old, and devices never wait.
    - `seed`: seed of the layers' random numbers.
    - `keep`: names of parts, as layers name them by `torchround.keeping.keep`, whose results stay in host memory from a
      layer's forward to its backward, in place of computing them twice.
    - `partition`: the stages, in place of those from measured costs. `device_memory_gib`: most memory of each device.

    Raises `PipelineUsageError` for what cannot work, `PipelineError` for a fault in a layer on its device.
    """

    def __init__(
        self,
        net: nn.Sequential,
        devices: int | Sequence[Device] = 2,
        optimizer: str | Callable[..., torch.optim.Optimizer] = "adamw",
        lr: float | None = None,
        weight_decay: float = 0.0,
        max_norm: float = 0.0,
        *,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        state: Literal["exact", "compact"] = "exact",
        no_decay: Collection[str] = (),
        update: str = "sync",
        seed: int = 0,
        keep: Collection[str] = (),
        partition: Partition | None = None,
        device_memory_gib: float | None = None,
        takes_over: bool = False,
    ) -> None:
        check_net(net)
        if update not in ("sync", "async"):
            raise PipelineUsageError(f'update = {update!r}; legal: "sync", "async"')
        self.lr = DEFAULT_LR if lr is None else lr
        for name, value in {"lr": self.lr, "weight_decay": weight_decay, "max_norm": max_norm}.items():
            check_number(name, value)
        parameters = dict(net.named_parameters(remove_duplicate=False))
        if unknown := sorted(set(no_decay) - parameters.keys()):
            raise PipelineUsageError(f"no_decay names {', '.join(unknown)}, which the net does not have")
        self._update, self._seed, self._max_norm = update, seed, max_norm
        self._given = self._partition = partition
        self._keep = tuple(keep)
        self._hardware, self._devices = _find_devices(devices, device_memory_gib)
        self._wrapped = wrap(net, no_decay)
        self._shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
        self._choice = choice = choose_optimizer(
            optimizer, self._wrapped, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, state=state
        )
        self._host = choice if isinstance(choice, HostOptimizer) else None
        predicts = not isinstance(choice, HostOptimizer) and choice.can_predict
        self.store = HostStore(
            self._wrapped.model,
            store_dtype(self._wrapped.dtypes.values()),
            policy=SYNC if update == "sync" else ASYNC_PREDICT if predicts else ASYNC,
            pinned=kind_of(self._hardware.kind).locks_pages,
            optimizer=NO_STATE if isinstance(choice, HostOptimizer) else make_optimizer(choice),
        )
        fill_store(self.store, self._wrapped, parameters)
        if self._host is not None:  # now, so that a scheduler can have it before the first batch
            self._host.bind(trained_weights(self.store))
        if takes_over:
            free_weights(net)
        self._engine: Engine | None = None
        self._is_for_training = False
        self._calls = self._forwards = 0
        self._last: StepResult | None = None
        self._open = self._is_closed = False  # open: a call's gradients wait for step()
        self._unread: list[StepResult] = []  # steps whose update has not been looked at
        self._host_parameters: dict[str, nn.Parameter] = {}

    # Training.

    def forward_backward(
        self,
        inputs: Any,
        labels: Any,
        loss_fn: LossFn,
        num_micro_batches: int = 3,
        lazy: bool = False,
    ) -> "float | PendingLoss":
        """Compute the loss of a batch and add its gradients to those of the calls since the last `step`.

        `inputs` go to the first layer; tensors of inputs and labels are cut along dimension 0 into `num_micro_batches`
        micro-batches. `loss_fn(outputs, labels)` returns the loss of one of them. The sum over them is returned: as a
        number, or at once as a `PendingLoss` if `lazy`.
        """
        check_loss(loss_fn)
        numbers = {"seed": self._seed, "call": self._calls}
        batches = cut(inputs, labels, num_micro_batches, loss_fn, is_training=True, **numbers)
        with self._guarded():
            engine = self._engine_for(batches)
            self._last = engine.forward_backward(batches, num_labels=1)
            self._calls += 1
            if self._open and self._calls == 2:  # no step() so far
                warnings.warn(
                    "two calls of forward_backward() and no step() of the Pipeline: their gradients add up, and no weight "
                    "has changed. An optimizer of its own on parameters() changes none; Pipeline(optimizer=..) takes it",
                    stacklevel=2,
                )
            self._open = True
            self._warn_of_skipped(keep=2)  # the engine has the updates of all steps before
            loss = PendingLoss(self._last)
            return loss if lazy else loss.value()

    def step(self, lr: float | None = None) -> None:
        """Update the weights with the gradients of all calls since the last step, which are then zero. Does not wait.

        `lr` is the rate of this step. Without it `adamw` takes `Pipeline.lr`, and an optimizer of `torch.optim` the rates of
        its own groups, which a scheduler may have changed.
        """
        if lr is not None:
            check_number("lr", lr)
        if self._engine is None or not self._open:
            raise EngineUsageError("step() needs a forward_backward() before it")
        with self._guarded():
            self._engine.step(self.lr if lr is None and self._host is None else lr)
            self._open = False
            assert self._last is not None, "a call came before the step"
            self._unread.append(self._last)

    def grad_norm(self) -> float:
        """Wait for the last step, and return the norm of its gradient before clipping."""
        if self._last is None or self._open:
            raise EngineUsageError("grad_norm() needs a step() before it")
        with self._guarded():
            return float(self._last.update().grad_norm)

    # Inference.

    def forward(self, inputs: Any, num_micro_batches: int = 3) -> Any:
        """Return the net's output in evaluation mode, without gradients, on the host.

        Micro-batches are joined in order along dimension 0, leaf by leaf. A tensor whose dimension 0 is not the number of
        samples comes as a list, one for each micro-batch.
        """
        numbers = {"seed": self._seed, "call": INFERENCE + self._forwards}
        batches = cut(inputs, None, num_micro_batches, None, is_training=False, **numbers)
        with self._guarded():
            engine = self._engine_for(batches)
            newest = engine.true_device_weights() if self._update == "async" else nullcontext()
            with newest:
                outputs = engine.forward(batches).outputs()
            self._forwards += 1
        return joined(outputs, [batch.samples for batch in batches])

    __call__ = forward

    # Weights.

    def weights(self) -> dict[str, Tensor]:
        """Copy the weights and buffers, with the names and dtypes of the plain net. Waits for all steps."""
        self._drain()
        state = weights_of(self.store, self._wrapped)
        return {name: state[name] for name in self._shapes}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Copy all that a new `Pipeline` with the same arguments needs to train on with the same bits. Waits for all steps.

        `"model"` holds `weights()`, `"optimizer"` everything else: its state, step, rate, loss scale, and the counts that random
        numbers depend on.
        """
        if self._open:
            raise EngineUsageError(
                "state_dict() was called between forward_backward() and step(); call weights()"
            )
        model, host = self.weights(), self.optimizer
        optimizer = {
            "step": self.store.step,
            "lr": self.lr,
            "calls": [self._calls, self._forwards],
            "resume": self.store.resume_state(),
            "tensors": {name: view.clone() for name, view in kept_views(self.store, self._wrapped).items()},
            "class": None if host is None else type(host).__qualname__,
            "torch": None if host is None else copy.deepcopy(host.state_dict()),
        }
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict()`; a plain net's state dict gives weights and buffers alone, and the rest stays.

        Raises `PipelineUsageError` if names, shapes or the optimizer differ, and then changes nothing.
        """
        if self._open:
            raise EngineUsageError("load_state_dict() was called between forward_backward() and step()")
        model, kept = state, None
        if state.keys() == {"model", "optimizer"}:
            model, kept = state["model"], state["optimizer"]
        check_same("the net's", self._shapes, {name: tuple(value.shape) for name, value in model.items()})
        host = self.optimizer
        views = {} if kept is None else kept_views(self.store, self._wrapped)
        if kept is not None:
            own = {"class": None if host is None else type(host).__qualname__, **described(views)}
            hint = 'of this optimizer (its weights alone: load_state_dict(state["model"]))'
            check_same(hint, own, {"class": kept["class"], **described(kept["tensors"])})
        self._end_engine()  # it counts steps, and its devices hold buffers
        fill_store(self.store, self._wrapped, model)
        for name, buffer in saved_buffers(self._wrapped):
            buffer.copy_(model[name])
        if kept is None:
            return
        for name, view in views.items():
            view.copy_(kept["tensors"][name])
        self.store.resume(kept["step"], **kept["resume"])
        self.lr, self._last = kept["lr"], None
        self._calls, self._forwards = kept["calls"]
        if host is not None:
            host.load_state_dict(copy.deepcopy(kept["torch"]))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and host weights, each tied one once, for reading between steps. The next step may change them."""
        self._drain()
        weights = self.store.weights()
        first_names: dict[str, str] = {}
        for name, stored in self._wrapped.stored.items():
            if first_names.setdefault(stored, name) == name:
                parameter = nn.Parameter(weights[stored], requires_grad=False)
                # Weights that are split have copied values, which must not outlive the step.
                known = {} if self.store.splits_weights else self._host_parameters
                yield name, known.setdefault(name, parameter)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the host weights, each tied one once."""
        for _, parameter in self.named_parameters():
            yield parameter

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The `torch.optim` object, for its state and its groups between steps; None for our own."""
        self._drain()
        return None if self._host is None or not self.store.trained else self._host.optimizer

    @property
    def partition(self) -> Partition | None:
        """The stages; None before the first batch if none were given."""
        return self._partition

    # Lifetime.

    def close(self) -> None:
        """Finish all steps and end the threads. The weights stay readable; no batch may follow."""
        self._is_closed = True
        self._end_engine()

    def __enter__(self) -> "Pipeline":  # noqa: PYI034  (typing.Self needs Python 3.11)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        elif self._engine is not None:
            self._is_closed = True
            self._engine.__exit__(kind, *rest)

    # Inside.

    def __getattr__(self, name: str) -> Any:
        """Raise an `AttributeError`, for calls of a plain loop with what takes their place."""
        helps = f"; {CALLS_OF_A_LOOP[name]}" if name in CALLS_OF_A_LOOP else ""
        raise AttributeError(f"a Pipeline has no {name}{helps}")

    def _engine_for(self, batches: Sequence[SampleBatch]) -> Engine:
        """Return the engine, after a probe with the first micro-batch if this is the first call of its kind."""
        if self._is_closed:
            raise EngineUsageError("the pipeline is closed; make a new one from its state_dict()")
        trains = batches[0].is_training
        if self._engine is not None and (self._is_for_training or not trains):
            return self._engine
        self._end_engine()
        model, keep = self._wrapped.model, self._keep if trains else ()
        # Copies, because a layer that changes its input must not change the caller's.
        copies = tuple(part.clone() for part in batches[0].parts)
        costs = probe(self._wrapped, self.store, replace(batches[0], parts=copies), keep)
        if missing := set(keep).difference(*(cost.kept for cost in costs)):
            raise PipelineUsageError(
                f"keep names {', '.join(missing)}, but no layer runs such a part by torchround.keeping.keep"
            )
        partition = self._given or cut_model(
            *(model, self.store, costs, batches), self._hardware, self._update
        )
        kept = tuple(cost.kept for cost in costs)
        self._engine = Engine(
            *(model, self.store, self._devices, partition),
            optimizer=self._choice,
            settings=EngineSettings(max_norm=self._max_norm, accumulates=True, kept=kept),
        )
        self._partition, self._is_for_training = partition, trains
        return self._engine

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Drop an engine that a fault has stopped, so that the next call starts another one if the weights are whole."""
        try:
            yield
        except PipelineError as error:
            if error.store_is_consistent:
                self._engine, self._open = None, False
            raise

    def _drain(self) -> None:
        if self._engine is not None:
            with self._guarded():
                self._engine.drain()
                self._warn_of_skipped()

    def _warn_of_skipped(self, keep: int = 0) -> None:
        """Warn of each step but the last `keep` whose update was left out. Their updates have ended."""
        while len(self._unread) > keep:
            result = self._unread.pop(0)
            if (update := result.update()).skipped:
                why = update.fault or "the gradient is not finite; the loss scale falls"
                logger.warning("the update of step %d was left out: %s", result.step + 1, why)

    def _end_engine(self) -> None:
        self._drain()
        engine, self._engine, self._open = self._engine, None, False
        if engine is not None:
            engine.close()


def _find_devices(devices: int | Sequence[Device], memory_gib: float | None) -> tuple[Hardware, list[Device]]:
    """Return the devices and what is known of them."""
    if isinstance(devices, int) and devices > 0:
        hardware = find_hardware(EngineTable(num_devices=devices, device_memory_gib=memory_gib))
        return hardware, hardware.make_devices()
    if isinstance(devices, Sequence) and devices and all(isinstance(device, Device) for device in devices):
        limit = None if memory_gib is None else int(memory_gib * GIB)
        return Hardware(devices[0].torch_device.type, len(devices), limit), list(devices)
    raise PipelineUsageError(
        f"devices = {devices!r}; give their number, from 1 on, and choose GPUs by the environment variable "
        "CUDA_VISIBLE_DEVICES (0,1 are the first two), or a list of Device objects"
    )
