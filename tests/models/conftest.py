"""Helpers of model tests: their functions as one fixture, training beside a loop, and the CPU as an accelerator."""

from dataclasses import replace

import pytest

from tests.support import model_tools
from tests.support.reference import Reference
from tests.support.toy import assert_same_state, toy_engine, toy_store, train
from torchround.layer import with_dropout_seeds
from torchround.models.kernels import operation


@pytest.fixture(scope="session")
def tools():
    return model_tools


@pytest.fixture(scope="module", autouse=True)
def borrowed_models():
    """Cut and count each borrowed model once. A test that is about this uses `cut_anew`."""
    with pytest.MonkeyPatch.context() as patch:
        model_tools.know_borrowed_models(patch)
        yield patch


@pytest.fixture
def cut_anew(borrowed_models):
    """Let a test cut and count its models as the product does."""
    borrowed_models.undo()
    yield
    model_tools.know_borrowed_models(borrowed_models)


@pytest.fixture
def fused(monkeypatch):
    """Let layers take an accelerator's way on the CPU: one of a kind without Triton."""
    monkeypatch.setattr(operation, "is_accelerator", lambda kind: True)


@pytest.fixture
def train_as_a_loop():
    """`cuts` are the document lengths of micro-batches, of every other step the second list of two."""

    def run(model, partition, *cuts, steps=2, devices=2, stale=0, **options):
        batches = []
        for step in range(steps):
            documents = enumerate(cuts[step % len(cuts)])
            parts = [model_tools.micro_batch(cut, 50, seed=10 * step + index) for index, cut in documents]
            batches.append(with_dropout_seeds([replace(part, max_documents=2) for part in parts], seed=7, step=step))
        store = toy_store(model, **options)
        loop = Reference.of(model, store, **({"stale": stale} if stale else {}))
        with toy_engine(partition, devices, model=model, store=store, stale_layers=stale) as engine:
            losses = train(engine, batches)
        assert losses == loop.train(batches)
        assert_same_state(store.named_views(), loop.state())

    return run
