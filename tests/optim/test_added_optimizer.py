"""An optimizer that a program adds: Lion, as docs/optimizers.md ("Add an optimizer") writes it.

It is trained through the config, the engine, checkpoints and a resume. Source: Chen et al., arXiv 2302.06675.
"""

import pytest
import torch

from tests.support.pages import example
from tests.support.reference import Reference
from tests.support.small_run import ASYNC
from tests.support.toy import toy_batches, toy_engine, toy_model, toy_store, train
from torchround.optim import make_optimizer
from torchround.planning.partition import Partition

LionTable = example("docs/optimizers.md", "class LionTable").LionTable

LION = "--optimizer.name=lion"
COMPACT = "--optimizer.state=compact"
NIGHT = pytest.mark.nightly
BF16 = "--training.dtype=bfloat16"


class PlainLion(torch.optim.Optimizer):
    """Lion, written once more."""

    def __init__(self, named):
        super().__init__(named, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            moved = torch.sign(0.9 * momentum + (1 - 0.9) * gradient)
            parameter.mul_(1 - 1e-2 * (0.1 if parameter.ndim > 1 else 0.0)).sub_(1e-2 * moved)
            momentum.mul_(0.99).add_((1 - 0.99) * gradient)


def test_the_engine_trains_with_it_as_a_plain_loop_does():
    model, table = toy_model(), LionTable(weight_decay=0.1)
    store = toy_store(model, optimizer=make_optimizer(table))
    loop = Reference.of(model, store, PlainLion)
    batches = toy_batches(4, 3)
    with toy_engine(Partition((4,), 3, (4,)), 2, model=model, store=store, optimizer=table) as engine:
        losses = train(engine, batches)
    assert losses == pytest.approx(loop.train(batches), rel=1e-5)
    momenta = {name for name in store.named_views() if name.startswith("momentum/")}
    assert momenta == {f"momentum/{name}" for name in loop.weights}
    assert not any(name.startswith("exp_avg") for name in store.named_views())


@pytest.mark.parametrize(
    "flags", [(BF16, COMPACT, ASYNC), *(pytest.param(f, marks=NIGHT) for f in [(), (BF16, ASYNC)])]
)
def test_a_resumed_run_gives_the_bits_of_a_whole_one(small_runs, flags):
    assert small_runs("whole", LION, *flags, "--checkpoint.interval_steps=3") == 0
    assert small_runs.saved("whole") == [3, 5]
    state = small_runs.state("whole")
    assert any(name.startswith("momentum/") for name in state)
    folder = small_runs.checkpoint("whole", 3)
    assert small_runs("rest", LION, *flags, f"--checkpoint.load_path={folder}") == 0
    resumed = small_runs.state("rest")
    assert resumed.keys() == state.keys()
    assert not [name for name in state if not torch.equal(state[name], resumed[name])]
    assert small_runs.losses("rest") == {step: loss for step, loss in small_runs.losses("whole").items() if step > 3}
