"""Compiled layers: each kind of layer is compiled once, for all its layers, passes and devices.

Layers are of one kind if they are the same code: same classes, shapes and settings. A kind is compiled with
its parameters as inputs, so one piece of code serves every layer of the kind on every worker, wherever its
weights lie. Compilation waits for the first micro-batch of a new shape, because only then the shapes are
those that occur. Forward and backward are compiled together, one kind at a time, while no other thread runs a
layer (`LayerGate`).

Forward stages, recomputations and fused stages run the very same forward code. If each had its own, it would
round differently, and results would depend on the plan.
"""

import copy
import logging
import shutil
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchround import keeping
from torchround.accelerators import kind_of
from torchround.engine.board import LAYER_GATE, Board
from torchround.engine.compiled_shape import CompiledShape
from torchround.engine.worker.compute import LayerCall
from torchround.engine.worker.slots import FLAT, SINGLE, as_hidden, as_tuple, flatten
from torchround.layer import Batch, Hidden, LayeredModel, MicroBatch, runs_fused
from torchround.optim.kernel import cxx_compiler

logger = logging.getLogger(__name__)

POLL_S = 0.1
COMPILE_LIMIT_S = 1800.0  # a compilation that takes longer counts as a hang
COST = (
    "run uncompiled: equal except for rounding, but slower, because each elementwise step goes through memory"
)


class LayerCompiler:
    """The compiled kinds of one model. Successive engines may share it. `backend` is one of `torch.compile`'s.

    If compiling `is_required`, a device that runs out of memory meanwhile ends the run. Otherwise the layers run
    uncompiled then.
    """

    def __init__(self, model: LayeredModel, backend: str = "inductor", is_required: bool = True) -> None:
        self.is_required = is_required
        self.kinds: list[LayerKind] = []
        self._kind_of: list[LayerKind] = []
        self._backend = backend
        self._looking = threading.Lock()
        self._compiles: dict[str, bool] = {}  # by type of device: whether there is a compiler
        for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
            # Only the last layer may compute something else without gradients, so it
            # shares no code with the others.
            code = (index == len(model.layers) - 1, _structure(layer))
            kind = next((kind for kind in self.kinds if kind.code == code), None)
            if kind is None:
                kind = LayerKind(layer, code, code[0], backend, is_required)
                self.kinds.append(kind)
            kind.layer_names.append(name)
            self._kind_of.append(kind)

    def compiled(self, index: int, layer: nn.Module, board: Board) -> LayerCall:
        """Return layer `index` of the model, compiled, with the parameters that `layer` is bound to now."""
        kind = self._kind_of[index]
        parameters = [layer.get_parameter(path) for path in kind.paths]
        device = parameters[0].device.type if parameters else None
        if device is not None and (runs_fused(layer, device) or not self._compiles_for(device)):
            return layer
        if next(layer.buffers(), None) is not None:
            return layer  # compiled code takes parameters, which differ from layer to layer, and nothing else

        def call(hidden: Hidden | None, micro_batch: Batch) -> Hidden:
            if _is_compilable(hidden, micro_batch):
                assert isinstance(micro_batch, MicroBatch), "checked in the line above"
                if device is not None and runs_fused(layer, device, micro_batch.shape.numel()):
                    return layer(hidden, micro_batch)
                output = kind.run(parameters, hidden, micro_batch, board)
                if output is not None:
                    return output
            # A layer that cannot be compiled keeps nothing, and what a compiled run of it kept is of no use.
            keeping.whole_replay()
            with keeping.suspended():
                return layer(hidden, micro_batch)

        return call

    def _compiles_for(self, device: str) -> bool:
        """Return whether there is a compiler for this type of device. Warns once if not."""
        with self._looking:
            if device not in self._compiles:
                missing = _missing_compiler(device) if self._backend == "inductor" else None
                if missing is not None:
                    setting = _setting(self.is_required)
                    logger.warning("%s: no layer can be compiled (%s); they %s", setting, missing, COST)
                self._compiles[device] = missing is None
        return self._compiles[device]


class LayerKind:
    """Layers of the same code, and one `CompiledShape` for each shape, device and kind of call that has occurred."""

    def __init__(
        self, layer: nn.Module, code: object, is_last: bool, backend: str, is_required: bool
    ) -> None:
        self.code = code
        self.layer_names: list[str] = []
        named = list(layer.named_parameters(remove_duplicate=False))
        self.paths = [path for path, _ in named]
        self._trained = [parameter.requires_grad for _, parameter in named]
        self.shapes: dict[object, CompiledShape] = {}
        # A copy: `functional_call` replaces its parameters for a while, which the
        # caller's model must not show.
        self._prototype = copy.deepcopy(layer)
        self._is_last = is_last
        self._is_required = is_required
        self._backend = backend
        self._given_up = False

    def run(
        self, parameters: Sequence[Tensor], hidden: Hidden | None, micro_batch: MicroBatch, board: Board
    ) -> Hidden | None:
        """Return the layer's output, None if this kind cannot be compiled."""
        inputs = () if hidden is None else as_tuple(hidden)
        # Only the last layer may compute something else without gradients: the others share one code for
        # both, so that a forward and its recomputation give the same bits.
        differentiates = torch.is_grad_enabled() or not self._is_last
        documents = micro_batch.max_documents
        # A document alone may be as long as the sequence, which the code knows: its kernels take that as a number.
        longest = None if documents == 1 else micro_batch.longest_document
        key = (
            differentiates,
            documents if documents in (None, 1) else "several",
            longest is None,
            micro_batch.dropout_seed is None,
            isinstance(hidden, Tensor),
            *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs),
            micro_batch.tokens.shape,
            micro_batch.tokens.device,
        )
        # Numbers that change from batch to batch go in as tensors, so that no new
        # number is a new compilation.
        micro_batch = replace(
            micro_batch,
            dropout_seed=_as_data(micro_batch.dropout_seed),
            max_documents=documents if documents == 1 else _as_data(documents),
            longest_document=_as_data(longest),
            loss_factor=None,  # another number in each step, and of no use to compiled code
        )
        tensors = [*parameters, *inputs]
        shape = self.shapes.get(key)
        if shape is None and not self._given_up:
            with LAYER_GATE.closed(board):
                # Looked up again: another worker may have compiled it while this one waited.
                if key not in self.shapes and not self._given_up:
                    function = self._function(isinstance(hidden, Tensor))
                    wants = [differentiates and wanted for wanted in [*self._trained, *_floating(inputs)]]
                    self._compile(
                        key, CompiledShape(function, wants, self._backend), board, micro_batch, tensors
                    )
                shape = self.shapes.get(key)
        return None if shape is None else shape(micro_batch, tensors)

    def _compile(
        self,
        key: object,
        shape: CompiledShape,
        board: Board,
        micro_batch: MicroBatch,
        tensors: list[Tensor],
    ) -> None:
        """Compile by running once. If that fails, the kind runs uncompiled from now on.

        An error of the layer itself is raised again there.
        """
        try:
            # A compilation takes longer than the watchdog waits.
            with _counted_as_progress(board):
                shape.rehearse(micro_batch, tensors)
        except (MemoryError, torch.OutOfMemoryError) as error:
            if self._is_required:
                raise
            # The user did not ask for compiled layers, and uncompiled ones hold less memory at once.
            self._give_up(error)
        except Exception as error:  # noqa: BLE001  (compilers raise whatever they like)
            self._give_up(error)
        else:
            self.shapes[key] = shape

    def _function(self, single: bool) -> Callable[..., Hidden]:
        """Return the layer as a function of tensors, with a code object of its own.

        Dynamo limits the number of compilations for each code object, so shapes must not share one.
        """
        layer, paths = self._prototype, self.paths

        def run_layer(tensors: list[Tensor], integers: tuple[Tensor, ...], facts: dict[str, Any]) -> Hidden:
            values = dict(zip(paths, tensors[: len(paths)], strict=True))
            inputs = tensors[len(paths) :]
            hidden = as_hidden(inputs, single) if inputs else None
            return torch.func.functional_call(layer, values, (hidden, MicroBatch(*integers, **facts)))

        code = run_layer.__code__.replace(co_name=f"run_{type(layer).__name__}_{len(self.shapes)}")
        return types.FunctionType(code, run_layer.__globals__, code.co_name, None, run_layer.__closure__)

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        [first, *others] = self.layer_names
        names = f"{first} .. {others[-1]}" if others else first
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        logger.warning(
            "%s: %s cannot be compiled (%s: %s) and %s",
            _setting(self._is_required),
            names,
            type(error).__name__,
            reason[:300],
            COST,
        )


def _is_compilable(hidden: Hidden | None, batch: Batch) -> bool:
    """Tell whether compiled code takes this call: a training or scoring one of a model of ours."""
    if not isinstance(batch, MicroBatch) or batch.wants != "loss" or batch.cache is not None:
        return False
    return hidden is None or flatten(hidden)[1] in (SINGLE, FLAT)


def _setting(is_required: bool) -> str:
    """Return the setting that layers are compiled for, as the config says it."""
    return "engine.compile = true" if is_required else 'engine.compile = "auto"'


def _as_data(fact: int | Tensor | None) -> Tensor | None:
    """Return a number that changes from call to call as a tensor: as an int, each value would be compiled anew."""
    return None if fact is None else torch.tensor(fact)


def _floating(tensors: Sequence[Tensor]) -> list[bool]:
    return [tensor.is_floating_point() for tensor in tensors]


def _structure(layer: nn.Module) -> object:
    """Return a value that is equal for layers of the same code.

    It holds classes, settings, hooks, shapes, and which parameters are trained.
    """
    own = set(vars(nn.Module()))

    def settings(module: nn.Module) -> list[tuple[str, object]]:
        return [
            (name, value if _compares(value) else id(value))
            for name, value in sorted(vars(module).items())
            if name not in own
        ]

    def hooks(module: nn.Module) -> list[object]:
        return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]

    modules = [
        (path, type(module), settings(module), hooks(module), module.training)
        for path, module in layer.named_modules()
    ]
    parameters = [
        (path, parameter.shape, parameter.dtype, parameter.requires_grad)
        for path, parameter in layer.named_parameters(remove_duplicate=False)
    ]
    return modules, parameters


def _compares(value: object) -> bool:
    return not isinstance(value, Tensor) and type(value).__hash__ is not None


@contextmanager
def _counted_as_progress(board: Board) -> Iterator[None]:
    """Keep the watchdog quiet in the block, in which nothing is handed over for long."""
    done, deadline_s = threading.Event(), time.monotonic() + COMPILE_LIMIT_S

    def note_progress() -> None:
        while not done.wait(POLL_S) and time.monotonic() < deadline_s:
            board.note_progress()

    thread = threading.Thread(target=note_progress, name="torchround compiles a layer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _missing_compiler(device: str) -> str | None:
    """Return what Inductor lacks here, None if nothing: it writes C++ for a CPU, and Triton for most accelerators."""
    if device != "cpu":
        return kind_of(device).missing_compiler()
    if shutil.which(cxx_compiler()) is None:
        return f"there is no C++ compiler {cxx_compiler()!r}; set CXX to another"
    return None
