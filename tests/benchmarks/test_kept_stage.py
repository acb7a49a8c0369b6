"""A backward stage that keeps everything: both sides train the same, one computes less, and each bound is checked."""

from argparse import Namespace

from benchmarks.kept_stage import MOST_RATIO, measure, missed_bounds
from tests.support.kept_blocks import kernels
from torchround.engine.worker.compute import ForwardWithGraph


def test_the_side_that_keeps_skips_the_products_of_the_stage_and_no_loss_changes(monkeypatch):
    products = []
    run_to = ForwardWithGraph.run_to

    def counted(graph, stop):
        with kernels() as names:
            run_to(graph, stop)
        products.append(len(names))
        return graph

    monkeypatch.setattr(ForwardWithGraph, "run_to", counted)
    found = measure(Namespace(blocks=1, hidden_size=256, tokens=16, microbatches=1, dtype="float32", turns=1))
    assert found["losses_equal"] and found["ratio"] > 0
    # Of each step's stages: the head, the blocks, the embedding. Seven products and attention, or none of them.
    assert [tuple(products[at : at + 3])[1] for at in range(0, len(products), 3)] == [0, 8, 8, 0]


def test_the_bounds_are_the_ratio_of_the_stages_and_equal_losses():
    good = {"ratio": MOST_RATIO, "losses_equal": True}
    assert missed_bounds(good) == []
    assert len(missed_bounds({"ratio": MOST_RATIO + 0.001, "losses_equal": False})) == 2
