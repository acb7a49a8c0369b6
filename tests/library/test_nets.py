"""Random and usual nets train bit for bit as in a plain loop: losses, weights and outputs, on any devices and cuts.

Each layer of a random net takes the structure that the layer before it returns: a tensor `x` of `[B, WIDTH]`, a pair of
two, a dict of two, or a mixture with integers and plain values.
"""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.support.plain_nets import OurAdamW, PlainNet, assert_same_state
from torchround import Partition, Pipeline

WIDTH = 5


class Function(nn.Module):
    def __init__(self, function, inner=None):
        super().__init__()
        self.function = function
        self.inner = inner

    def forward(self, hidden):
        return self.function(hidden) if self.inner is None else self.function(hidden, self.inner)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def frozen():
    return linear().requires_grad_(False)


def partly_frozen():
    layer = linear()
    layer.weight.requires_grad_(False)
    return layer


def sixteen_bits():
    return Function(lambda x, inner: inner(x.bfloat16()).float(), linear().bfloat16())


def same_weight_twice():
    one, other = linear(), linear()
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


def same_module_twice():
    one = linear()
    return nn.Sequential(one, nn.GELU(), one)


def mixed(x):
    return {"x": x, "largest": x.detach().argmax(-1)}, None, [x[:, :2], "text", 3, x.detach() > 0]


def unmixed(value, inner):
    named, _, (part, _, number, mask) = value
    return named["x"] * number + inner(named["largest"]) + part.sum(-1, keepdim=True) * mask


# For each structure the kinds of layers that take it: what they return, and how they are made.
KINDS = {
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
def layer_kinds(draw):
    shape, names = "x", []
    for _ in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(KINDS[shape])))
        names.append(name)
        shape = KINDS[shape][name][0]
    return names + CLOSERS[shape]


def make_net(names, ties, seed=0):
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


OPTIMIZERS = {
    "adamw": ("adamw", partial(OurAdamW, lr=0.05)),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.05),) * 2,
    "SGD": (partial(torch.optim.SGD, lr=0.05, momentum=0.9),) * 2,
    "decayed SGD": (partial(torch.optim.SGD, lr=0.05, weight_decay=0.1),) * 2,
}


def random_partition(num_layers, cuts):
    def lengths(count, flags):
        stops = [stop for stop in range(1, count) if flags[stop]] + [count] * bool(count)
        return tuple(stop - start for start, stop in zip([0, *stops], stops, strict=False))

    fused = 1 + sum(cuts) % num_layers
    before = num_layers - fused
    return Partition(lengths(before, cuts), fused, lengths(before, cuts[::-1]))


def distance(outputs, labels):
    return (outputs - labels["target"]).square().mean()


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kinds=layer_kinds(),
    cuts=st.lists(st.booleans(), min_size=12, max_size=12),
    ties=st.integers(0, 2),
    devices=st.integers(1, 3),
    samples=st.integers(1, 7),
    calls=st.integers(1, 2),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_random_nets_train_bit_for_bit_as_in_a_plain_loop(kinds, cuts, ties, devices, samples, calls, optimizer):
    net = make_net(kinds, ties)
    ours, plain = OPTIMIZERS[optimizer]
    loop = PlainNet(net, plain)
    generator = torch.Generator().manual_seed(3)
    partition = random_partition(len(net), cuts)
    with Pipeline(net, devices, ours, lr=0.05, partition=partition) as pipeline:
        for _ in range(2):
            for _ in range(calls):
                inputs = torch.randn(samples, WIDTH, generator=generator)
                labels = {"target": torch.randn(samples, WIDTH, generator=generator)}
                loss = pipeline.forward_backward(inputs, labels, distance, lazy=calls > 1)
                loss = loss.loss() if calls > 1 else loss
                assert loss == loop.forward_backward(inputs, labels, distance)
            pipeline.step()
            loop.step()
        assert_same_state(pipeline.weights(), loop.net)
        outputs = pipeline.forward(inputs, 1)
        assert torch.equal(outputs, loop.net.eval()(inputs))


def test_a_tensor_that_comes_twice_below_all_trained_layers_stays_one():
    """A stage gets one gradient for it, so it must be one tensor again when the stage runs again."""
    net = make_net(["twin", "named", "product"], ties=0)
    loop = PlainNet(net)
    inputs, labels = torch.ones(2, WIDTH), {"target": torch.zeros(2, WIDTH)}
    with Pipeline(net, 1, partition=Partition((2,), 2, (2,))) as pipeline:
        assert pipeline.forward_backward(inputs, labels, distance) == loop.forward_backward(inputs, labels, distance)
        pipeline.step()


# Nets as people write them: vision, encoders, recurrent, parametrised; each trains as its plain loop does.
ADAMW = partial(OurAdamW, lr=0.01)
WORDS, LENGTH, UNITS = 13, 6, 8


class Unpack(nn.Module):
    def forward(self, result):
        return result[0][:, -1]


def vision():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8).eval(), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, 3),
    )
    return net, torch.randn(6, 3, 8, 8), torch.randint(3, (6,))


def encoder():
    layers = [nn.TransformerEncoderLayer(UNITS, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)]
    net = nn.Sequential(nn.Linear(4, UNITS), *layers, nn.Flatten(), nn.Linear(LENGTH * UNITS, 2))
    return net, torch.randn(5, LENGTH, 4), torch.randint(2, (5,))


def recurrent():
    lstm = nn.LSTM(UNITS, UNITS, num_layers=2, dropout=0.2, batch_first=True)
    net = nn.Sequential(nn.Embedding(WORDS, UNITS), lstm, Unpack(), nn.Linear(UNITS, 3))
    return net, torch.randint(WORDS, (5, LENGTH)), torch.randint(3, (5,))


def parametrised():
    shared, normed = nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    net = nn.Sequential(shared, nn.Tanh(), shared, normed, nn.PReLU(), shared)
    return net, torch.randn(5, 4), torch.randint(4, (5,))


def entropy(outputs, labels):
    return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("make", [vision, encoder, recurrent, parametrised])
def test_a_usual_net_trains_as_its_plain_loop_and_gives_its_outputs(make):
    torch.manual_seed(0)
    net, inputs, labels = make()
    loop = PlainNet(net, ADAMW)
    # Cut at each layer: PyTorch chooses kernels by strides and by what requires a gradient, which must survive a cut.
    one_by_one = (1,) * (len(net) - 1)
    with Pipeline(net, 2, lr=0.01, partition=Partition(one_by_one, 1, one_by_one)) as pipeline:
        for _ in range(2):
            loss = pipeline.forward_backward(inputs, labels, entropy)
            assert loss == loop.forward_backward(inputs, labels, entropy)
            pipeline.step()
            loop.step()
        state = pipeline.weights()
        assert_same_state(state, loop.net)
        net.load_state_dict(state, strict=True)
        with torch.no_grad():
            assert torch.equal(pipeline.forward(inputs, 1), net.eval()(inputs))
