"""The cost of a borrowed layer, counted by running its own code without memory.

Shapes: B sequences, T tokens, D model width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchround.layer import LayerWork, MicroBatch, Products
from torchround.models.borrowed.shell import shared_tensors
from torchround.models.borrowed.without_memory import Meter, call_with, fake_parameters, no_memory

DTYPES = {2: torch.bfloat16, 4: torch.float32}


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
    meter: Meter,
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
