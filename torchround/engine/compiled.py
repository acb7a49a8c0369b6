"""Compiled layers: each kind of layer is compiled once, for all its layers, passes and devices.

Layers are of one kind if they are the same code: same classes, shapes and settings. A kind is compiled with its
parameters as inputs, so one piece of code serves every layer of the kind on every worker. Compilation waits for the first
micro-batch of a new shape, because only then the shapes are those that occur. Forward and backward are compiled together,
one kind at a time, while no other thread runs a layer (`LayerGate`).

Forward stages, recomputations and fused stages run the very same forward code. If each had its own, it would
round differently, and results would depend on the plan.

A compiled layer keeps everything that its compiled forward returns, or nothing: its output, and all tensors that its
compiled backward reads. The same backward reads them, whichever call made them. Returned inputs, such as weights, and
views of them stay where they are. Others may share memory, which is kept once.
"""

import copy
import functools
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchround import keeping
from torchround.engine.board import LAYER_GATE, Board
from torchround.engine.errors import DeviceMemoryError, EngineUsageError
from torchround.engine.worker.compute import LayerCall
from torchround.engine.worker.slots import FLAT, SINGLE, flatten
from torchround.layer import KEEPABLE, Batch, Hidden, LayeredModel, MicroBatch, has_code, may_compile

logger = logging.getLogger(__name__)


class LayerCompiler:
    """The compiled kinds of one model. Successive engines may share it.

    `backend` is one of `torch.compile`'s, `options` are Inductor's. Raises `EngineUsageError` for options that it lacks.
    """

    def __init__(
        self, model: LayeredModel, backend: str = "inductor", options: Mapping[str, Any] | None = None
    ) -> None:
        self.backend, self.options = backend, dict(options or {})
        try:
            if options:
                torch.compile(lambda: None, backend=backend, options=self.options)  # compiles nothing yet
        except RuntimeError as error:
            # PyTorch lists all options that it knows, which are hundreds.
            raise EngineUsageError(f"engine.compile_options: {str(error).partition(', known')[0]}") from error
        self.kinds: list[LayerKind] = []
        self._kind_of: list[LayerKind] = []
        for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
            # Only the last layer may compute something else without gradients, so it shares no code with the others.
            module: nn.Module = layer.code() if has_code(layer) else layer  # type: ignore[operator]
            code = index == len(model.layers) - 1, _structure(module)
            kind = next((kind for kind in self.kinds if kind.code == code), None)
            if kind is None:
                kind = LayerKind(self, module, code)
                self.kinds.append(kind)
            kind.layer_names.append(name)
            self._kind_of.append(kind)

    def compiled(self, index: int, layer: nn.Module, board: Board) -> LayerCall:
        """Compile layer `index` of the model, with the parameters that `layer` is bound to now."""
        kind = self._kind_of[index]
        parameters = [layer.get_parameter(path) for path in kind.paths]
        # Compiled code takes parameters, which differ from layer to layer, and nothing else.
        if not may_compile(layer) or kind.has_buffers:
            return layer

        def call(hidden: Hidden | None, micro_batch: Batch) -> Hidden:
            # A training or scoring call of a model of ours.
            if (
                isinstance(micro_batch, MicroBatch)
                and micro_batch.wants == "loss"
                and micro_batch.cache is None
                and (hidden is None or flatten(hidden)[1] in (SINGLE, FLAT))
            ):
                if not may_compile(layer, micro_batch.shape.numel()):
                    return layer(hidden, micro_batch)
                inputs: Hidden = hidden
                if has_code(layer):
                    inputs = layer.code_inputs(hidden, micro_batch)  # type: ignore[operator]
                output = kind.run(parameters, inputs, micro_batch, board)
                if output is not None:
                    return output
            # A layer that cannot be compiled keeps nothing, and what a compiled run of it kept is of no use.
            keeping.whole_replay()
            with keeping.suspended():
                return layer(hidden, micro_batch)

        return call


class LayerKind:
    """Layers of the same code, and one `CompiledShape` for each shape, device and kind of call that has occurred."""

    def __init__(self, compiler: LayerCompiler, layer: nn.Module, code: tuple[bool, object]) -> None:
        self.code = code
        self.layer_names: list[str] = []
        named = list(layer.named_parameters(remove_duplicate=False))
        self.paths = [path for path, _ in named]
        self.shapes: dict[object, CompiledShape] = {}
        self._compiler = compiler
        self._trained = [parameter.requires_grad for _, parameter in named]
        # A copy: `functional_call` replaces its parameters for a while, which the caller's model must not show.
        self._prototype = copy.deepcopy(layer)
        self._failed: set[object] = set()  # shapes that cannot be compiled, on any device
        self.has_buffers = next(layer.buffers(), None) is not None
        # How many of the inputs get gradients; None means each that is floating.
        self._differentiable: int | None = getattr(layer, "differentiable", None)

    def run(
        self, parameters: Sequence[Tensor], hidden: Hidden | None, micro_batch: MicroBatch, board: Board
    ) -> Hidden | None:
        inputs = () if hidden is None else flatten(hidden)[0]
        # Except for the last layer, one code for both, so that a forward and its recomputation give the same bits.
        differentiates = torch.is_grad_enabled() or not self.code[0]
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
        # Numbers that change from batch to batch go in as tensors, so that no new number is a new compilation.
        micro_batch = replace(
            micro_batch,
            dropout_seed=_as_data(micro_batch.dropout_seed),
            max_documents=documents if documents == 1 else _as_data(documents),
            longest_document=_as_data(longest),
            loss_factor=None,  # another number in each step, and of no use to compiled code
        )
        tensors = [*parameters, *inputs]
        if key not in self.shapes and key[:-1] not in self._failed:
            with LAYER_GATE.closed(board):
                # Looked up again: another worker may have compiled it while this one waited.
                if key not in self.shapes and key[:-1] not in self._failed:
                    function = self._function(isinstance(hidden, Tensor))
                    floating = [tensor.is_floating_point() for tensor in inputs[: self._differentiable]]
                    floating += [False] * (len(inputs) - len(floating))
                    wants = [differentiates and wanted for wanted in [*self._trained, *floating]]
                    new = CompiledShape(function, wants, self._compiler)
                    self._compile(key, new, micro_batch, tensors)
        shape = self.shapes.get(key)
        return None if shape is None else shape(micro_batch, tensors)

    def _compile(
        self, key: tuple[object, ...], shape: "CompiledShape", micro_batch: MicroBatch, tensors: list[Tensor]
    ) -> None:
        """Compile by running once. If that fails, this shape runs uncompiled on all devices, and raises errors of its own there.

        Raises `DeviceMemoryError` if memory lacks: compiled code rounds in another way, and what is free depends on the plan.
        """
        [first, *others] = self.layer_names
        names = f"{first} .. {others[-1]}" if others else first
        try:
            shape.rehearse(micro_batch, tensors)
            self.shapes[key] = shape
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            found = f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"
            if _lacks_memory(error):
                raise DeviceMemoryError(
                    f"engine.compile: no memory to compile {names} ({found}). Free memory there, lower "
                    "engine.device_memory_gib or training.micro_batch_size, or set engine.compile = false"
                ) from error
            if not self._failed:
                logger.warning(
                    "engine.compile: %s cannot be compiled (%s) and run uncompiled: equal except for rounding, but slower, "
                    "because each elementwise step goes through memory",
                    *(names, found),
                )
            self._failed.add(key[:-1])  # all but the device

    def _function(self, single: bool) -> Callable[..., Hidden]:
        """Make a function of tensors of the layer. Dynamo limits the compilations of a code object, so each has its own."""
        layer, paths = self._prototype, self.paths

        def run_layer(tensors: list[Tensor], integers: tuple[Tensor, ...], facts: dict[str, Any]) -> Hidden:
            values = dict(zip(paths, tensors[: len(paths)], strict=True))
            inputs = tensors[len(paths) :]
            hidden = (inputs[0] if single else tuple(inputs)) if inputs else None
            return torch.func.functional_call(layer, values, (hidden, MicroBatch(*integers, **facts)))

        code = run_layer.__code__.replace(co_name=f"run_{type(layer).__name__}_{len(self.shapes)}")
        return types.FunctionType(code, run_layer.__globals__, code.co_name, None, run_layer.__closure__)


class CompiledShape:
    """A kind compiled for one shape. `wants` says which parameters and inputs get gradients."""

    def __init__(
        self, function: Callable[..., Hidden], wants: Sequence[bool], compiler: LayerCompiler
    ) -> None:
        options: dict[str, Any] | None = None
        if compiler.backend == "inductor":
            # Equal runs give equal bits: Inductor does not choose by measured times how sums add up. On virtual devices it
            # would split sums by the number of threads of the thread that compiles.
            options = {"deterministic": True, "cpp.threads": 1} | compiler.options
        self._compiled = torch.compile(
            function, fullgraph=True, dynamic=False, backend=compiler.backend, options=options
        )
        self._wants = wants

    def __call__(self, micro_batch: MicroBatch, tensors: list[Tensor]) -> Hidden:
        outputs = _Run.apply(self, micro_batch, *tensors)
        return outputs[0] if self._single else outputs

    def rehearse(self, micro_batch: MicroBatch, tensors: list[Tensor]) -> None:
        """Run forward and backward once, so that both are compiled, and drop the results."""
        # A recording under way must not get the tensors of a rehearsal.
        with keeping.suspended():
            inner, outputs = self.forward(micro_batch, tensors)
            if _put_in_front(outputs):
                # Once more, so that the new part sees what the code returns: the first call may be one that replays.
                del inner, outputs
                inner, outputs = self.forward(micro_batch, tensors)
            self.backward(inner, outputs, [torch.zeros_like(output) for output in outputs])

    def forward(
        self, micro_batch: MicroBatch, tensors: Sequence[Tensor]
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Compute the outputs from leaves in the place of `tensors`. Returns both."""
        pairs = zip(tensors, self._wants, strict=True)
        inner = [tensor.detach().requires_grad_(wanted) for tensor, wanted in pairs]
        with torch.set_grad_enabled(any(self._wants)):
            output = self._compiled(inner, micro_batch.tensors(), micro_batch.facts())
        outputs, structure = flatten(output)
        if structure not in (SINGLE, FLAT):
            raise TypeError("it returns a nested value; compiled code returns a tensor or a tuple of tensors")
        self._single = structure is SINGLE
        return inner, outputs

    def backward(
        self, inner: Sequence[Tensor], outputs: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> list[Tensor | None]:
        pairs = [
            (output, grad) for output, grad in zip(outputs, gradients, strict=True) if output.requires_grad
        ]
        wanted = [leaf for leaf in inner if leaf.requires_grad]
        if not pairs or not wanted:
            return [None] * len(inner)
        differentiated, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(differentiated, wanted, given, allow_unused=True))
        return [next(found) if leaf.requires_grad else None for leaf in inner]


class _Run(torch.autograd.Function):
    """The step from the caller's graph, whose leaves may hold gradients already, into compiled code and back."""

    @staticmethod
    def forward(
        ctx: Any, shape: CompiledShape, micro_batch: MicroBatch, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inner, outputs = shape.forward(micro_batch, tensors)
        ctx.shape, ctx.inner, ctx.outputs = shape, inner, outputs
        ctx.totals = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
        found = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(output for output in found if not output.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inner, outputs, totals = ctx.inner, ctx.outputs, ctx.totals
        ctx.inner = ctx.outputs = ctx.totals = None  # the activations that they keep are of no more use
        found = ctx.shape.backward(inner, outputs, grads)
        return None, None, *(_added(grad, total) for grad, total in zip(found, totals, strict=True))


def _added(grad: Tensor | None, total: Tensor | None) -> Tensor | None:
    """Add a gradient to the sum of another number format that its leaf holds, and return what is left for autograd.

    Autograd would cast the gradient in a pass of its own. The sum has the same bits: the cast is exact.
    """
    if grad is None or total is None or total.dtype == grad.dtype or total.dtype != torch.float32:
        return grad
    total.add_(grad)
    return None


class ReturnedTensor(NamedTuple):
    """A returned tensor from element `offset` of `source`: an input, or after all inputs, a piece of kept memory."""

    source: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view_of(self, source: Tensor) -> Tensor:
        if source.dtype != self.dtype:
            size = self.dtype.itemsize
            source = source[: source.nbytes // size * size].view(self.dtype)
        elif source.shape == self.shape and source.stride() == self.stride:
            return source
        return source.as_strided(self.shape, self.stride, source.storage_offset() + self.offset)


class KeptForward:
    """A part in front of the code of a compiled forward, which can record what the code returns and return it again."""

    def __init__(self, code: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._code = code
        # From the second call of the rehearsal on: a `ReturnedTensor` for each returned tensor, the value itself for
        # everything else, and the bytes of the pieces of kept memory. The same for each call, because the code is.
        self._form: tuple[list[Any], list[int]] | None = None
        self._boxed_call = True  # PyTorch then gives the inputs as one list, which the code may empty

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the code, or return its kept results in a replay. Raises `KeptActivationError` for memory of other sizes."""
        record, memory = keeping.whole_record(KEEPABLE), keeping.whole_replay()
        if memory:
            assert self._form is not None, "the rehearsal comes first, and does not replay"
            values, sizes = self._form
            if (found := [piece.nbytes for piece in memory]) != sizes:
                raise keeping.KeptActivationError(
                    f"a compiled layer got kept tensors of {found} bytes; its code returns {sizes}"
                )
            sources = [*inputs, *memory]
            return [v.view_of(sources[v.source]) if isinstance(v, ReturnedTensor) else v for v in values]
        if record is None and self._form is not None:
            return self._code(inputs)
        given = list(inputs)
        returned = self._code(inputs)
        values, pieces = _split(given, returned)
        form = values, [piece.nbytes for piece in pieces]
        if self._form is None:
            self._form = form
        # Other values than before are not kept; then the layer is recomputed, which is right in any case.
        elif record is not None and form == self._form:
            record.tensors.extend(pieces)
        return returned


def _put_in_front(outputs: Sequence[Tensor]) -> bool:
    """Put a `KeptForward` in front of the compiled code that made these outputs, unless it is there. Returns whether it does.

    The code is an attribute of the autograd function that PyTorch made for it. A compiler without one keeps nothing.
    """
    for output in outputs:
        function = getattr(type(output.grad_fn), "_forward_cls", None)
        code = getattr(function, "compiled_fw", None)
        if code is not None and not isinstance(code, KeptForward):
            setattr(function, "compiled_fw", KeptForward(code))  # noqa: B010  (unknown to the type checker)
            return True
    return False


def _split(inputs: Sequence[Any], returned: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Describe returned values as `KeptForward` rebuilds them, and find the memory for that: flat uint8 tensors."""
    # By addresses and not by storages: the storage of each weight is the slot that holds the whole stage.
    places = [_place(value) if isinstance(value, Tensor) else (0, 0) for value in inputs]
    pieces: dict[int, Tensor] = {}  # by the address where a storage begins
    values: list[Any] = []
    for value in returned:
        if not isinstance(value, Tensor):
            values.append(value)
            continue
        start, stop = _place(value)
        for source, (begin, end) in enumerate(places):
            if begin <= start < stop <= end and inputs[source].dtype == value.dtype:
                break
        else:
            begin = value.untyped_storage().data_ptr()
            if begin not in pieces or pieces[begin].nbytes < stop - begin:
                numel = (stop - begin) // value.itemsize
                pieces[begin] = value.detach().as_strided((numel,), (1,), 0).view(torch.uint8)
            source = len(inputs) + list(pieces).index(begin)
        offset = (start - begin) // value.itemsize
        values.append(ReturnedTensor(source, value.dtype, value.shape, value.stride(), offset))
    return values, list(pieces.values())


def _place(tensor: Tensor) -> tuple[int, int]:
    """Find the address of a tensor's first byte, and the one behind its last byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize * bool(tensor.numel())


def _lacks_memory(error: BaseException | None) -> bool:
    """Tell whether an error or one of its causes is a lack of memory. Compilers wrap what they meet."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _as_data(fact: int | Tensor | None) -> Tensor | None:
    return None if fact is None else torch.tensor(fact)


def _structure(layer: nn.Module) -> object:
    """Describe what the code of a layer depends on: classes, settings, hooks, shapes, and what is trained."""
    own = set(vars(nn.Module()))
    modules = []
    for path, module in layer.named_modules():
        settings = [
            (name, _comparable(value)) for name, value in sorted(vars(module).items()) if name not in own
        ]
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        modules.append((path, type(module), settings, hooks, module.training))
    parameters = [
        (path, parameter.shape, parameter.dtype, parameter.requires_grad)
        for path, parameter in layer.named_parameters(remove_duplicate=False)
    ]
    return modules, parameters


def _comparable(value: object) -> object:
    """Describe a setting. What cannot be compared is equal to itself alone, as would be a function with arguments."""
    if isinstance(value, Tensor) or type(value).__hash__ is None:
        return id(value)
    if isinstance(value, functools.partial):
        return value.func, value.args, tuple(sorted(value.keywords.items()))
    return value
