"""Random nets train bit for bit as in a plain loop: losses, weights and outputs, on one to three devices, however cut."""

from functools import partial

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.plain_nets import OurAdamW, PlainNet, assert_same_state
from tests.support.random_nets import WIDTH, layer_kinds, make_net
from torchround import Partition, Pipeline

OPTIMIZERS = {
    "adamw": ("adamw", partial(OurAdamW, lr=0.05)),
    "Adagrad": (partial(torch.optim.Adagrad, lr=0.05),) * 2,
    "SGD": (partial(torch.optim.SGD, lr=0.05, momentum=0.9),) * 2,
    "decayed SGD": (partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),) * 2,
}


def random_partition(num_layers: int, cuts: list[bool]) -> Partition:
    """Cut the layers where `cuts` says: its first flags are for the forward, its last ones for the backward."""

    def lengths(count: int, flags: list[bool]) -> tuple[int, ...]:
        stops = [stop for stop in range(1, count) if flags[stop]] + [count] * bool(count)
        return tuple(stop - start for start, stop in zip([0, *stops], stops, strict=False))

    fused = 1 + sum(cuts) % num_layers
    before = num_layers - fused
    return Partition(lengths(before, cuts), fused, lengths(before, cuts[::-1]))


def distance(outputs: Tensor, labels: dict[str, Tensor]) -> Tensor:
    return (outputs - labels["target"]).square().mean()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kinds=layer_kinds(),
    cuts=st.lists(st.booleans(), min_size=12, max_size=12),
    ties=st.integers(0, 2),
    devices=st.integers(1, 3),
    samples=st.integers(1, 7),
    calls=st.integers(1, 2),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_random_nets_train_bit_for_bit_as_in_a_plain_loop(
    kinds, cuts, ties, devices, samples, calls, optimizer
) -> None:
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
                loss = pipeline.forward_backward(inputs, labels, distance)
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
