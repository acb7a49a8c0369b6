"""Which parameters weight decay applies to."""

from torch import nn

from torchround.layer import LayeredModel


def decayed_names(model: LayeredModel) -> frozenset[str]:
    """Names, as in `LayeredModel.stored_shapes`, of the parameters that decay.

    Those are matrices (projections, embeddings, experts). What only shifts or scales does not shrink what a layer can
    express, so the custom since GPT-2 is to leave it alone: vectors, and what a module lists in its attribute
    `undecayed` because it is a stack of them (one bias for each expert).
    """
    return frozenset(
        f"{name}.{path}"
        for name, layer in zip(model.names, model.layers, strict=True)
        for path, parameter in layer.named_parameters()
        if parameter.ndim >= 2 and not _is_undecayed(layer, path)
    )


def _is_undecayed(layer: nn.Module, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return name in getattr(layer.get_submodule(owner), "undecayed", ())
