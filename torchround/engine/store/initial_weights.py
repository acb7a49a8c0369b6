"""Initial weights: each layer fills the store's buffers by its own method, from a generator of its own.

A generator for each layer makes its values independent of the layers before it, so a machine may leave out layers that
other machines own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchround.engine.store.bundles import Bundle, ParameterLocation, owner_of


def fill_layer(
    bundles: Sequence[Bundle],
    locations: Sequence[ParameterLocation],
    index: int,
    layer: nn.Module,
    method: str,
    seed: int,
    version: int,
) -> None:
    """Fill what this machine holds of layer `index` by the layer's `method`, if it has one.

    The layer's parameters are at `locations`. The first layer that uses a shared parameter fills it. Split weights are
    in fp32 for one layer at a time. `version` is the newest one.
    """
    used = {location.bundle: bundles[location.bundle] for location in locations}
    ours = [bundle for bundle in used.values() if bundle.layers[0] == index and not bundle.mapped]
    fill: Callable[[torch.Generator], None] | None = getattr(layer, method, None)
    if fill is None or (ours and all(bundle.is_remote for bundle in ours)):
        return
    # The factor is above every number of layers, so that no two seeds give two layers the same numbers.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    # A parameter of another machine is filled too, and dropped: the layer's next one must meet the same generator.
    values = {
        bundle.index: torch.zeros(bundle.numel) if bundle.is_remote else bundle.copy_weights(version)
        for bundle in ours
    }
    with torch.no_grad(), _bound_to_host(locations, layer, values):
        fill(generator)
    for bundle in ours:
        if bundle.residual is not None:
            bundle.set_weights(values[bundle.index], version)


@contextmanager
def _bound_to_host(
    locations: Sequence[ParameterLocation], layer: nn.Module, values: dict[int, Tensor]
) -> Iterator[None]:
    """Make a layer's parameters views of the flat buffers `values`, by bundle, for the block.

    Other bundles stay on `meta`, so that only the first user of a shared parameter fills it.
    """
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for location in locations:
            if location.bundle in values:
                module, name = owner_of(layer, location.path)
                originals.append((module, name, getattr(module, name)))
                view = location.parameter.view(values[location.bundle])
                setattr(module, name, nn.Parameter(view, requires_grad=False))
        yield
    finally:
        # In reverse: a parameter that the layer has under two paths gets its original back at both.
        for module, name, original in reversed(originals):
            setattr(module, name, original)
