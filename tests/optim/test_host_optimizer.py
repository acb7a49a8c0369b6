"""The optimizer that works, and the one that its user sees: one state, hyperparameters of their own."""

import pytest
import torch
from torch import nn

from torchround.engine.errors import EngineUsageError
from torchround.optim import HostOptimizer, HostOptimizerError


def weights():
    return [("a.weight", torch.ones(2, 3)), ("a.bias", torch.zeros(3))]


def bound(make, on=None):
    optimizer = HostOptimizer(make)
    optimizer.bind(weights() if on is None else on)
    return optimizer


def sgd(named):
    return torch.optim.SGD(named, lr=0.5, momentum=0.9)


def gradients(value=1.0):
    return {"a.weight": torch.full((2, 3), value), "a.bias": torch.full((3,), value)}


def test_it_writes_the_given_memory_and_lets_go_of_the_gradients():
    on = weights()
    optimizer = bound(sgd, on)
    optimizer.step(optimizer.hyperparameters(), gradients())
    assert torch.equal(on[0][1], torch.full((2, 3), 0.5))
    assert torch.equal(on[1][1], torch.full((3,), -0.5))
    assert all(p.grad is None for group in optimizer.optimizer.param_groups for p in group["params"])
    assert optimizer.optimizer.param_groups[0]["param_names"] == ["a.weight", "a.bias"]


def test_a_step_uses_the_hyperparameters_that_were_taken():
    for lr in (0.5, torch.tensor(0.5)):
        on = weights()
        optimizer = bound(lambda named, lr=lr: torch.optim.SGD(named, lr=lr), on)
        taken = optimizer.hyperparameters()
        group = optimizer.optimizer.param_groups[0]
        group["lr"] = group["lr"].fill_(100.0) if isinstance(lr, torch.Tensor) else 100.0  # as schedulers do
        optimizer.step(taken, gradients())
        assert float(on[1][1][0]) == -0.5 and group["lr"] == 100.0


class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["mean"] = group.get("mean", torch.zeros(())) + 1.0
        return super().step(closure)


def test_what_a_step_changes_in_its_groups_stays_and_is_shown():
    optimizer = bound(lambda named: Counting(named, lr=0.5))
    first, second = (optimizer.hyperparameters(), optimizer.hyperparameters())  # both before the first step ends
    optimizer.step(first, gradients())
    optimizer.step(second, gradients())
    optimizer.step(optimizer.hyperparameters(), gradients())
    [group] = optimizer.optimizer.param_groups
    assert (group["count"], float(group["mean"]), group["lr"]) == (3, 3.0, 0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda named: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0), "not the given ones"),
        (lambda named: torch.optim.SGD([p.detach().clone() for _, p in named], lr=1.0), "not the given ones"),
        (lambda named: None, "got NoneType"),
    ],
)
def test_what_cannot_work_is_refused_by_name(make, words):
    with pytest.raises(HostOptimizerError, match=words) as raised:
        bound(make)
    assert isinstance(raised.value, EngineUsageError)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda named: torch.optim.LBFGS(p for _, p in named), r"LBFGS.step\(\) raised TypeError: .*closure"),
        (lambda named: torch.optim.SparseAdam([p for _, p in named]), r"SparseAdam.step\(\) raised .*dense"),
    ],
)
def test_a_step_that_fails_names_the_optimizer(make, words):
    optimizer = bound(make)
    with pytest.raises(HostOptimizerError, match=words):
        optimizer.step(optimizer.hyperparameters(), gradients())


def test_a_parameter_that_the_optimizer_leaves_out_stays_as_it_is():
    nothing = bound(sgd, [])
    assert nothing.hyperparameters() == []
    with pytest.raises(HostOptimizerError, match="none"):
        nothing.optimizer  # noqa: B018
    on = weights()
    optimizer = bound(lambda named: torch.optim.SGD(named[:1], lr=1.0), on)
    optimizer.step(optimizer.hyperparameters(), gradients())
    assert not on[1][1].any() and not torch.equal(on[0][1], torch.ones(2, 3))
    optimizer.optimizer.add_param_group({"params": [("late", nn.Parameter(torch.zeros(1)))]})
    with pytest.raises(HostOptimizerError, match="groups changed"):
        optimizer.hyperparameters()
