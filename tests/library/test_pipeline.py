"""A pipeline trains ordinary nets exactly as a plain loop does, on any number of devices and with any cuts."""

import copy
import inspect
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.plain_nets import OurAdamW, PlainNet, assert_same_state
from tests.support.processes import run_program
from torchround import Pipeline
from torchround.engine.errors import EngineUsageError

ADAMW = partial(OurAdamW, lr=0.1)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def batches(count=4, samples=7):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator))
        for _ in range(count)
    ]


def test_weights_of_a_bf16_net_are_read_as_they_are_after_each_step():
    """They are halves in host memory."""
    with Pipeline(mlp().bfloat16(), 2, lr=0.1) as pipeline:
        assert pipeline.store.splits_weights
        for inputs, labels in batches(2):
            pipeline.forward_backward(inputs.bfloat16(), labels, functional.cross_entropy)
            pipeline.step()
            state = pipeline.weights()
            assert all(value.dtype == torch.bfloat16 for value in state.values())
            halves = {name: value * 0.5 for name, value in state.items()}
            pipeline.load_state_dict(halves)
            assert_same_values(pipeline.weights(), halves)


def test_an_evaluation_between_steps_changes_no_dropout_mask():
    found = []
    for evaluates in (False, True):
        with Pipeline(mlp(), 2, lr=0.1) as pipeline:
            for inputs, labels in batches(2):
                if evaluates:
                    pipeline.forward(inputs)
                loss = pipeline.forward_backward(inputs, labels, functional.cross_entropy)
                pipeline.step()
            found.append(loss)
    assert found[0] == found[1]


def test_the_net_stays_as_it_is_and_the_pipeline_refers_to_none_of_its_weights():
    net = mlp()
    before, weight = copy.deepcopy(net.state_dict()), weakref.ref(net[0].weight)
    with Pipeline(net, 1) as pipeline:
        pipeline.forward_backward(*batches()[0], functional.cross_entropy)
        pipeline.step()
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        del net
        assert weight() is None and pipeline.weights().keys() == before.keys()


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("shift", torch.tensor(1.0), persistent=False)

    def forward(self, hidden):
        return functional.linear(hidden, self.weight) * self.scale + self.shift


def tied():
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    return nn.Sequential(embedding, nn.LayerNorm(8), nn.Linear(8, 8).bfloat16().float(), Head(embedding.weight))


def token_loss(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


TOKENS = torch.randint(11, (5, 4), generator=torch.Generator().manual_seed(2))


def test_tied_weights_and_buffers_are_those_of_the_plain_net():
    net = tied()
    loop = PlainNet(net, ADAMW)
    with Pipeline(net, 2, lr=0.1) as pipeline:
        for _ in range(2):
            loss = pipeline.forward_backward(TOKENS, TOKENS, token_loss)
            assert loss == loop.forward_backward(TOKENS, TOKENS, token_loss)
            pipeline.step()
            loop.step()
        assert_same_state(pipeline.weights(), loop.net)
        state = pipeline.weights()
        assert state["0.weight"] is state["3.weight"] and "3.shift" not in state
        loop.net.load_state_dict(state, strict=True)


def test_a_loaded_state_is_trained_on_and_buffers_reach_the_devices():
    net = tied()
    with Pipeline(net, 2, lr=0.1) as pipeline:
        pipeline.forward_backward(TOKENS, TOKENS, token_loss)
        pipeline.step()
        state = pipeline.weights()
        state["3.scale"].fill_(2.0)
        state["1.bias"] += 0.25
        pipeline.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in pipeline.weights().items())
        net.load_state_dict(state)
        outputs = pipeline.forward(TOKENS, 1)
        assert torch.equal(outputs, net(TOKENS))


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(torch.float32, {}, id="adamw", marks=pytest.mark.nightly),
        pytest.param(torch.bfloat16, {"update": "async", "state": "compact"}, id="bf16, async, compact"),
        pytest.param(torch.float16, {"update": "async"}, id="fp16, async"),
        pytest.param(torch.bfloat16, {"optimizer": "muon"}, id="bf16, muon"),
        pytest.param(torch.float32, {"optimizer": SGD, "update": "async"}, id="torch.optim, async"),
        pytest.param(torch.bfloat16, {"optimizer": torch.optim.AdamW}, id="bf16, torch.optim"),
    ],
)
def test_saved_loaded_and_continued_a_loop_has_the_bits_of_an_uninterrupted_one(tmp_path, dtype, options):
    """Each row has dropout and a rate that falls, float16 also a loss scale that falls. The file holds plain values alone."""
    net, options, found = mlp().to(dtype), {"lr": 0.05, **options}, []

    def loss_fn(outputs, labels):
        return functional.cross_entropy(outputs.float(), labels) * 2

    for stops in ([6], [4, 6]):
        losses, start = [], 0
        for stop in stops:
            with Pipeline(net, 2 + start % 2, **options) as pipeline:
                if start:
                    pipeline.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
                for inputs, labels in batches(6)[start:stop]:
                    losses.append(pipeline.forward_backward(inputs.to(dtype), labels, loss_fn))
                    pipeline.step()
                    pipeline.lr *= 0.9
                    for group in pipeline.optimizer.param_groups if pipeline.optimizer else ():
                        group["lr"] *= 0.9
                torch.save(pipeline.state_dict(), tmp_path / "state.pt")
            start = stop
        found.append((losses, torch.load(tmp_path / "state.pt")))
    (whole, state), (resumed, other) = found
    assert resumed == whole and len(set(whole)) == len(whole)
    assert_same_values(other, state)
    if dtype == torch.float16:
        assert 0 < state["optimizer"]["resume"]["applied_updates"] < 6


def test_muon_trains_late_if_no_layer_is_between_the_first_and_the_last():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Pipeline(net, 1, optimizer="muon", lr=0.1, update="async") as pipeline:
        pipeline.forward_backward(torch.ones(2, 2), torch.zeros(2, 2), functional.mse_loss, 1)
        pipeline.step()
        assert not torch.equal(pipeline.weights()["0.weight"], net[0].weight)


def assert_same_values(actual, expected):
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_same_values(actual[key], expected[key])
    elif isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    else:
        assert actual == expected


def test_states_that_do_not_fit_are_refused_and_nothing_changes():
    others = [Pipeline(mlp(), 1, optimizer=other) for other in ("muon", torch.optim.Adagrad)]
    with others[0], others[1], Pipeline(mlp(), 1, lr=0.1) as pipeline, Pipeline(mlp(), 1, optimizer=SGD) as sgd:
        inputs, labels = batches(1)[0]
        pipeline.forward_backward(inputs, labels, functional.cross_entropy)
        with pytest.raises(EngineUsageError, match="forward_backward"):
            pipeline.state_dict()
        pipeline.step()
        before = pipeline.state_dict()
        renamed = {name: value + 1 for name, value in before["model"].items() if name != "0.bias"}
        for into, state, words in (
            (pipeline, others[0].state_dict(), "not of this net and optimizer"),
            (sgd, others[1].state_dict(), "class of the optimizer"),
            (pipeline, renamed | {"other": torch.ones(1)}, "2 entries differ: 0.bias, other"),
            (pipeline, before["model"] | {"3.bias": torch.ones(2)}, "3.bias"),
        ):
            with pytest.raises(EngineUsageError, match=words):
                into.load_state_dict(state)
        assert_same_values(pipeline.state_dict(), before)
        pipeline.load_state_dict(others[0].state_dict()["model"])
        assert_same_state(pipeline.weights(), mlp())
        assert pipeline.state_dict()["optimizer"]["step"] == 1


def test_a_model_larger_than_a_device_trains_and_one_that_cannot_fit_is_refused():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    layer_gib = 128 * 128 * 4 / 2**30
    inputs = torch.randn(4, 128)

    def square(outputs, labels):
        return outputs.square().sum()

    with Pipeline(net, 2, lr=1e-3) as pipeline:
        expected = pipeline.forward_backward(inputs, None, square)
    with Pipeline(net, 2, lr=1e-3, device_memory_gib=7 * layer_gib) as pipeline:
        assert pipeline.forward_backward(inputs, None, square) == expected
        assert pipeline.partition is not None and pipeline.partition.fused < 4
    with (
        Pipeline(net, 2, device_memory_gib=layer_gib) as pipeline,
        pytest.raises(EngineUsageError, match="no cut of the net fits.*num_micro_batches"),
    ):
        pipeline.forward_backward(inputs, None, square)


def test_weight_decay_of_our_optimizers_is_for_matrices():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    inputs = torch.zeros(2, 4)
    with Pipeline(net, 1, lr=0.5, weight_decay=0.5) as pipeline:
        pipeline.forward_backward(inputs, None, lambda outputs, labels: 0.0 * outputs.sum())
        pipeline.step()
        state = pipeline.weights()
    before = net.state_dict()
    for name in before:
        assert torch.equal(state[name], before[name] * (1.0 if name.endswith("bias") else 0.75)), name


def test_a_program_that_ends_without_closing_ends_with_its_own_exit_code():
    """The devices are inside a kernel as the program ends. Each exit code but its own would be an abort."""
    program = """
        import sys, torch
        from torch import nn
        from torchround import Pipeline
        pipeline = Pipeline(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]), 3)
        for _ in range(2):
            pipeline.forward_backward(*torch.randn(2, 384, 512), nn.functional.mse_loss, 6, lazy=True)
            pipeline.step()
        sys.exit(3)
    """
    assert run_program("-c", inspect.cleandoc(program), code=3).stderr == ""
