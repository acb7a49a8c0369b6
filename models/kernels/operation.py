"""How an operation with a Triton kernel is defined, and which way layers take.

Each is `torch.ops.torchround.NAME`: whatever counts or records the operations of a model sees one launch. Its kernel is in
a file `*_triton`, which only its first call imports. On `meta` an operation only makes results of the right shapes.

Layers use them on a kind of accelerator that has Triton. Everywhere else they run their own plain code, and so they do
under a compiler, which fuses by itself.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchround.accelerators import device_kind, has_triton, is_accelerator

LIBRARY = torch.library.Library("torchround", "FRAGMENT")

Shapes = TypeVar("Shapes", bound=Callable[..., Any])


def operation(schema: str, launcher: str) -> Callable[[Shapes], Shapes]:
    """Define `torch.ops.torchround.NAME`, which runs `launcher`: a module of this folder and its function.

    `schema` is PyTorch's text for name, arguments and results. The decorated function makes the results on `meta`.
    `torch.library.custom_op` would check each call in Python; that costs more than the launch of a kernel.
    """
    module, _, function = launcher.partition(".")

    def launch(*arguments: Any) -> Any:
        return getattr(import_module(f"torchround.models.kernels.{module}"), function)(*arguments)

    def define(shapes: Shapes) -> Shapes:
        LIBRARY.define(schema)
        name = schema.partition("(")[0]
        LIBRARY.impl(name, launch, "CompositeExplicitAutograd")
        LIBRARY.impl(name, shapes, "Meta")
        return shapes

    return define


def uses_fused(tensor: Tensor) -> bool:
    """Check whether a layer takes an accelerator's way for this tensor. It does not under a compiler."""
    return not torch.compiler.is_dynamo_compiling() and is_accelerator(device_kind(tensor))


def uses_triton(tensor: Tensor) -> bool:
    """Check whether a layer runs Triton kernels for this tensor. It does not under a compiler."""
    return not torch.compiler.is_dynamo_compiling() and has_triton(device_kind(tensor))
