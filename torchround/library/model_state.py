"""The state of a pipeline as a state dict: its weights by the plain net's names, and what its optimizer keeps."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchround.engine.store.bundles import WEIGHTS
from torchround.engine.store.host_store import HostStore
from torchround.library.module_layer import MEMBER, WrappedNet
from torchround.library.refusals import PipelineUsageError


def fill_store(store: HostStore, wrapped: WrappedNet, values: Mapping[str, Tensor]) -> None:
    """Copy values by the plain net's names into the store, and derive the device weights from them."""
    with torch.no_grad():
        store.write_weights({wrapped.stored[name]: value for name, value in values.items()})


def buffers_of(wrapped: WrappedNet, persistent: bool = False) -> dict[str, Tensor]:
    """Return the net's buffers by the plain net's names; those that a state dict holds if `persistent`."""
    found: dict[str, Tensor] = {}
    for name, layer in zip(wrapped.model.names, wrapped.model.layers, strict=True):
        for path, module in layer.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():
                if buffer is not None and not (persistent and key in module._non_persistent_buffers_set):
                    inner = path.removeprefix(MEMBER).removeprefix(".")
                    found[".".join(part for part in (name, inner, key) if part)] = buffer
    return found


def state_dict_of(store: HostStore, wrapped: WrappedNet) -> dict[str, Tensor]:
    """Copy weights and buffers with the names and dtypes of the plain net. A tied tensor is one tensor under its names.

    Weights that compute in 16 bits have more bits in the store than the state dict gives.
    """
    weights = store.weights()
    copies: dict[tuple[str, torch.dtype], Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, stored in wrapped.stored.items():
        dtype = wrapped.dtypes[name]
        if (stored, dtype) not in copies:
            copies[stored, dtype] = weights[stored].to(dtype, copy=True)
        state[name] = copies[stored, dtype]
    return state | {name: buffer.clone() for name, buffer in buffers_of(wrapped, persistent=True).items()}


def kept_views(store: HostStore, wrapped: WrappedNet) -> dict[str, Tensor]:
    """Return views of what the store keeps beside the plain net's weights: the optimizer's state, and further bits of weights."""
    exact = {
        f"{WEIGHTS}/{wrapped.stored[name]}": dtype
        for name, dtype in wrapped.dtypes.items()
        if not store.splits_weights
    }
    return {key: view for key, view in store.named_views().items() if exact.get(key) != view.dtype}


KEPT = ("step", "lr", "calls", "resume", "tensors", "class", "torch")
"""The keys of a state dict's `"optimizer"`."""


def check_kept(kept: Mapping[str, Any], views: Mapping[str, Tensor], host_class: str | None) -> None:
    """Raise `PipelineUsageError` if `kept` is not the state of this pipeline's optimizer.

    `views` are the tensors that this one keeps, `host_class` is its class if it is one of `torch.optim`.
    """
    if missing := [key for key in KEPT if key not in kept]:
        raise PipelineUsageError(f'the state dict\'s "optimizer" lacks {", ".join(missing)}')
    tensors = kept["tensors"]
    other = sorted(views.keys() ^ tensors.keys())
    other += [
        key
        for key in views.keys() & tensors.keys()
        if (views[key].shape, views[key].dtype) != (tensors[key].shape, tensors[key].dtype)
    ]
    other += ["its class"] * (kept["class"] != host_class)
    if other:
        raise PipelineUsageError(
            f"the state dict is that of another optimizer ({other[0]} and {len(other) - 1} others differ): give "
            "optimizer, state and update as the pipeline had them that made it, or load its weights alone: "
            'load_state_dict(state["model"])'
        )


def check_state(shapes: Mapping[str, torch.Size], state: Mapping[str, Any]) -> None:
    """Raise `PipelineUsageError` if names or shapes of a plain net's state dict are not the net's."""
    missing = sorted(shapes.keys() - state.keys())
    unknown = sorted(state.keys() - shapes.keys())
    wrong = [
        f"{name} is {tuple(state[name].shape)}, the net has {tuple(shape)}"
        for name, shape in shapes.items()
        if name in state and state[name].shape != shape
    ]
    lines = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(unknown)}"] * bool(
        unknown
    )
    if lines + wrong:
        raise PipelineUsageError("the state dict is not the net's: " + "; ".join(lines + wrong))


def free_weights(net: nn.Module, wrapped: WrappedNet) -> None:
    """Put parameters on `meta` in place of the net's own, whose memory is free once no one else refers to it."""
    shells: dict[int, nn.Parameter] = {}
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device="meta")
                shell = shells.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
                module._parameters[name] = shell
    # Modules that the net holds at two places have their new parameters already, so no old one is left.
    assert all(parameter.is_meta for parameter in net.parameters()), "a parameter kept its memory"
