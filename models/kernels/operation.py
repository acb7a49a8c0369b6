"""How a fused operation is defined, and when layers use it.

Each is `torch.ops.torchround.NAME`: whatever counts or records the operations of a model sees one launch. A kind of
accelerator with Triton runs a kernel from a file `*_triton`, which only its first call imports. Every other kind runs
the reference beside the operation. On `meta` an operation only makes results of the right shapes.

Layers use them on accelerators. On the CPU they run their own plain code, and so they do under a compiler, which fuses
by itself.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchround.accelerators import has_triton, is_accelerator

LIBRARY = torch.library.Library("torchround", "FRAGMENT")

Function = TypeVar("Function", bound=Callable[..., Any])


# fp32 tensors of its result's size that a gated product's backward holds at once if plain PyTorch computes it, measured
# on the simulated accelerator (tests/accelerator/test_planned_scratch.py).
PLAIN_BUFFERS = 9


def operation(schema: str, shapes: Callable[..., Any]) -> Callable[[Function], Function]:
    """Define `torch.ops.torchround.NAME`, which the decorated function computes on every kind of device.

    `schema` is PyTorch's text for name, arguments and results. `shapes` makes the results on `meta`.
    `torch.library.custom_op` would check each call in Python; that costs more than the launch of a kernel.
    """

    def define(function: Function) -> Function:
        LIBRARY.define(schema)
        name = schema.partition("(")[0]
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        LIBRARY.impl(name, shapes, "Meta")
        return function

    return define


def uses_fused(tensor: Tensor) -> bool:
    """Return whether a layer calls fused operations for this tensor. It does not under a compiler."""
    return not torch.compiler.is_dynamo_compiling() and is_accelerator(tensor.device.type)


def uses_triton(tensor: Tensor) -> bool:
    """Return whether an operation runs its Triton kernel for this tensor."""
    return has_triton(tensor.device.type)


def plain_bytes(numel: int, device: str) -> int:
    """Count the scratch of a gated product of `numel` elements on a type of device that has no kernel for it.

    Without Triton an accelerator runs the fused operations as several of PyTorch's, in fp32. The CPU does not call them.
    """
    return 4 * PLAIN_BUFFERS * numel if is_accelerator(device) and not has_triton(device) else 0


def no_result(*_: object) -> None:
    """Change nothing, as the shapes of an operation that only writes into its arguments."""
