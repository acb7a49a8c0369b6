"""The cost of a borrowed layer, counted by running its own code on tensors without memory.

Shapes: B sequences, T tokens, D model width, S rows sorted by expert, E experts.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from torchround.keeping import KeptActivationError, current_part, recording, replaying
from torchround.layer import KEEPABLE, KeptWork, LayerWork, MicroBatch, Products
from torchround.models.borrowed.shell import shared_tensors
from torchround.models.common.config import ModelConfigError
from torchround.models.common.packed_attention import backward_scratch_bytes

DTYPES = {2: torch.bfloat16, 4: torch.float32}
# What each row of a grouped product's matrices takes a multiple of.
ROW_BYTES = 16


def count_layer(
    layer: nn.Module, batch: int, tokens: int, element_bytes: int, width: int | None, wants: str = "loss"
) -> LayerWork:
    """Count one layer's work for `batch` sequences of `tokens` tokens.

    The forward and the backward run once. What the graph keeps between them is the layer's activation; the most that
    is alive beside it is its workspace. Without a `width` the layer is the first one, whose input is None. `wants` as in
    `MicroBatch`.
    """
    dtype = DTYPES[element_bytes]
    positions = torch.arange(tokens, device="cpu").expand(batch, -1).contiguous()
    if tokens > 1:
        # Two documents in each sequence: a mask is then made and used, as for packed data.
        positions = torch.where(positions < tokens // 2, positions, positions - tokens // 2)
    with no_memory() as meter:
        ids = torch.zeros((batch, tokens), dtype=torch.int64)
        micro_batch = MicroBatch(ids, ids, positions, ids, max_documents=2, wants=wants)
        parameters = fake_parameters(layer, dtype)
        for parameter in parameters.values():
            if parameter.requires_grad:  # as the engine binds it: gradients add up in fp32
                parameter.grad_dtype = torch.float32
                parameter.grad = torch.empty(parameter.shape)
        hidden = None
        if width is not None:
            hidden = torch.empty((batch, tokens, width), dtype=dtype).requires_grad_()
        before = meter.alive_bytes
        with torch.no_grad():
            functional_call(layer, parameters, (hidden, micro_batch))
        # The arguments that the body makes for its blocks stay with the micro-batch.
        arguments = meter.alive_bytes - before
        meter.flops, meter.peak_bytes = 0.0, meter.alive_bytes
        # The memory that the graph keeps, each storage once, without what is alive anyway.
        anyway = {
            one.untyped_storage()._cdata for one in (*parameters.values(), *shared_tensors(micro_batch))
        }
        # Some are free again before the forward ends, and others may then have their addresses.
        kept: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in anyway:
                kept[storage] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = functional_call(layer, parameters, (hidden, micro_batch))
        kept_bytes = sum(kept.values())
        forward_flops, output_bytes = meter.flops, result.nbytes
        if result.requires_grad:
            torch.autograd.backward(result, torch.empty_like(result))
        backward_flops = meter.flops - forward_flops
        scratch = max(0, meter.peak_bytes - before - arguments - kept_bytes)
        # A block that runs document by document keeps other tensors for other documents.
        parts = () if getattr(layer, "alone", True) else _parts(layer, parameters, hidden, micro_batch, meter)
    # A product's two gradients cost a forward each; what is missing belongs to frozen weights.
    frozen_flops = min(forward_flops, max(0.0, 2 * forward_flops - backward_flops))
    # Most products of a layer with stacks of matrices are those of its experts. Weights of convolutions have a 1 in their shape.
    stacks = (parameter.ndim == 3 and 1 not in parameter.shape for parameter in parameters.values())
    return LayerWork(
        products=(Products(forward_flops, frozen_flops, "grouped" if any(stacks) else "dense"),),
        activation_bytes=kept_bytes,
        boundary_bytes=output_bytes,
        workspace_bytes=scratch + arguments,
        keepable=parts,
    )


def extrapolate(counted: Sequence[LayerWork], lengths: Sequence[int], tokens: int) -> LayerWork:
    """Find the work of `tokens` by the polynomial through the works of three `lengths`: costs grow with T and T^2."""
    shares = [
        math.prod((tokens - other) / (length - other) for other in lengths if other != length)
        for length in lengths
    ]

    def at(values: Iterable[float]) -> float:
        return max(0.0, sum(share * value for share, value in zip(shares, values, strict=True)))

    products = [work.products[0] for work in counted]
    flops, frozen = at(one.flops for one in products), at(one.frozen_flops for one in products)
    # A peak moves from one operation to another, so it is at least in proportion too.
    least = counted[-1].workspace_bytes * tokens / lengths[-1]
    return LayerWork(
        products=(Products(flops, min(flops, frozen), products[-1].kind),),
        activation_bytes=math.ceil(at(work.activation_bytes for work in counted)),
        boundary_bytes=math.ceil(at(work.boundary_bytes for work in counted)),
        workspace_bytes=math.ceil(max(at(work.workspace_bytes for work in counted), least)),
    )


def _parts(
    layer: nn.Module, parameters: dict[str, Tensor], hidden: Any, micro_batch: MicroBatch, meter: "Meter"
) -> tuple[KeptWork, ...]:
    """Count the parts of a layer whose results can be kept, in the order in which they run."""
    meter.part_flops.clear()
    try:
        with torch.no_grad(), recording(KEEPABLE) as record:
            functional_call(layer, parameters, (hidden, micro_batch))
    except KeptActivationError:  # the block writes into them
        return ()
    flops, grouped = dict(meter.part_flops), set(meter.grouped_parts)
    read = set()

    def note(tensor: Tensor) -> Tensor:
        read.add(tensor.untyped_storage()._cdata)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        replaying(KEEPABLE, record.tensors),
    ):
        functional_call(layer, parameters, (hidden, micro_batch))
    found = []
    for name in dict.fromkeys(record.parts):
        tensors = [one for one, part in zip(record.tensors, record.parts, strict=True) if part == name]
        saved = sum(one.nbytes for one in tensors if one.untyped_storage()._cdata in read)
        sizes, kind = [one.nbytes for one in tensors], "grouped" if name in grouped else "dense"
        found.append(KeptWork.of(name, sizes, flops.get(name, 0.0), saved, kind))
    return tuple(found)


class Meter(TorchDispatchMode):
    """Counts what a run without memory does.

    - `flops`: matrix products, a multiply-add being 2.
    - `alive_bytes`: bytes of tensors made inside that are alive; `peak_bytes`: the most of them at once.
    - `drawn`: whether an operation drew random numbers.
    """

    def __init__(self) -> None:
        # It imports Triton, if that is installed: only when something is counted.
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self._formulas = flop_registry
        self.flops = 0.0
        self.alive_bytes = self.peak_bytes = 0
        self.drawn = False
        # Of parts whose results can be kept.
        self.part_flops: defaultdict[str, float] = defaultdict(float)
        self.grouped_parts: set[str] = set()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args):
            self.drawn = True
        packet, name, flops = func._overloadpacket, func._schema.name, 0.0
        if packet is torch.ops.aten._grouped_mm:
            result, flops = _grouped_product(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            if name in _FORMULAS:
                flops = _FORMULAS[name](*args)
            elif packet in self._formulas:
                flops = self._formulas[packet](*args, **kwargs, out_val=result)
        self.flops += flops
        self.part_flops[current_part()] += flops
        if flops and "grouped" in name:
            self.grouped_parts.add(current_part())
        scratch = 0
        if name == "aten::_flash_attention_backward":
            _, query, key, *others = args
            longest, (rows, heads, channels) = others[5], query.shape
            scratch = backward_scratch_bytes(max(1, rows // longest), longest, heads, key.shape[1], channels)
        elif name == "aten::sum" and kwargs.get("dtype", args[0].dtype) != args[0].dtype:
            # The CPU casts all terms first.
            scratch = args[0].numel() * kwargs["dtype"].itemsize + result.nbytes
        elif name.startswith("torchround::grouped_product"):  # a loop over experts, whose results are joined
            scratch = 2 * result.nbytes
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes + scratch)
        self._count(result)
        return result

    def _count(self, result: Any) -> None:
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.alive_bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)

    def _free(self, nbytes: int) -> None:
        self.alive_bytes -= nbytes


@contextmanager
def no_memory() -> Iterator[Meter]:
    """Make every new tensor one without memory, and count. Tensors that exist may take part."""
    with FakeTensorMode(allow_non_fake_inputs=True), Meter() as meter:
        yield meter


def fake_parameters(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make a leaf without memory for each parameter, in `dtype`, trained if the parameter is. Inside `no_memory`."""
    return {
        name: torch.empty(parameter.shape, dtype=dtype).requires_grad_(parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }


def call_without_memory(module: nn.Module, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Call a module with parameters that have no memory. Inside `no_memory`."""
    with torch.no_grad():
        return functional_call(module, fake_parameters(module, dtype), args, kwargs)


def _grouped_product(
    one: Tensor, other: Tensor, offs: Tensor | None = None, *_: Any, **__: Any
) -> tuple[Tensor, float]:
    """Make the result, and count the FLOPs. PyTorch's own shapes for this product may know bf16 alone.

    Raises `ModelConfigError` for matrices that the product does not take on any device.
    """
    for tensor in (one, other):
        width = max(tensor.stride()[-2:])
        if width * tensor.element_size() % ROW_BYTES:
            raise ModelConfigError(
                f"its experts multiply matrices with rows of {width} numbers, {width * tensor.element_size()} bytes in "
                f"{tensor.dtype}; PyTorch's grouped product takes only rows of a multiple of {ROW_BYTES} bytes"
            )
    rows, inner, columns = one.shape[-2], one.shape[-1], other.shape[-1]
    shape: tuple[int, ...] = (rows, columns)
    if one.ndim == other.ndim == 2:  # gradients of the experts' weights: [I, S] and [S, Z] to [E, I, Z]
        assert offs is not None, "the rows of each expert end at an offset"
        shape = (len(offs), rows, columns)
    return one.new_empty(shape), 2.0 * rows * inner * columns


def _draws(func: Any, args: tuple[Any, ...]) -> bool:
    # Attention has the tag for its dropout, and takes the probability as a number.
    places = [index for index, item in enumerate(func._schema.arguments) if item.name == "dropout_p"]
    return not places or any(args[index] for index in places if index < len(args))


# Of attention all pairs of each sequence's tokens count, as in our own families: of sequences as long as the longest.
_FORMULAS: Mapping[str, Callable[..., float]] = {
    "torchround::grouped_rows": lambda rows, weights, *_: 2.0 * rows.numel() * weights.shape[2],
    "torchround::grouped_product": lambda rows, weights, *_: 2.0 * rows.numel() * weights.shape[2],
    "torchround::grouped_gradient_": lambda rows, grad, *_: 2.0 * rows.numel() * grad.shape[1],
    "torchround::grouped_product_gradient": lambda rows, grad, *_: 2.0 * rows.numel() * grad.shape[1],
    "aten::_flash_attention_forward": lambda query, *others: 4.0 * query.numel() * others[4],
    "aten::_flash_attention_backward": lambda grad, query, *others: 8.0 * query.numel() * others[6],
}
