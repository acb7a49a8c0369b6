"""Nets that cannot work are refused before anything runs: each message names the layer and what to do."""

import copy
import warnings

import pytest
import torch
from torch import nn

from torchround import Pipeline
from torchround.engine.errors import EngineUsageError
from torchround.library.module_layer import wrap
from torchround.library.refusals import PipelineUsageError, check_loss, check_net, check_training
from torchround.optim import SlowerOptimizerWarning


class Hides(nn.Module):
    """A module with a member that PyTorch does not know of."""

    def __init__(self, member: object) -> None:
        super().__init__()
        self.members = {"first": [member]}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Backwards(nn.Sequential):
    """A Sequential that runs its layers in reverse."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            hidden = layer(hidden)
        return hidden


def hooked(method: str) -> nn.Module:
    layer = nn.Linear(2, 2)
    getattr(layer, method)(lambda *args: None)
    return layer


def with_parameter_hook() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


def compiled() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.compile()
    return layer


def with_weight(value: torch.Tensor, trained: bool = True) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(value, requires_grad=trained)
    return layer


def own_parameter() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 2))
    net.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return net


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


NETS = {
    "no Sequential": (linear, "the net is a Linear; give an nn.Sequential"),
    "a forward of its own": (lambda: Backwards(linear()), "Backwards has a forward of its own"),
    "no layer": (nn.Sequential, "has no layer"),
    "own parameter": (own_parameter, "scale belongs to the nn.Sequential itself"),
    "compiled": (lambda: torch.compile(nn.Sequential(linear())), "wrapped in OptimizedModule"),
    "DataParallel": (lambda: nn.DataParallel(nn.Sequential(linear())), "wrapped in DataParallel"),
}
LAYERS = {
    "compiled layer": (lambda: torch.compile(linear()), "wrapped in OptimizedModule"),
    "compiled in place": (compiled, "was compiled"),
    "DataParallel layer": (lambda: nn.DataParallel(linear()), "wrapped in DataParallel"),
    "forward hook": (lambda: hooked("register_forward_hook"), "has a forward hook"),
    "forward pre-hook": (lambda: hooked("register_forward_pre_hook"), "has a forward pre-hook"),
    "backward hook": (lambda: hooked("register_full_backward_hook"), "has a backward hook"),
    "backward pre-hook": (lambda: hooked("register_full_backward_pre_hook"), "has a backward pre-hook"),
    "hook of a parameter": (with_parameter_hook, "weight has a hook"),
    "lazy": (lambda: nn.LazyLinear(2), "weight has no shape yet"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight is on meta"),
    "float64": (lambda: linear().double(), r"weight is torch.float64; .*net.float\(\)"),
    "complex": (lambda: with_weight(torch.ones(2, 2, dtype=torch.complex64)), "weight is torch.complex64"),
    "integers": (lambda: with_weight(torch.ones(2, 2, dtype=torch.int8), False), "make it a buffer"),
    "sparse": (lambda: with_weight(torch.eye(2).to_sparse()), "weight has the layout torch.sparse_coo"),
    "hidden module": (lambda: Hides(linear()), "attribute members holds a module"),
    "hidden parameter": (lambda: Hides(nn.Parameter(torch.ones(1))), "attribute members holds a parameter"),
    "hidden tensor": (lambda: Hides(torch.ones(1)), "attribute members holds a tensor.*register_buffer"),
}


@pytest.mark.parametrize("case", NETS)
def test_a_net_that_cannot_work_is_refused(case) -> None:
    make, message = NETS[case]
    with pytest.raises(PipelineUsageError, match=message):
        check_net(make())


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_that_cannot_work_is_refused_by_name(case) -> None:
    make, message = LAYERS[case]
    layer = make()
    with pytest.raises(PipelineUsageError, match=rf"^layer 1 \({type(layer).__name__}\).*{message}"):
        check_net(nn.Sequential(nn.Identity(), layer))


def test_a_part_inside_a_layer_is_named_by_its_path() -> None:
    with pytest.raises(PipelineUsageError, match=r"layer 0 \(Sequential\), 1 has a forward hook"):
        check_net(nn.Sequential(nn.Sequential(linear(), hooked("register_forward_hook"))))


def test_ordinary_nets_are_not_refused() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    normed = nn.utils.parametrizations.weight_norm(linear())
    frozen = nn.BatchNorm2d(3).eval()
    net = nn.Sequential(inner, encoder, nn.LSTM(8, 8), normed, frozen, nn.Embedding(3, 4).bfloat16())
    check_net(net)
    wrap(net, lambda name: True)
    check_training(dict(net.named_children()))


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(3), nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True))])
def test_running_statistics_are_refused_for_training_alone(layer) -> None:
    check_net(nn.Sequential(layer))
    with pytest.raises(PipelineUsageError, match="layer 3 .*running statistics.*GroupNorm"):
        check_training({"3": layer})
    check_training({"3": copy.deepcopy(layer).eval()})


def test_a_layer_that_cannot_be_copied_is_refused() -> None:
    class Unique(nn.Identity):
        def __deepcopy__(self, memo: object) -> "Unique":
            raise TypeError("there is only one")

    with pytest.raises(PipelineUsageError, match=r"layer 0 \(Unique\) cannot be copied.*there is only one"):
        wrap(nn.Sequential(Unique()), lambda name: True)


def test_a_loss_is_a_callable_without_parameters() -> None:
    check_loss(nn.CrossEntropyLoss(weight=torch.ones(3)))
    with pytest.raises(PipelineUsageError, match=r"loss_fn \(Linear\) has parameters \(weight, bias\)"):
        check_loss(linear())
    with pytest.raises(PipelineUsageError, match="loss_fn is 3; give a callable"):
        check_loss(3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": "fast"}, "lr = 'fast'"),
        ({"lr": -1.0}, "lr = -1.0"),
        ({"max_norm": float("nan")}, "max_norm = nan"),
        ({"devices": 0}, "devices = 0"),
        ({"devices": "cuda"}, "devices = 'cuda'"),
        ({"devices": ["cuda:0", "cuda:1"]}, "CUDA_VISIBLE_DEVICES"),
        ({"partition": 3}, "partition = 3"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0)}, "give the class"),
        ({"optimizer": torch.optim.SGD, "betas": (0.9, 0.9)}, "SGD has no betas"),
    ],
)
def test_settings_that_are_not_legal_are_refused_at_once(settings, message) -> None:
    with pytest.raises(PipelineUsageError, match=message):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), **settings)


def test_a_net_without_trained_parameters_computes_but_does_not_train() -> None:
    with Pipeline(nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)) as pipeline:
        assert pipeline.forward(torch.ones(2, 2)).shape == (2, 2)
        with pytest.raises(PipelineUsageError, match="no parameter of the net is trained"):
            pipeline.forward_backward(torch.ones(2, 2), None, lambda outputs, _: outputs.sum())


def test_a_closed_pipeline_takes_no_batch() -> None:
    with Pipeline(nn.Sequential(nn.Linear(2, 2))) as pipeline:
        pipeline.forward(torch.ones(2, 2))
    with pytest.raises(EngineUsageError, match="closed"):
        pipeline.forward(torch.ones(2, 2))
    assert pipeline.weights()["0.weight"].shape == (2, 2)


def test_a_failing_loss_is_named() -> None:
    def broken(outputs, labels):
        raise ValueError("no labels")

    with (
        Pipeline(nn.Sequential(nn.Linear(2, 2))) as pipeline,
        pytest.raises(PipelineUsageError, match=r"loss_fn \(broken\) failed: ValueError: no labels"),
    ):
        pipeline.forward_backward(torch.ones(2, 2), None, broken)


def test_a_step_that_was_left_out_is_told(caplog) -> None:
    with Pipeline(nn.Sequential(nn.Linear(2, 2))) as pipeline:
        pipeline.forward_backward(torch.full((2, 2), float("nan")), None, lambda outputs, _: outputs.sum())
        pipeline.step()
        pipeline.weights()
    assert "the update of step 1 was left out: the loss is not finite" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, 'legal: "adamw".*, a class of torch.optim'),
        ({"state": "tiny"}, 'optimizer = "adamw": state = \'tiny\'; legal: "exact" or "compact"$'),
        ({"optimizer": torch.optim.SGD, "state": "compact"}, "for our own optimizers"),
        ({"betas": (0.9, 1.0)}, r"betas = \(0\.9, 1\.0\); legal: an array of 2"),
        ({"optimizer": "muon", "betas": (0.9,)}, r'"muon": betas = \(0\.9,\); legal: an array of 2'),
    ],
    ids=["unknown", "unknown format", "format of another's state", "out of range", "too few"],
)
def test_settings_of_our_own_optimizers_are_checked_by_their_tables(options, words) -> None:
    with pytest.raises(PipelineUsageError, match=words):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), **options)


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
        (
            lambda pipeline: pipeline.forward_backward(INPUTS, None, sum_of, lazy=True).backward(),
            PipelineUsageError,
            r"call step\(\)",
        ),
        (
            lambda pipeline: pipeline.forward_backward(input_args=(INPUTS,), label=None, loss_fn=sum_of),
            PipelineUsageError,
            "input_args: give inputs.*label: give labels",
        ),
        (lambda pipeline: pipeline.step(lambda: None), PipelineUsageError, "takes a rate, not a function"),
    ],
    ids=["train", "to", "zero_grad", "backward", "loss.backward", "RoundPipe's arguments", "RoundPipe's step"],
)
def test_a_call_of_another_loop_is_answered_with_what_takes_its_place(call, error, words) -> None:
    with Pipeline(nn.Sequential(nn.Linear(2, 2)), 1) as pipeline, pytest.raises(error, match=words):
        call(pipeline)


def test_a_loop_whose_optimizer_is_its_own_is_told_that_nothing_trains() -> None:
    with Pipeline(nn.Sequential(nn.Linear(2, 2)), 1) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters())
        with warnings.catch_warnings(record=True) as warned:
            for _ in range(4):
                pipeline.forward_backward(INPUTS, None, sum_of)
                optimizer.step()
    [warning] = warned
    assert warning.filename == __file__ and "no step() of the Pipeline" in str(warning.message)


def test_a_slower_optimizer_is_told_where_it_is_asked_for() -> None:
    with pytest.warns(SlowerOptimizerWarning) as warned:
        Pipeline(nn.Sequential(nn.Linear(2, 2)), 1, optimizer=torch.optim.SGD)
    assert [warning.filename for warning in warned] == [__file__]
