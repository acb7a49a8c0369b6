"""Nets as people write them: vision, language, recurrent, parametrised; each trains as its plain loop does."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.plain_nets import OurAdamW, PlainNet, assert_same_state
from torchround import Partition, Pipeline
from torchround.engine.errors import PipelineError

ADAMW = partial(OurAdamW, lr=0.01)
WORDS, LENGTH, WIDTH = 13, 6, 8


class Embed(nn.Module):
    """Token and position embeddings; hands the padding mask on to all layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        tokens = inputs["tokens"]
        return self.tokens(tokens) + self.positions[: tokens.shape[1]], tokens == 0


class Block(nn.Module):
    """A pre-norm block of `nn.MultiheadAttention` with dropout and a causal mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH).triu(1).bool(), persistent=False)

    def forward(self, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, padding = hidden
        normed = self.norm(x)
        mixed, _ = self.attention(
            *(normed, normed, normed), key_padding_mask=padding, attn_mask=self.causal, need_weights=False
        )
        x = x + mixed
        return x + self.mlp(x), padding


class Head(nn.Module):
    """A head tied to the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH), weight

    def forward(self, hidden: tuple[Tensor, Tensor]) -> Tensor:
        return functional.linear(self.norm(hidden[0]), self.weight)


class Unpack(nn.Module):
    """A layer that takes the sequence of an LSTM's result."""

    def forward(self, result: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        return result[0][:, -1]


def vision() -> tuple[nn.Sequential, Tensor, Tensor]:
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


def language() -> tuple[nn.Sequential, dict[str, Tensor], Tensor]:
    embed = Embed()
    net = nn.Sequential(embed, Block(), Block(), Head(embed.tokens.weight))
    tokens = torch.randint(1, WORDS, (5, LENGTH))
    return net, {"tokens": tokens}, tokens.roll(-1, 1)


def encoder() -> tuple[nn.Sequential, Tensor, Tensor]:
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)]
    net = nn.Sequential(nn.Linear(4, WIDTH), *layers, nn.Flatten(), nn.Linear(LENGTH * WIDTH, 2))
    return net, torch.randn(5, LENGTH, 4), torch.randint(2, (5,))


def recurrent() -> tuple[nn.Sequential, Tensor, Tensor]:
    lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
    net = nn.Sequential(nn.Embedding(WORDS, WIDTH), lstm, Unpack(), nn.Linear(WIDTH, 3))
    return net, torch.randint(WORDS, (5, LENGTH)), torch.randint(3, (5,))


def parametrised() -> tuple[nn.Sequential, Tensor, Tensor]:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return nn.Sequential(linear, nn.PReLU(), nn.Linear(4, 2)), torch.randn(5, 4), torch.randint(2, (5,))


def residual() -> tuple[nn.Sequential, Tensor, Tensor]:
    shared = nn.Linear(4, 4)
    return (nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared), torch.randn(5, 4), torch.randint(4, (5,)))


def entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("make", [vision, language, encoder, recurrent, parametrised, residual])
def test_a_usual_net_trains_as_its_plain_loop_and_gives_its_outputs(make) -> None:
    torch.manual_seed(0)
    net, inputs, labels = make()
    loop = PlainNet(net, ADAMW)
    # Cut at each layer: PyTorch chooses kernels by strides and by what requires a gradient, which must survive a cut.
    one_by_one = (1,) * (len(net) - 1)
    with Pipeline(net, 2, lr=0.01, partition=Partition(one_by_one, 1, one_by_one)) as pipeline:
        for _ in range(3):
            loss = pipeline.forward_backward(inputs, labels, entropy)
            assert loss == loop.forward_backward(inputs, labels, entropy)
            pipeline.step()
            loop.step()
        state = pipeline.weights()
        assert_same_state(state, loop.net)
        net.load_state_dict(state, strict=True)
        with torch.no_grad():
            assert torch.equal(pipeline.forward(inputs, 1), net.eval()(inputs))


def test_late_updates_train_and_outputs_are_of_the_newest_weights() -> None:
    torch.manual_seed(0)
    net, inputs, labels = vision()
    with Pipeline(net, 2, lr=0.01, update="async") as pipeline:
        losses = []
        for _ in range(8):
            losses.append(pipeline.forward_backward(inputs, labels, entropy))
            pipeline.step()
        assert losses[-1] < losses[0]
        net.load_state_dict(pipeline.weights())
        with torch.no_grad():
            assert torch.equal(pipeline.forward(inputs, 1), net.eval()(inputs))


def test_a_fault_on_a_device_names_the_layer_and_the_next_call_works() -> None:
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


def fails(outputs: Tensor, labels: Tensor) -> Tensor:
    raise RuntimeError("nothing fits")
