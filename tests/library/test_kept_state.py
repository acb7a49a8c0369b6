"""A pipeline with each of our optimizers and state formats: the same on any number of devices, and it learns."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchround import Pipeline
from torchround.config.optimizer_tables import optimizer_tables
from torchround.library.refusals import PipelineUsageError

CHOICES = [(name, state) for name in optimizer_tables() for state in ("exact", "compact")]


class FusedAttention(nn.Module):
    """Attention of one head whose query, key and value come from one fused matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        return hidden + self.out(functional.scaled_dot_product_attention(query, key, value))


class Experts(nn.Module):
    """Three experts as a stack of matrices, each with an equal part in the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, width, width) / width**0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.einsum("btd,edf->btf", hidden, self.up).tanh()


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


def trained(name: str, state: str, devices: int, update: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a net of bfloat16, whose weights are split if nothing predicts them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), FusedAttention(16), Experts(16), nn.Linear(16, 3)).bfloat16()
    inputs, labels = torch.randn(8, 5, 6).bfloat16(), torch.randint(3, (8, 5))
    losses = []
    with Pipeline(net, devices, optimizer=name, state=state, update=update, lr=1e-2) as pipeline:
        for _ in range(12):
            losses.append(float(pipeline.forward_backward(inputs, labels, loss_of)))
            pipeline.step()
        return losses, pipeline.weights()


@pytest.mark.parametrize("update", ["sync", "async"])
@pytest.mark.parametrize(("name", "state"), CHOICES)
def test_a_pipeline_learns_and_gives_the_same_bits_on_any_number_of_devices(name, state, update):
    losses, weights = trained(name, state, 1, update)
    assert losses[-1] < 0.8 * losses[0]
    for devices in (2, 3):
        others, their_weights = trained(name, state, devices, update)
        assert others == losses
        assert all(torch.equal(weights[key], their_weights[key]) for key in weights)


def test_a_state_format_is_refused_for_an_optimizer_of_torch():
    with pytest.raises(PipelineUsageError, match="is for our own optimizers; leave it out"):
        Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 1, optimizer=torch.optim.SGD, lr=0.1, state="compact")


def test_muon_trains_late_if_no_layer_is_between_the_first_and_the_last():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Pipeline(net, 1, optimizer="muon", lr=0.1, update="async") as pipeline:
        pipeline.forward_backward(torch.ones(2, 2), torch.zeros(2, 2), functional.mse_loss, 1)
        pipeline.step()
        assert not torch.equal(pipeline.weights()["0.weight"], net[0].weight)
