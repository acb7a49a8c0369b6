"""Nets as people write them: vision, encoders, recurrent, parametrised; each trains as its plain loop does."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.plain_nets import OurAdamW, PlainNet, assert_same_state
from torchround import Partition, Pipeline
from torchround.engine.errors import PipelineError

ADAMW = partial(OurAdamW, lr=0.01)
WORDS, LENGTH, WIDTH = 13, 6, 8


class Unpack(nn.Module):
    """A layer that takes the sequence of an LSTM's result."""

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
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)]
    net = nn.Sequential(nn.Linear(4, WIDTH), *layers, nn.Flatten(), nn.Linear(LENGTH * WIDTH, 2))
    return net, torch.randn(5, LENGTH, 4), torch.randint(2, (5,))


def recurrent():
    lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
    net = nn.Sequential(nn.Embedding(WORDS, WIDTH), lstm, Unpack(), nn.Linear(WIDTH, 3))
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


def test_a_fault_on_a_device_names_the_layer_and_the_next_call_works():
    torch.manual_seed(0)
    net, inputs, labels = vision()
    with Pipeline(net, 2, lr=0.01) as pipeline:
        expected = pipeline.forward_backward(inputs, labels, entropy)
        pipeline.step()
        state = pipeline.weights()
        with pytest.raises(PipelineError, match="micro-batch 0: .*nothing fits"):
            pipeline.forward_backward(inputs, labels, fails)
        assert all(torch.equal(value, state[name]) for name, value in pipeline.weights().items())
        assert pipeline.forward_backward(inputs, labels, entropy) < expected


def fails(outputs, labels):
    raise RuntimeError("nothing fits")
