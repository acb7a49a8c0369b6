"""The teaching example trains like the engine, bit for bit."""

import pytest
import torch
from torch import nn

from examples.roundpipe import RoundPipe, batches, main, net_of, stages_of
from torchround import Pipeline
from torchround.planning.partition import Partition

LOSS = nn.CrossEntropyLoss(reduction="sum")


@pytest.mark.parametrize("update", ["sync", "async"])
@pytest.mark.parametrize(("forward", "fused", "backward"), [([3, 3], 1, [1] * 6), ([2, 1], 2, [3])])
def test_losses_and_weights_are_those_of_the_engine(update, forward, fused, backward):
    torch.manual_seed(0)
    net = net_of(num_blocks=sum(forward) + fused - 1, width=8, classes=3)
    data = list(batches(5, size=12, width=8, classes=3))
    partition = Partition.from_lists(forward, fused, backward)
    settings = {"lr": 1e-2, "weight_decay": 0.0}
    with Pipeline(net, 2, torch.optim.AdamW, update=update, partition=partition, **settings) as engine:
        expected = []
        for inputs, labels in data:
            expected.append(engine.forward_backward(inputs, labels, LOSS))
            engine.step()
        weights = engine.weights()
    pipe = RoundPipe(net, stages_of(forward, fused, backward), 3, 1e-2, LOSS, update == "async")
    steps = [pipe.train(inputs, labels, num_micro_batches=3) for inputs, labels in data]
    assert [step.loss() for step in steps] == expected
    pipe.close()
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())


def test_the_program_prints_its_losses_and_the_order_of_stages(capsys):
    main()
    printed = capsys.readouterr().out
    assert "device 2 | 0:FB6" in printed and printed.count("loss") == 2
