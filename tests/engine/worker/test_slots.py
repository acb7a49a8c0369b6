"""Two slots in one buffer: the space that consecutive stages take is what the planner counts."""

from itertools import pairwise

import pytest

from tests.support import toy
from tests.support.toy import BLOCKS, PARTITIONS, VOCABULARY, WIDTH, toy_batches, train


def numel_of(partition):
    """Return the elements of each stage's weights, and of its gradients, without the alignment of parameters."""
    block = WIDTH + 3 * WIDTH * WIDTH + 3 * WIDTH + 3 * WIDTH * WIDTH
    layers = [VOCABULARY * WIDTH, *[block] * BLOCKS, WIDTH + VOCABULARY * WIDTH]
    weights = [sum(layers[stage.start : stage.stop]) for stage in partition.stages()]
    return weights, weights[len(partition.forward) :]


@pytest.mark.parametrize("partition", ["one layer a stage", "backward coarser"])
def test_one_device_holds_the_two_largest_consecutive_stages_and_no_more(partition):
    with toy.toy_engine(PARTITIONS[partition], 1) as engine:
        # Nothing but the slots: the rest is allocated when the first pass is known.
        allocated = engine.devices[0].peak_bytes()
        engine.evaluate(toy_batches(1, 2)[0])
        train(engine, toy_batches(2, 2))
        engine.evaluate(toy_batches(1, 2)[0])
        train(engine, toy_batches(1, 2))
    weights, gradients = numel_of(PARTITIONS[partition])
    in_a_row = [*pairwise([*weights, weights[0]]), (weights[len(PARTITIONS[partition].forward)], weights[0])]
    with_gradients = pairwise([*gradients, gradients[0]])
    expected = 4 * (max(map(sum, in_a_row)) + max(map(sum, with_gradients)))
    # Parameters begin at aligned elements, and each slot at an aligned byte.
    assert expected <= allocated <= expected + 4 * 4 * 64 * 4 * (BLOCKS + 2)
