"""Waits for the link: what keeping adds to a stage beside the transfers that it has anyway."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_costs import costs, partitions
from torchround.pipeline.costs import Costs, KeptCost, LayerCost, stage_seconds
from torchround.pipeline.partition import Partition, StageKind
from torchround.pipeline.simulation.kept_link import KeptLink, LinkWaits


def blocks(kept_bytes, boundary_bytes=0, weight_bytes=0):
    """Build three blocks of 1 s and 2 s and a head; each block can keep a part that is half of its forward."""
    parts = (KeptCost("down", kept_bytes, 0.5),)
    block = LayerCost("block", 1.0, 2.0, weight_bytes=weight_bytes, boundary_bytes=boundary_bytes, keepable=parts)
    return Costs((block, block, block, LayerCost("head", 1.0, 2.0))).keeping([("down",)] * 3 + [()])


# Stages: two blocks forward, one block forward, the head, one block backward (2.5 s), two blocks backward (5 s).
STAGES = Partition((2, 1), 1, (1, 2))


@pytest.mark.parametrize(
    ("costs", "waits"),
    [
        (blocks(10), [0, 0, 0, 0, 0]),  # 1 s of transfer for each second of forward: just hidden
        (blocks(12), [0.4, 0.2, 0, 0, 0]),
        (blocks(30), [4, 2, 0, 0.5, 1]),
        # Outputs of 0.2 s go down too; a backward stage brings up its gradient, and its input unless that is the tokens.
        (blocks(10, boundary_bytes=2), [0.2, 0.2, 0, 0, 0]),
        # Weights of 2 s for each micro-batch of the round go up: forward stages wait for them even if nothing is kept.
        (blocks(10, weight_bytes=40), [0, 0, 0, 0.5, 1]),
    ],
)
def test_a_stage_waits_for_what_its_computation_does_not_hide(costs, waits):
    assert LinkWaits(costs, KeptLink(10.0), "stage", 2).of(STAGES, 1) == pytest.approx(waits)


@given(data=st.data(), costs=costs(), recompute=st.sampled_from(["stage", "layer"]))
def test_a_stage_takes_the_longer_of_its_computation_and_its_kept_bytes_if_nothing_else_moves(data, costs, recompute):
    idle = {"weight_bytes": 0, "gradient_bytes": 0, "boundary_bytes": 0}
    costs = replace(costs, layers=tuple(replace(layer, **idle) for layer in costs.layers))
    partition = data.draw(partitions(costs.num_layers))
    waits = LinkWaits(costs, KeptLink(20.0), recompute, 4).of(partition, 2)
    for stage, wait_s in zip(partition.stages(), waits, strict=True):
        kept = sum(layer.kept_bytes for layer in costs.layers[stage.start : stage.stop])
        computed_s = sum(stage_seconds(costs, stage, recompute))
        link_s = 0.0 if stage.kind is StageKind.FUSED else kept / 20.0
        assert computed_s + wait_s == pytest.approx(max(computed_s, link_s), abs=1e-9)
