"""Layers as a user might write them, whose values between layers are nested.

They declare no work. Their batch is no `MicroBatch`.
"""

from collections import namedtuple
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.engine.worker.slots import flatten
from torchround.layer import LayeredModel

WIDTH = 8
Branches = namedtuple("Branches", ["left", "right"])


@dataclass(frozen=True)
class Samples:
    """Inputs `[B, WIDTH]` and targets `[B]`, with a name that travels beside them."""

    inputs: Tensor
    targets: Tensor
    name: str = "samples"
    loss_factor: float | None = None

    @property
    def shape(self):
        return self.inputs.shape

    def tensors(self):
        return self.inputs, self.targets

    def rebuild(self):
        return partial(_samples, self.name, self.loss_factor)

    def for_layer(self, index):
        return self

    def for_training(self, loss_factor):
        return replace(self, loss_factor=loss_factor)

    def num_labels(self):
        return len(self.targets)

    def problem(self):
        return None if len(self.inputs) else "it is empty"


def _samples(name, loss_factor, tensors):
    return Samples(*tensors, name, loss_factor)


class AnyLayer(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))
        self.register_buffer("table", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.compute = compute

    def forward(self, hidden, batch):
        return self.compute(self, hidden, batch)

    def init_weights(self, generator):
        self.weight.normal_(std=0.4, generator=generator)


def first(layer, hidden, batch):
    assert hidden is None
    assert batch.name == "samples"
    inputs = F.linear(batch.inputs, layer.weight) * layer.table
    # One tensor twice, a skip that no layer uses before the last, integers, flags, a scalar and nothing at all.
    return {
        "value": inputs,
        "again": [inputs, None],
        "skip": batch.inputs.t() @ inputs,
        "rows": torch.arange(len(batch.inputs), device=inputs.device),
        "scale": inputs.mean(),
        "empty": inputs[:0],
        "text": ("plain", 3, 0.5),
    }


def second(layer, hidden, batch):
    assert hidden["again"][0] is hidden["value"]
    assert hidden["again"][1] is None
    assert hidden["text"] == ("plain", 3, 0.5)
    assert hidden["empty"].shape == (0, WIDTH)
    value = torch.tanh(F.linear(hidden["value"], layer.weight)) + hidden["again"][0] * hidden["scale"]
    # A view of another value, a transposed one and an expanded one; `unused` takes no part in the loss.
    return Branches(
        (value, value[:, : WIDTH // 2]),
        {
            "transposed": hidden["value"].t(),
            "expanded": hidden["scale"].expand(len(value), WIDTH),
            "skip": hidden["skip"],
            "unused": value.square(),
            "rows": hidden["rows"],
        },
    )


def third(layer, hidden, batch):
    (value, half), right = hidden.left, hidden.right
    assert right["transposed"].shape == (WIDTH, len(value))
    value = value + torch.cat([half, half], dim=1) * layer.table
    return value[right["rows"]] @ layer.weight, right["transposed"], right["expanded"], right["skip"]


def passing(layer, hidden, batch):
    return hidden


def last(layer, hidden, batch):
    value, transposed, expanded, skip = hidden
    logits = F.linear(value + transposed.t() * expanded, layer.weight) + skip.sum(0)
    return F.cross_entropy(logits, batch.targets, reduction="sum")


def outputs(layer, hidden, batch):
    value = hidden[0]
    return {"logits": F.linear(value, layer.weight), "same": (value, value), "rows": batch.targets, "name": batch.name}


def assert_same_value(found, wanted):
    (ours, of_ours), (theirs, of_theirs) = flatten(found), flatten(wanted)
    assert of_ours == of_theirs
    assert len(ours) == len(theirs)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(ours, theirs, strict=True))


def any_model(end=last, trained=True, **facts):
    computes = (first, second, passing, third, passing, end)
    layers = tuple(AnyLayer(compute).requires_grad_(trained) for compute in computes)
    return LayeredModel(tuple(f"layer.{index}" for index in range(len(layers))), layers, **facts)


def any_batches(count, seed=0, rows=5):
    generator = torch.Generator().manual_seed(seed)
    return [
        Samples(torch.randn(rows, WIDTH, generator=generator), torch.randint(WIDTH, (rows,), generator=generator))
        for _ in range(count)
    ]
