"""Random nets train bit for bit as in a plain loop: losses, weights and outputs, on one to three devices."""

from functools import partial

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.plain_nets import OurAdamW, PlainNet, assert_same_state
from tests.support.random_nets import WIDTH, layer_kinds, make_net
from torchround import Pipeline


def distance(outputs: Tensor, labels: dict[str, Tensor]) -> Tensor:
    return (outputs - labels["target"]).square().mean()


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    kinds=layer_kinds(),
    ties=st.integers(0, 2),
    devices=st.integers(1, 3),
    samples=st.integers(1, 7),
    calls=st.integers(1, 2),
)
def test_random_nets_train_bit_for_bit_as_in_a_plain_loop(kinds, ties, devices, samples, calls) -> None:
    net = make_net(kinds, ties)
    loop = PlainNet(net, partial(OurAdamW, lr=0.05))
    generator = torch.Generator().manual_seed(3)
    with Pipeline(net, devices, lr=0.05) as pipeline:
        for _ in range(2):
            for _ in range(calls):
                inputs = torch.randn(samples, WIDTH, generator=generator)
                labels = {"target": torch.randn(samples, WIDTH, generator=generator)}
                loss = pipeline.forward_backward(inputs, labels, distance)
                assert loss == loop.forward_backward(inputs, labels, distance)
            pipeline.step()
            loop.step()
        assert_same_state(pipeline.state_dict(), loop.net)
        outputs = pipeline.forward(inputs, 1)
        assert torch.equal(outputs, loop.net.eval()(inputs))
