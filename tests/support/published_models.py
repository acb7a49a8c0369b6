"""The layer times that RoundPipe's authors measured on RTX 4090s (docs/schedules.md says how), and their partitions."""

from pathlib import Path

import pytest

from torchround.planning.costs import Costs
from torchround.planning.partition import Partition

# Forward stages, then backward stages after the head's, from RoundPipe's artifact.
PARTITIONS = {
    "qwen3_1_7b": ((7,) * 4, (3,) * 8 + (2, 2)),
    "llama3_1_8b": ((5,) * 4 + (6, 6), (2,) * 16),
    "gpt_oss_20b": ((4,) + (5,) * 4, (1,) * 24),
    "qwen3_32b": ((2, 2) + (3,) * 20, (1,) * 64),
    "qwen3_235b_lora": ((2,) * 47, (1,) * 94),
}


def published_costs(model):
    folder = Path(__file__).parents[2] / "docs" / "costs"
    return Costs.from_json((folder / f"rtx4090_{model}.json").read_text(encoding="utf-8"))


def published_partition(model):
    forward, backward = PARTITIONS[model]
    return Partition(forward, 1, backward)


def by_night(cases):
    first, *others = cases
    rows = [[case] if isinstance(case, str) else case for case in others]
    return [first, *(pytest.param(*row, marks=pytest.mark.nightly) for row in rows)]
