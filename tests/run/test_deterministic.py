"""`training.deterministic`: PyTorch's switch is on for the run alone, and plans count what a fixed order takes."""

import pytest
import torch

from tests.support.small_run import before_step, small_runs
from torchround.accelerators import deterministic_operations
from torchround.models import FAMILIES

__all__ = ["small_runs"]


@pytest.mark.parametrize("wanted", [False, True])
def test_operations_have_a_fixed_order_in_the_run_if_asked_for(small_runs, monkeypatch, wanted):
    seen = []

    def note():
        filled = torch.utils.deterministic.fill_uninitialized_memory
        seen.append((torch.are_deterministic_algorithms_enabled(), filled))

    before_step(monkeypatch, 2, note)
    given = ("--training.steps=2", f"--training.deterministic={str(wanted).lower()}")
    assert small_runs(f"wanted_{wanted}", *given) == 0
    assert seen == [(wanted, not wanted)]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_plan_counts_the_sums_of_each_processor_that_shares_a_head():
    family = FAMILIES["qwen3"]
    config = family.config_from_flavor("debug", num_heads=16, num_kv_heads=8, head_dim=64)
    block = family.build(config).layers[1]
    plain = block.work(1, 8192, 2, "cuda").workspace_bytes
    with deterministic_operations():
        # 160 processors for 16 heads: 10 sums in fp32.
        assert block.work(1, 8192, 2, "cuda").workspace_bytes - plain > 7 * 8192 * 16 * 64 * 4
    assert block.work(1, 8192, 2, "cuda").workspace_bytes == plain
