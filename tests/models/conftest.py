"""Helpers for model tests: real weights for a model built on meta, random micro-batches, one pass."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchround.layer import IGNORED_LABEL, LayeredModel, MicroBatch


def materialise(
    model: LayeredModel, dtype: torch.dtype = torch.float32, seed: int = 0, reverse: bool = False
) -> LayeredModel:
    """Give the model CPU memory in place, keeping ties, and initialise it layer by layer."""
    real: dict[int, nn.Parameter] = {}
    for layer in model.layers:
        for module in layer.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if id(parameter) not in real:
                    real[id(parameter)] = nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=dtype))
                module._parameters[name] = real[id(parameter)]
    order = list(enumerate(model.layers))
    for index, layer in reversed(order) if reverse else order:
        layer.init_weights(torch.Generator().manual_seed(seed * 1000 + index))
    return model


def stored_parameters(model: LayeredModel) -> dict[str, nn.Parameter]:
    """`<layer>.<parameter>` to parameter; a tied one under its first layer only."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for layer_name, layer in zip(model.names, model.layers, strict=True):
        for name, parameter in layer.named_parameters():
            if id(parameter) not in seen:
                found[f"{layer_name}.{name}"] = parameter
                seen.add(id(parameter))
    return found


def micro_batch(documents: list[list[int]], vocab_size: int, seed: int = 0) -> MicroBatch:
    """Random tokens; `documents[b]` are the document lengths of sequence b, all rows equally long in sum."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for lengths in documents:
        parts = []
        for index, length in enumerate(lengths):
            tokens = torch.randint(0, vocab_size, (length,), generator=generator)
            labels = torch.cat((tokens[1:], torch.tensor([IGNORED_LABEL])))
            parts.append((tokens, labels, torch.arange(length), torch.full((length,), index)))
        rows.append([torch.cat(column) for column in zip(*parts, strict=True)])
    return MicroBatch(*(torch.stack(column) for column in zip(*rows, strict=True)))


def hidden_before_head(model: LayeredModel, batch: MicroBatch) -> torch.Tensor:
    hidden = None
    for layer in model.layers[:-1]:
        hidden = layer(hidden, batch)
    return hidden


def loss_sum(model: LayeredModel, batch: MicroBatch) -> torch.Tensor:
    return model.layers[-1](hidden_before_head(model, batch), batch)


@pytest.fixture
def tools() -> SimpleNamespace:
    return SimpleNamespace(
        materialise=materialise,
        stored_parameters=stored_parameters,
        micro_batch=micro_batch,
        hidden_before_head=hidden_before_head,
        loss_sum=loss_sum,
    )
