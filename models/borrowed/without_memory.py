"""Runs of a module's own code on tensors without memory, which count operations and bytes.

Shapes: S rows sorted by expert, E experts.
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

from torchround.models.common.config import ModelConfigError

# What each row of a grouped product's matrices takes a multiple of.
ROW_BYTES = 16


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
