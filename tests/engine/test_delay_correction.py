"""Predicted device weights in `async`: resumes and validation. Results: `test_rows.py`."""

from typing import Literal

import pytest
import torch

from tests.support.toy import PARTITIONS, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.config import OptimizerTable
from torchround.config.key_types import Beta, Pair
from torchround.optim import Optimizer, make_optimizer
from torchround.optim.rules.muon import OtherRateRule
from torchround.planning.update_modes import ASYNC, ASYNC_PREDICT

PARTITION = PARTITIONS["backward coarser"]
STEPS, LR = 6, 1e-2
BATCHES = toy_batches(STEPS, micro_batches=3)


class ScaledTable(OptimizerTable):
    """AdamW at a part of the learning rate."""

    can_predict = True

    name: Literal["scaled-adamw"] = "scaled-adamw"
    """Optimizer."""

    betas: Pair[Beta] = (0.9, 0.95)
    """Decay rates of the moments."""


class ScaledAdamW(Optimizer):
    """An optimizer whose rule has fields, `eps` and `lr_ratio`, that its table lacks."""

    table = ScaledTable

    def rule_of(self, parameter):
        return OtherRateRule(self.settings.betas, 1e-3, 0.0, lr_ratio=0.5)


def test_a_rule_with_further_fields_than_its_table_predicts_after_a_resume():
    table, model = ScaledTable(), toy_model()
    store = toy_store(model, mode=ASYNC_PREDICT, optimizer=make_optimizer(table))
    with toy_engine(PARTITION, 1, model=model, store=store, optimizer=table) as engine:
        train(engine, toy_batches(3, micro_batches=2))
    resumed = toy_store(model, mode=ASYNC_PREDICT, optimizer=make_optimizer(table), seed=1)
    for name, view in resumed.named_views().items():
        view.copy_(store.named_views()[name])
    resumed.resume(3, **store.resume_state())
    for found, expected in zip(resumed.trained, store.trained, strict=True):
        assert torch.equal(found.version(3), expected.version(3))
        assert not torch.equal(found.version(3), found.weight)


@pytest.mark.parametrize("mode", [ASYNC, ASYNC_PREDICT], ids=["to none", "from none"])
def test_a_run_may_begin_or_end_to_predict_at_a_resume(mode):
    """The step under way reads the older weights of the checkpoint; the newest follow the new rule."""
    before = ASYNC if mode.predicts else ASYNC_PREDICT
    stores = [toy_store(toy_model(), mode=kind) for kind in (before, mode)]
    with toy_engine(PARTITION, 2, store=stores[0]) as engine:
        train(engine, BATCHES[:4], LR)
    for name, view in stores[1].named_views().items():
        view.copy_(stores[0].named_views()[name])
    stores[1].resume(4, **stores[0].resume_state())
    for old, new in zip(stores[0].trained, stores[1].trained, strict=True):
        assert torch.equal(new.version(3), old.version(3))
        assert torch.equal(new.version(4), new.weight)
    with toy_engine(PARTITION, 2, store=stores[1]) as engine:
        train(engine, BATCHES[4:], LR)
    predicted = [not torch.equal(b.version(STEPS), b.weight) for b in stores[1].trained]
    assert predicted == [mode.predicts] * len(predicted)
