"""The cost of a borrowed layer, counted by running its own code on tensors without memory.

Shapes: B sequences, T tokens, D model width, S rows sorted by expert, E experts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchround.layer import LayerWork, MicroBatch, Products
from torchround.models.borrowed.shell import shared_tensors
from torchround.models.common.config import ModelConfigError

DTYPES = {2: torch.bfloat16, 4: torch.float32}
# What each row of a grouped product's matrices takes a multiple of.
ROW_BYTES = 16


def count_layer(
    layer: nn.Module, batch: int, tokens: int, element_bytes: int, width: int | None
) -> LayerWork:
    """Count one layer's work for `batch` sequences of `tokens` tokens.

    The forward and the backward run once. What the graph keeps between them is the layer's activation; the most that
    is alive beside it is its workspace. Without a `width` the layer is the first one, whose input is None.
    """
    dtype = DTYPES[element_bytes]
    positions = torch.arange(tokens, device="cpu").expand(batch, -1).contiguous()
    if tokens > 1:
        # Two documents in each sequence: a mask is then made and used, as for packed data.
        positions = torch.where(positions < tokens // 2, positions, positions - tokens // 2)
    with no_memory() as meter:
        tokens_ = torch.zeros((batch, tokens), dtype=torch.int64)
        micro_batch = MicroBatch(tokens_, tokens_, positions, tokens_, max_documents=2)
        parameters = fake_parameters(layer, dtype)
        hidden = (
            torch.empty((batch, tokens, width or 0), dtype=dtype).requires_grad_()
            if width is not None
            else None
        )
        return _count(layer, parameters, hidden, micro_batch, meter)


def _count(
    layer: nn.Module,
    parameters: dict[str, Tensor],
    hidden: Tensor | None,
    micro_batch: MicroBatch,
    meter: "Meter",
) -> LayerWork:
    for parameter in parameters.values():
        if parameter.requires_grad:  # as the engine binds it: gradients add up in fp32
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.empty(parameter.shape)
    before = meter.alive_bytes()
    with torch.no_grad():
        call_with(layer, parameters, hidden, micro_batch)
    # The arguments that the body makes for its blocks stay with the micro-batch.
    arguments = meter.alive_bytes() - before
    before, meter.flops = before + arguments, 0.0
    meter.peak_bytes = before
    lives_anyway = [*parameters.values(), *shared_tensors(micro_batch)]
    kept = _Kept({tensor.untyped_storage()._cdata for tensor in lives_anyway})
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        result = call_with(layer, parameters, hidden, micro_batch)
    forward_flops, output_bytes = meter.flops, result.nbytes
    if result.requires_grad:
        gradient = torch.empty_like(result)
        torch.autograd.backward(result, gradient)
    backward_flops = meter.flops - forward_flops
    scratch = max(0, meter.peak_bytes - before - kept.nbytes)
    # A product's two gradients cost a forward each; what is missing belongs to frozen weights.
    frozen_flops = min(forward_flops, max(0.0, 2 * forward_flops - backward_flops))
    # Most products of a layer with stacks of matrices are those of its experts. Weights of convolutions have a 1 in their shape.
    stacks = (parameter.ndim == 3 and 1 not in parameter.shape for parameter in parameters.values())
    kind = "grouped" if any(stacks) else "dense"
    return LayerWork(
        products=(Products(forward_flops, frozen_flops, kind),),
        activation_bytes=kept.nbytes,
        boundary_bytes=output_bytes,
        workspace_bytes=scratch + arguments,
    )


def count_logits(head: Any, num_tokens: int, element_bytes: int) -> tuple[float, int, int]:
    """Return the FLOPs of a head's logits, its vocabulary, and the width of the states that they are made from."""
    dtype = DTYPES[element_bytes]
    with no_memory() as meter, torch.no_grad():
        hidden = torch.empty((1, num_tokens, head.width), dtype=dtype)
        parameters = fake_parameters(head, dtype)
        states = call_with(_Method(head, "after_blocks"), _under("head", parameters), hidden)
        meter.flops = 0.0
        logits = call_with(_Method(head, "project"), _under("head", parameters), states)
        return meter.flops, logits.shape[-1], states.shape[-1]


class _Method(nn.Module):
    """A method of a module as its forward, so that it runs with other parameters."""

    def __init__(self, head: nn.Module, name: str) -> None:
        super().__init__()
        self.head, self.name = head, name

    def forward(self, *args: Any) -> Any:
        return getattr(self.head, self.name)(*args)


def _under(name: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{path}": tensor for path, tensor in parameters.items()}


class _Kept:
    """The memory that a graph keeps, each storage once. `excluded` are storages that live anyway."""

    def __init__(self, excluded: set[int]) -> None:
        self.nbytes = 0
        self._seen = excluded

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.nbytes += storage.nbytes()
        return tensor

    def unpack(self, tensor: Any) -> Tensor:
        assert isinstance(tensor, Tensor), "a kept tensor is handed back as it was"
        return tensor


class Meter(TorchDispatchMode):
    """Counts what a run without memory does.

    - `flops`: matrix products, a multiply-add being 2.
    - `peak_bytes`: the most bytes of tensors made inside that were alive at once.
    - `drawn`: names of operations that drew random numbers.
    """

    def __init__(self) -> None:
        # It imports Triton, if that is installed: only when something is counted.
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self._formulas = flop_registry
        self.flops = 0.0
        self.peak_bytes = 0
        self.drawn: list[str] = []
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bound = 0  # no less than what is alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args):
            self.drawn.append(str(func))
        packet = func._overloadpacket
        if packet is torch.ops.aten._grouped_mm:
            result, flops = _grouped_product(*args, **kwargs)
            self.flops += flops
        else:
            result = func(*args, **kwargs)
            if packet in self._formulas:
                self.flops += self._formulas[packet](*args, **kwargs, out_val=result)
            elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
                self.flops += _attention_flops(*args[:3])
            elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
                self.flops += 2 * _attention_flops(*args[1:4])
        self._count(result)
        return result

    def alive_bytes(self) -> int:
        """Return the bytes of tensors made inside that are alive."""
        for key, (storage, _) in list(self._alive.items()):
            if storage.expired():
                del self._alive[key]
        self._bound = sum(size for _, size in self._alive.values())
        return self._bound

    def _count(self, result: Any) -> None:
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                known = self._alive.get(reference.cdata)
                if known is None or known[0].expired():
                    self._alive[reference.cdata] = (reference, storage.nbytes())
                    self._bound += storage.nbytes()
        # Looking for tensors that are gone takes time: only if it could matter.
        if self._bound > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.alive_bytes())


@contextmanager
def no_memory() -> Iterator[Meter]:
    """Make every new tensor one without memory, and count. Tensors that exist may take part."""
    with FakeTensorMode(allow_non_fake_inputs=True), Meter() as meter:
        yield meter


def fake_parameters(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a leaf without memory for each parameter, in `dtype`, trained if the parameter is. Inside `no_memory`."""
    return {
        name: torch.empty(parameter.shape, dtype=dtype).requires_grad_(parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }


def call_with(module: nn.Module, parameters: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call `module` with other parameters."""
    return functional_call(module, dict(parameters), args, kwargs)


def _check_grouped(*operands: Tensor) -> None:
    """Raise `ModelConfigError` for matrices that PyTorch's grouped product does not take, on any device."""
    for tensor in operands:
        width = max(tensor.stride()[-2:])
        if width * tensor.element_size() % ROW_BYTES:
            raise ModelConfigError(
                f"its experts multiply matrices with rows of {width} numbers, {width * tensor.element_size()} bytes in "
                f"{tensor.dtype}; PyTorch's grouped product takes only rows of a multiple of {ROW_BYTES} bytes"
            )


def _grouped_product(one: Tensor, other: Tensor, *_: Any, **__: Any) -> tuple[Tensor, float]:
    _check_grouped(one, other)
    # PyTorch's own shapes for this product know bf16 alone; its kernels on the CPU know fp32 too.
    rows, inner, columns = one.shape[-2], one.shape[-1], other.shape[-1]
    if one.ndim == 2 and other.ndim == 2:  # gradients of the experts' weights: [I, S] and [S, Z] to [E, I, Z]
        offsets = _[0] if _ else __["offs"]
        return one.new_empty((offsets.shape[0], rows, columns)), 2.0 * rows * inner * columns
    return one.new_empty((rows, columns)), 2.0 * rows * inner * columns


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> float:
    batch, heads, length, width = query.shape
    return 2.0 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _draws(func: Any, args: tuple[Any, ...]) -> bool:
    # Attention has the tag for its dropout, and takes the probability as a number.
    places = [index for index, item in enumerate(func._schema.arguments) if item.name == "dropout_p"]
    return not places or any(args[index] for index in places if index < len(args))
