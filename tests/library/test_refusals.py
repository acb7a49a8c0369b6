"""Nets that cannot work are refused before anything runs: each message names the layer and what to do."""

import math

import pytest
import torch
from torch import nn

from torchround import Pipeline
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.library.module_layer import check_net


class Backwards(nn.Sequential):
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
        (lambda: Backwards(linear()), "without a forward"),
        (nn.Sequential, "an nn.Sequential of layers"),
        (own_parameter, "tensors of its own"),
        (lambda: torch.compile(nn.Sequential(linear())), "OptimizedModule"),
        (lambda: nn.DataParallel(nn.Sequential(linear())), "DataParallel"),
    ],
)
def test_a_net_that_cannot_work_is_refused(make, message):
    with pytest.raises(EngineUsageError, match=message):
        check_net(make())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(linear()), "is compiled"),
        (lambda: linear(nn.Module.compile), "compiled"),
        (lambda: hooked("register_forward_hook"), "has hooks"),
        (lambda: hooked("register_forward_pre_hook"), "has hooks"),
        (lambda: hooked("register_full_backward_hook"), "has hooks"),
        (lambda: hooked("register_full_backward_pre_hook"), "has hooks"),
        (lambda: nn.Sequential(linear(), hooked("register_forward_hook")), ", 1 has hooks"),  # a part by its path
        (lambda: linear(lambda layer: layer.weight.register_hook(lambda gradient: gradient)), "hook of weight"),
        (lambda: nn.Linear(2, 2, device="meta"), "on meta"),
        (lambda: linear().double(), "torch.float64"),
        (lambda: with_weight(torch.ones(2, 2, dtype=torch.complex64)), "torch.complex64"),
        (lambda: with_weight(torch.ones(2, 2, dtype=torch.int8), False), "torch.int8"),
        (lambda: with_weight(torch.eye(2).to_sparse()), "torch.sparse_coo"),
    ],
)
def test_a_layer_that_cannot_work_is_refused_by_name(make, message):
    layer = make()
    net = nn.Sequential(nn.Identity(), layer)
    with pytest.raises(EngineUsageError, match=rf"^layer 1 \({type(layer).__name__}\).*{message}"):
        check_net(net)


def test_running_statistics_are_refused_for_training_alone():
    net = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(4, 4))
    with Pipeline(net) as pipeline:
        pipeline.forward(torch.randn(3, 2, 4))
        with pytest.raises(EngineUsageError, match="layer 0 .*running statistics.*GroupNorm"):
            pipeline.forward_backward(torch.randn(3, 2, 4), None, lambda outputs, _: outputs.sum())


def test_a_loss_with_parameters_is_refused_and_one_with_buffers_works():
    labels = torch.tensor([0, 1])
    with Pipeline(nn.Sequential(linear())) as pipeline:
        pipeline.forward_backward(torch.ones(2, 2), labels, nn.CrossEntropyLoss(weight=torch.ones(2)))
        pipeline.step()
    trained = linear()
    with Pipeline(nn.Sequential(linear())) as pipeline, pytest.raises(EngineUsageError, match="uses a trained tensor"):
        pipeline.forward_backward(torch.ones(2, 2), labels, lambda outputs, _: trained(outputs).sum())


def test_a_class_of_torch_gets_the_settings_that_are_given_and_keeps_its_own_defaults():
    with Pipeline(nn.Sequential(linear()), optimizer=torch.optim.SGD, momentum=0.5) as pipeline:
        [group] = pipeline.optimizer.param_groups
        assert (group["lr"], group["momentum"]) == (torch.optim.SGD([torch.ones(1)]).defaults["lr"], 0.5)
        assert group["param_names"] == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": "fast"}, ValueError, "lr"),
        ({"devices": "cuda"}, ValueError, "num_devices"),
        ({"optimizer": torch.optim.SGD, "betas": (0.9, 0.9)}, TypeError, "betas"),
        ({"optimizer": "adam"}, EngineUsageError, "'adamw'"),
        ({"beta": (0.9, 1.0)}, ValueError, "beta"),
        ({"state": "tiny"}, ValueError, "'exact' or 'compact'"),
        ({"optimizer": "muon", "betas": (0.9,)}, ValueError, "betas"),
        ({"update": "bounded"}, EngineUsageError, "bounded"),
        ({"max_norm": -1.0}, EngineUsageError, "max_norm"),
    ],
)
def test_settings_that_are_not_legal_are_refused_at_once(settings, error, message):
    with pytest.raises(error, match=message):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), **settings)


def test_a_net_without_trained_parameters_computes_but_does_not_train():
    with Pipeline(nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)) as pipeline:
        assert pipeline.forward(torch.ones(2, 2)).shape == (2, 2)
        with pytest.raises(EngineUsageError, match="does not depend on anything that is trained"):
            pipeline.forward_backward(torch.ones(2, 2), None, lambda outputs, _: outputs.sum())


def test_a_failing_loss_is_named_and_a_closed_pipeline_starts_again():
    def broken(outputs, labels):
        raise ValueError("no labels")

    with Pipeline(nn.Sequential(nn.Linear(2, 2))) as pipeline:
        pipeline.forward(torch.ones(2, 2))
        with pytest.raises(EngineUsageError, match=r"layer 0 \(Linear\): ValueError: no labels"):
            pipeline.forward_backward(torch.ones(2, 2), None, broken)
    assert pipeline.weights()["0.weight"].shape == pipeline.forward(torch.ones(2, 2)).shape
    pipeline.close()


def test_a_fault_on_a_device_ends_the_threads_and_the_next_batch_starts_others():
    calls = []

    def breaks_later(outputs, labels):
        calls.append(outputs)
        assert len(calls) != 4, "planted"  # the probe calls it twice
        return outputs.sum()

    pipeline = Pipeline(nn.Sequential(nn.Linear(2, 2)), 1)
    with pipeline, pytest.raises(PipelineError, match="planted"):
        pipeline.forward_backward(torch.ones(4, 2), None, breaks_later, 2)
    with pipeline:
        pipeline.forward_backward(torch.ones(4, 2), None, breaks_later, 2)
        pipeline.step()


def test_a_step_that_was_left_out_is_in_the_result():
    with Pipeline(nn.Sequential(nn.Linear(2, 2))) as pipeline:
        inputs = torch.full((2, 2), float("nan"))
        result = pipeline.forward_backward(inputs, None, lambda outputs, _: outputs.sum(), lazy=True)
        pipeline.step()
        assert result.update().skipped and not math.isfinite(result.loss())
