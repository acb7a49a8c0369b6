"""The probe refuses layers that cannot run on stateless devices, by name, at the first batch; and it measures the others."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchround import Pipeline
from torchround.engine.errors import EngineUsageError
from torchround.engine.store.host_store import HostStore
from torchround.library.module_layer import wrap
from torchround.library.probe import probe
from torchround.library.sample_batch import cut

INPUTS = torch.linspace(-1, 1, 24).reshape(6, 4)


def square(outputs, labels):
    return outputs.square().sum()


def measured(net, loss_fn=square, inputs=INPUTS):
    wrapped = wrap(net)
    store = HostStore(wrapped.model)
    wrapped.fill(store, net.state_dict())
    batches = cut(inputs, None, 1, loss_fn, is_training=True, seed=0, call=0)
    return wrapped.layers, probe(wrapped, store, batches[0])


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(1))
        self.norm = nn.BatchNorm1d(4)
        self.count = 0
        self.function = function

    def forward(self, hidden):
        return self.function(self, hidden)


def doing(change):
    def function(layer, hidden):
        with torch.no_grad():
            change(layer, hidden)
        return hidden

    return function


class Opaque:
    """An object that holds a tensor where PyTorch cannot find it."""

    def __init__(self, hidden):
        self.hidden = hidden


OUTSIDE = nn.Parameter(torch.ones(4))
REFUSED = {
    "attribute": (doing(lambda layer, _: setattr(layer, "count", layer.count + 1)), "changes count"),
    "running statistics": (lambda layer, hidden: layer.norm(hidden), "changes norm.running_mean.*GroupNorm"),
    "buffer": (doing(lambda layer, _: layer.seen.add_(1)), "changes seen"),
    "buffer's data": (doing(lambda layer, _: layer.seen.data.fill_(7)), "changes seen"),
    "buffer replaced": (doing(lambda layer, _: setattr(layer, "seen", layer.seen + 1)), "changes seen"),
    "weight": (doing(lambda layer, _: layer.weight.mul_(0.5)), "changes weight"),
    "input": (lambda layer, hidden: hidden.relu_(), "in-place operation"),
    "view of the input": (lambda layer, hidden: hidden[:, 1:].zero_().clone(), "in-place operation"),
    "Python's random": (lambda layer, hidden: hidden * random.random(), "gives other values when it runs again"),
    "a plain value": (lambda layer, hidden: (hidden, random.random()), "gives other values when it runs again"),
    "weight outside": (lambda layer, hidden: hidden * OUTSIDE, r"uses a trained tensor of shape \(4,\)"),
    "object": (lambda layer, hidden: Opaque(hidden), "a .*Opaque between two layers"),
    "checkpoint": (
        lambda layer, hidden: checkpoint(
            lambda value: functional.dropout(value * layer.weight, 0.5), hidden, use_reentrant=False
        ),
        "draws random numbers in its backward",
    ),
    "error": (lambda layer, hidden: hidden @ hidden, "RuntimeError: (mm: )?mat1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_layer_that_cannot_be_run_anywhere_is_refused_by_name(case):
    function, message = REFUSED[case]
    with pytest.raises(EngineUsageError, match=rf"^layer 1 \(Calls\): .*{message}"):
        measured(nn.Sequential(nn.Linear(4, 4), Calls(function), nn.Identity()), lambda *_: torch.tensor(0.0))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda outputs, labels: outputs, r"returned torch.float32 \[6, 4\]"),
        (lambda outputs, labels: 3.0, "returned float"),
        (lambda outputs, labels: outputs.argmax(), r"returned torch.int64 \[\]"),
        (lambda outputs, labels: torch.tensor(1.0), "the loss does not depend on anything that is trained"),
    ],
)
def test_a_loss_that_is_no_number_to_train_with_is_refused(loss_fn, message):
    with pytest.raises(EngineUsageError, match=message):
        measured(nn.Sequential(nn.Linear(4, 4)), loss_fn)


def test_a_refusal_leaves_inputs_weights_and_the_pipeline_as_they_were():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2))
    inputs = INPUTS.clone()
    with Pipeline(net, 1) as pipeline:
        for call in (lambda: pipeline.forward_backward(inputs, None, square), lambda: pipeline.forward(inputs)):
            with pytest.raises(EngineUsageError, match=r"layer 0 \(ReLU\): it changes its input .*inplace=False"):
                call()
        assert torch.equal(inputs, INPUTS)
        assert torch.equal(pipeline.weights()["1.weight"], net[1].weight)
    layers, _ = measured(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2), nn.Dropout(0.5).eval()))
    assert [layer.draws for layer in layers] == [False, True, False, False], "the others are not slowed down"


def test_bytes_are_counted_and_only_what_is_trained_receives_gradients():
    frozen = nn.Embedding(5, 4)
    frozen.requires_grad_(False)

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden):
            return {"old": hidden, "new": self.linear(hidden)}

    class Adds(nn.Module):
        def forward(self, pair):
            return pair["old"] + pair["new"].tanh()

    layers, found = measured(nn.Sequential(frozen, Pairs(), Adds()), inputs=torch.randint(5, (6, 100)))
    assert [layer.receives for layer in layers] == [(), (False,), (False, True)]
    boundary = 6 * 100 * 4 * 4
    aligned = -(-boundary // 256) * 256
    assert [measure.boundary_bytes for measure in found[:2]] == [aligned, 2 * aligned]
    assert found[2].activation_bytes >= boundary, "tanh keeps its result"
    assert all(measure.workspace_bytes >= boundary for measure in found)
    assert all(measure.forward_s > 0 for measure in found)
