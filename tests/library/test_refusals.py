"""Nets that cannot work are refused before anything runs: each message names the layer and what to do."""

import warnings

import pytest
import torch
from torch import nn

from torchround import Pipeline
from torchround.engine.errors import EngineUsageError
from torchround.library.refusals import PipelineUsageError, check_loss, check_net
from torchround.optim import SlowerOptimizerWarning


class Hides(nn.Module):
    """A module with a member that PyTorch does not know of."""

    def __init__(self, member):
        super().__init__()
        self.members = {"first": [member]}

    def forward(self, hidden):
        return hidden


class Backwards(nn.Sequential):
    """A Sequential that runs its layers in reverse."""

    def forward(self, hidden):
        for layer in reversed(self):
            hidden = layer(hidden)
        return hidden


def linear(change=lambda layer: None):
    layer = nn.Linear(2, 2)
    change(layer)
    return layer


def hooked(method):
    return linear(lambda layer: getattr(layer, method)(lambda *args: None))


def with_weight(value, trained=True):
    return linear(lambda layer: setattr(layer, "weight", nn.Parameter(value, requires_grad=trained)))


def own_parameter():
    net = nn.Sequential(linear())
    net.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return net


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (linear, "Linear; give an nn.Sequential"),
        (lambda: Backwards(linear()), "forward of its own"),
        (nn.Sequential, "an nn.Sequential of layers"),
        (own_parameter, "scale belongs"),
        (lambda: torch.compile(nn.Sequential(linear())), "OptimizedModule"),
        (lambda: nn.DataParallel(nn.Sequential(linear())), "DataParallel"),
        # A part inside a layer is named by its path.
        (lambda: nn.Sequential(nn.Sequential(linear(), hooked("register_forward_hook"))), r"0 \(Sequential\), 1 has"),
    ],
)
def test_a_net_that_cannot_work_is_refused(make, message):
    with pytest.raises(PipelineUsageError, match=message):
        check_net(make())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(linear()), "OptimizedModule"),
        (lambda: linear(nn.Module.compile), "compiled"),
        (lambda: nn.DataParallel(linear()), "DataParallel"),
        (lambda: hooked("register_forward_hook"), "forward hook"),
        (lambda: hooked("register_forward_pre_hook"), "forward pre hook"),
        (lambda: hooked("register_full_backward_hook"), "backward hook"),
        (lambda: hooked("register_full_backward_pre_hook"), "backward pre hook"),
        (lambda: linear(lambda layer: layer.weight.register_hook(lambda gradient: gradient)), "weight has a hook"),
        (lambda: nn.LazyLinear(2), "a UninitializedParameter"),
        (lambda: nn.Linear(2, 2, device="meta"), "on meta"),
        (lambda: linear().double(), "torch.float64"),
        (lambda: with_weight(torch.ones(2, 2, dtype=torch.complex64)), "torch.complex64"),
        (lambda: with_weight(torch.ones(2, 2, dtype=torch.int8), False), "torch.int8"),
        (lambda: with_weight(torch.eye(2).to_sparse()), "torch.sparse_coo"),
        (lambda: Hides(linear()), "members holds a Linear"),
        (lambda: Hides(nn.Parameter(torch.ones(1))), "members holds a Parameter"),
        (lambda: Hides(torch.ones(1)), "members holds a Tensor"),
    ],
)
def test_a_layer_that_cannot_work_is_refused_by_name(make, message):
    layer = make()
    net = nn.Sequential(nn.Identity(), layer)
    with pytest.raises(PipelineUsageError, match=rf"^layer 1 \({type(layer).__name__}\).*{message}"):
        check_net(net)


def test_running_statistics_are_refused_for_training_alone():
    net = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(4, 4))
    with Pipeline(net) as pipeline:
        pipeline.forward(torch.randn(3, 2, 4))
        with pytest.raises(PipelineUsageError, match="layer 0 .*running statistics.*GroupNorm"):
            pipeline.forward_backward(torch.randn(3, 2, 4), None, sum_of)


def test_a_loss_is_a_callable_without_parameters():
    check_loss(nn.CrossEntropyLoss(weight=torch.ones(3)))
    with pytest.raises(PipelineUsageError, match=r"loss_fn \(Linear\) has parameters \(weight, bias\)"):
        check_loss(linear())


class WithoutRate(torch.optim.SGD):
    """An optimizer whose rate has no parameter."""

    def __init__(self, params):
        super().__init__(params, lr=0.5)


def test_an_optimizer_without_a_parameter_for_the_rate_keeps_its_own():
    with Pipeline(nn.Sequential(nn.Linear(2, 2)), optimizer=WithoutRate) as pipeline:
        pipeline.forward_backward(torch.ones(1, 2), None, sum_of)
        assert {group["lr"] for group in pipeline.optimizer.param_groups} == {0.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": "fast"}, "lr = 'fast'"),
        ({"lr": -1.0}, "lr = -1.0"),
        ({"max_norm": float("nan")}, "max_norm = nan"),
        ({"devices": 0}, "devices = 0"),
        ({"devices": "cuda"}, "devices = 'cuda'"),
        ({"devices": ["cuda:0", "cuda:1"]}, "CUDA_VISIBLE_DEVICES"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, "give the class"),
        ({"optimizer": torch.optim.SGD, "betas": (0.9, 0.9)}, "SGD has no betas; give a callable of named"),
        ({"optimizer": WithoutRate, "lr": 1e-2}, "WithoutRate has no lr"),
        ({"optimizer": "adam"}, "'adamw'"),
        ({"state": "tiny"}, "state = 'tiny'"),
        ({"optimizer": torch.optim.SGD, "state": "compact"}, "own optimizers"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"optimizer": "muon", "betas": (0.9,)}, r"muon.*betas = \(0\.9,\)"),
    ],
)
def test_settings_that_are_not_legal_are_refused_at_once(settings, message):
    with pytest.raises(PipelineUsageError, match=message):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), **settings)


def test_a_net_without_trained_parameters_computes_but_does_not_train():
    with Pipeline(nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)) as pipeline:
        assert pipeline.forward(torch.ones(2, 2)).shape == (2, 2)
        with pytest.raises(PipelineUsageError, match="does not depend on anything that is trained"):
            pipeline.forward_backward(torch.ones(2, 2), None, lambda outputs, _: outputs.sum())


def test_a_closed_pipeline_takes_no_batch_and_a_failing_loss_is_named():
    def broken(outputs, labels):
        raise ValueError("no labels")

    with Pipeline(nn.Sequential(nn.Linear(2, 2))) as pipeline:
        pipeline.forward(torch.ones(2, 2))
        with pytest.raises(PipelineUsageError, match=r"layer 0 \(Linear\): ValueError: no labels"):
            pipeline.forward_backward(torch.ones(2, 2), None, broken)
    with pytest.raises(EngineUsageError, match="closed"):
        pipeline.forward(torch.ones(2, 2))
    assert pipeline.weights()["0.weight"].shape == (2, 2)


def test_a_step_that_was_left_out_is_told(caplog):
    with Pipeline(nn.Sequential(nn.Linear(2, 2))) as pipeline:
        pipeline.forward_backward(torch.full((2, 2), float("nan")), None, lambda outputs, _: outputs.sum())
        pipeline.step()
        pipeline.weights()
    assert "the update of step 1 was left out: the loss is not finite" in caplog.text


INPUTS = torch.ones(2, 2)


def sum_of(outputs, labels):
    return outputs.sum()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda pipeline: pipeline.train(), AttributeError, "train; leave it out"),
        (lambda pipeline: pipeline.to("cuda"), AttributeError, "devices="),
        (lambda pipeline: pipeline.zero_grad(), AttributeError, r"step\(\) leaves no gradient"),
        (lambda pipeline: pipeline.backward(), AttributeError, "forward_backward"),
        (lambda pipeline: pipeline.step(lambda: None), PipelineUsageError, "lr = .*legal: a finite number"),
    ],
)
def test_a_call_of_another_loop_is_answered_with_what_takes_its_place(call, error, words):
    with Pipeline(nn.Sequential(nn.Linear(2, 2)), 1) as pipeline, pytest.raises(error, match=words):
        call(pipeline)


def test_a_loop_whose_optimizer_is_its_own_is_told_that_nothing_trains():
    with Pipeline(nn.Sequential(nn.Linear(2, 2)), 1) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters())
        with warnings.catch_warnings(record=True) as warned:
            for _ in range(4):
                pipeline.forward_backward(INPUTS, None, sum_of)
                optimizer.step()
    [warning] = warned
    assert warning.filename == __file__ and "no step() of the Pipeline" in str(warning.message)


def test_a_slower_optimizer_is_told_where_it_is_asked_for():
    with pytest.warns(SlowerOptimizerWarning) as warned:
        Pipeline(nn.Sequential(nn.Linear(2, 2)), 1, optimizer=torch.optim.SGD)
    assert [warning.filename for warning in warned] == [__file__]
