"""The state of a pipeline as a state dict: its weights by the plain net's names, and what its optimizer keeps."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchround.engine.store.bundles import WEIGHTS
from torchround.engine.store.host_store import HostStore
from torchround.library.module_layer import WrappedNet
from torchround.library.refusals import PipelineUsageError


def fill_store(store: HostStore, wrapped: WrappedNet, values: Mapping[str, Tensor]) -> None:
    """Copy values by the plain net's names into the store, and derive the device weights from them."""
    with torch.no_grad():
        store.write_weights({stored: values[name] for name, stored in wrapped.stored.items()})


def saved_buffers(wrapped: WrappedNet) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a state dict holds, by the plain net's names."""
    for name, module in wrapped.members().items():
        for path, part in module.named_modules(prefix=name, remove_duplicate=False):
            for key, buffer in part._buffers.items():
                if buffer is not None and key not in part._non_persistent_buffers_set:
                    yield f"{path}.{key}", buffer


def weights_of(store: HostStore, wrapped: WrappedNet) -> dict[str, Tensor]:
    """Copy weights and buffers with the names and dtypes of the plain net. A tied tensor is one tensor under its names."""
    weights = store.weights()
    copies: dict[tuple[str, torch.dtype], Tensor] = {}
    state = {name: buffer.clone() for name, buffer in saved_buffers(wrapped)}
    for name, stored in wrapped.stored.items():
        key = stored, wrapped.dtypes[name]
        if key not in copies:
            copies[key] = weights[stored].to(wrapped.dtypes[name], copy=True)
        state[name] = copies[key]
    return state


def kept_views(store: HostStore, wrapped: WrappedNet) -> dict[str, Tensor]:
    """Return views of what the store keeps beside the plain net's weights: the optimizer's state, and further bits of weights."""
    exact = {
        f"{WEIGHTS}/{wrapped.stored[name]}": dtype
        for name, dtype in wrapped.dtypes.items()
        if not store.splits_weights
    }
    return {key: view for key, view in store.named_views().items() if exact.get(key) != view.dtype}


def check_same(what: str, expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `PipelineUsageError` if two descriptions of a state differ."""
    names = [name for name in {**expected, **given} if expected.get(name) != given.get(name)]
    if names:
        found = "; ".join(f"{name} is {given.get(name)}, not {expected.get(name)}" for name in names[:8])
        raise PipelineUsageError(f"the state dict is not {what} ({len(names)} entries differ): {found}")


def described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def free_weights(net: nn.Module) -> None:
    """Put parameters on `meta` in place of the net's own, whose memory is free once nothing else refers to it."""
    shells: dict[int, nn.Parameter] = {}
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device="meta")
                shell = shells.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
                module._parameters[name] = shell
