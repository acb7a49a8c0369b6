"""Random `nn.Sequential` nets: branches, skips, ties, frozen parts, tuples, dicts, dropout, dtypes, plain values.

Each layer takes the structure that the layer before it returns: a tensor `x` of `[B, WIDTH]`, a pair of two, a dict of two,
or a mixture with integers and plain values.
"""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 5
Shape = str  # "x", "pair", "dict" or "mixed"


class Function(nn.Module):
    """A layer of one function of its input and, if it has any, its inner module."""

    def __init__(self, function: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.inner = inner

    def forward(self, hidden: Any) -> Any:
        return self.function(hidden) if self.inner is None else self.function(hidden, self.inner)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def partly_frozen() -> nn.Module:
    layer = linear()
    layer.weight.requires_grad_(False)
    return layer


def sixteen_bits() -> nn.Module:
    return Function(lambda x, inner: inner(x.bfloat16()).float(), linear().bfloat16())


def same_weight_twice() -> nn.Module:
    one, other = linear(), linear()
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


def same_module_twice() -> nn.Module:
    one = linear()
    return nn.Sequential(one, nn.GELU(), one)


def mixed(x: Tensor) -> tuple[Any, ...]:
    return {"x": x, "largest": x.detach().argmax(-1)}, None, [x[:, :2], "text", 3, x.detach() > 0]


def unmixed(value: Any, inner: nn.Module) -> Tensor:
    named, _, (part, _, number, mask) = value
    return named["x"] * number + inner(named["largest"]) + part.sum(-1, keepdim=True) * mask


# For each structure the kinds of layers that take it: what they return, and how they are made.
KINDS: dict[Shape, dict[str, tuple[Shape, Callable[[], nn.Module]]]] = {
    "x": {
        "linear": ("x", linear),
        "tanh": ("x", nn.Tanh),
        "norm": ("x", lambda: nn.LayerNorm(WIDTH)),
        "dropout": ("x", lambda: nn.Dropout(0.3)),
        "inner dropout": ("x", lambda: nn.Sequential(linear(), nn.Dropout(0.5), nn.Sequential(nn.GELU(), linear()))),
        "frozen": ("x", frozen),
        "partly frozen": ("x", partly_frozen),
        "bfloat16": ("x", sixteen_bits),
        "same weight twice": ("x", same_weight_twice),
        "same module twice": ("x", same_module_twice),
        "transposed": ("x", lambda: Function(lambda x, inner: inner(x).t().contiguous().t(), linear())),
        "twin": ("pair", lambda: Function(lambda x: (x, x))),
        "views": ("pair", lambda: Function(lambda x, inner: tuple(inner(x).expand(2, *x.shape)), linear())),
        "branch": ("dict", lambda: Function(lambda x, inner: {"left": inner(x), "right": x}, linear())),
        "mixed": ("mixed", lambda: Function(mixed)),
    },
    "pair": {
        "first": ("pair", lambda: Function(lambda pair, inner: (inner(pair[0]), pair[1]), linear())),
        "swap": ("pair", lambda: Function(lambda pair: (pair[1], pair[0]))),
        "both": ("pair", lambda: Function(lambda pair, inner: (inner(pair[0]) + pair[1], pair[0]), linear())),
        "sum": ("x", lambda: Function(lambda pair: pair[0] + pair[1])),
        "drop": ("x", lambda: Function(lambda pair: pair[1])),
        "named": ("dict", lambda: Function(lambda pair: {"right": pair[0], "left": pair[1]})),
    },
    "dict": {
        "update": ("dict", lambda: Function(lambda d, inner: {**d, "left": inner(d["left"]) * d["right"]}, linear())),
        "product": ("x", lambda: Function(lambda d: d["left"] * torch.sigmoid(d["right"]))),
    },
    "mixed": {"unmixed": ("x", lambda: Function(unmixed, nn.Embedding(WIDTH, WIDTH)))},
}
CLOSERS = {"x": [], "pair": ["sum"], "dict": ["product"], "mixed": ["unmixed"]}


@st.composite
def layer_kinds(draw: st.DrawFn) -> list[str]:
    """Draw the kinds of a net's layers, so that each fits the one before and the last one returns a tensor."""
    shape, names = "x", []
    for _ in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(KINDS[shape])))
        names.append(name)
        shape = KINDS[shape][name][0]
    return names + CLOSERS[shape]


def make_net(names: list[str], ties: int, seed: int = 0) -> nn.Sequential:
    """Make the net. The first `ties` linear layers behind the first one share its weight; the last one is its module again."""
    torch.manual_seed(seed)
    layers, shape = [], "x"
    for name in names:
        shape, make = KINDS[shape][name]
        layers.append(make())
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    for layer in plain[1 : 1 + ties]:
        layer.weight = plain[0].weight
    # The last layer is always trained, so that each net has a gradient.
    layers.append(plain[0] if plain and ties > 1 and plain[0].weight.requires_grad else linear())
    return nn.Sequential(*layers)
